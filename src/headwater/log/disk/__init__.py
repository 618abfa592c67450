"""The one way to the disk, and what must be right around it: locks, forks, threads."""
