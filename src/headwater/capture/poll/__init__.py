"""Tables without a log that can be read, by a column that increases."""
