"""Captures beside Debezium."""
