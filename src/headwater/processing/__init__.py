"""Processing: topics as Spark sees them; nothing else of Headwater imports PySpark."""
