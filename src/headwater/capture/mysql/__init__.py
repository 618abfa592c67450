"""MariaDB and MySQL as a stream of changes, by the row binlog."""
