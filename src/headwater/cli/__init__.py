"""People at a terminal: the command line."""
