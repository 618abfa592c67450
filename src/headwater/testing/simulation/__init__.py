"""Simulated disks, processes and histories, by seed."""
