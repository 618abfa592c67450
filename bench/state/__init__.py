"""Operators beside Spark's own state."""
