"""Spark over our log beside Spark's Kafka connector."""
