"""Sinks: where events leave for the world outside; each batch once, whoever dies in between."""
