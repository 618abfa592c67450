"""The files that hold events: frames, sealed segments, the archive, and their indexes."""
