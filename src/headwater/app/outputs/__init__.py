"""Stages of an application that leave Spark: views, sinks, and whole transactions."""
