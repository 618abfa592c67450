"""The graph of an application: topics, tables and stages."""
