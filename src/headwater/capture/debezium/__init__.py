"""Topics that Debezium fills as a source of captures."""
