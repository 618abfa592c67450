"""Queues: one acknowledgement for each event."""
