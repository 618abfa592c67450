"""The log in a folder, shared by many processes without a server."""
