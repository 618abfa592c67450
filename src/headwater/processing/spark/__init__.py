"""What has to do with Spark itself: its session, its JVM, its Python processes."""
