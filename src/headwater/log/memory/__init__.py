"""The log in memory: the reference model."""
