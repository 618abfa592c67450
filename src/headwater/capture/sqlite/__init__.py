"""SQLite as a stream of changes, by triggers."""
