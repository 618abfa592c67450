"""Verification: whether two systems hold the same rows at one position, which keys differ, and how they are made equal again."""
