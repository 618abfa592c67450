"""From Spark to the log: staging, order, and the commit of a batch."""
