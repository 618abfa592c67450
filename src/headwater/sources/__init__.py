"""Where events come from the world outside: databases read as streams of changes."""
