"""Real processes that are killed, and what must be true afterwards."""
