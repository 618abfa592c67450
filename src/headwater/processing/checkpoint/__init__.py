"""What is known of a stage's progress: markers, offsets, where it begins."""
