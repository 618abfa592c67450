"""Databases as streams: each captured table is a topic, with its history and the source's transactions beside it."""
