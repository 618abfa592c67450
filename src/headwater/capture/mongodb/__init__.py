"""MongoDB as a stream of changes."""
