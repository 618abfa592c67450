"""Copies of a log: mirrors and backups."""
