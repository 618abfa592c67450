"""Expressions: Spark SQL over one row's columns, computed with Arrow where no Spark session is available."""
