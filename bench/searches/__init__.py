"""The figures of saved searches, beside Lucene Monitor."""
