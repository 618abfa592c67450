"""The contract of queues."""
