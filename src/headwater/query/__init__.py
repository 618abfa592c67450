"""Questions about a log in SQL, with conditions and limits."""
