"""PostgreSQL as a stream of changes, by logical replication."""
