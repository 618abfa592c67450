"""The contract of groups."""
