"""Databases: what views, sinks and captures share about systems outside of the log; addresses, column types, keys as text."""
