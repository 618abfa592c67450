"""From the log to Spark: streams and batches of topics, and operators inside them."""
