"""What keeps a log small: sealing, retention, compaction, limits."""
