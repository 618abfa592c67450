"""One partition in a folder: its head, its active segment, its sequences."""
