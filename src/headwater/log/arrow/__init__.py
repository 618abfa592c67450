"""Rows and columns: what a topic's schema makes of them."""
