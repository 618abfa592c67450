"""Other ways in than databases, which are in `capture`: none yet."""
