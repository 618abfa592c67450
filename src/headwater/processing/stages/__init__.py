"""Stages as they run: planned, supervised, looked after."""
