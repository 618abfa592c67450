"""Who writes and reads: producers, readers, and consumers in groups."""
