"""People and programs over HTTP, on this machine only unless told otherwise."""
