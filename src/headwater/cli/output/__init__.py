"""What the command line shows: rows, progress, a running application."""
