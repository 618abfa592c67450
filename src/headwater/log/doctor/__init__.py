"""What is wrong with a log's files, and what can be mended."""
