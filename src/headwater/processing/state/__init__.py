"""State of operators: its files, versions and runs."""
