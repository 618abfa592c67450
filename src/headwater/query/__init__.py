"""Queries over a log in SQL, with filters and limits."""
