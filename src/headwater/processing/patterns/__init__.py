"""Row patterns: SQL's MATCH_RECOGNIZE over streams."""
