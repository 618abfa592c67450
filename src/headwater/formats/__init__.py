"""Rows as text: CSV, JSON and what else people bring."""
