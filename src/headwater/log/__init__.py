"""The log: the append-only truth from which everything else is derived."""
