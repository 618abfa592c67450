"""The figures of row patterns, beside Flink and Esper."""
