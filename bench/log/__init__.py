"""The log beside Kafka, and queues beside other brokers."""
