"""Queues on Kafka, by share groups."""
