"""Views: maintained, queryable, subscribable results."""
