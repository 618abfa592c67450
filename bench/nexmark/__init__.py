"""Nexmark beside Spark and Flink."""
