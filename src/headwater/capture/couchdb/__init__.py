"""CouchDB as a stream of changes."""
