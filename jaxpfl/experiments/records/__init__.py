"""What a run writes and reads again: artifacts, checkpoints, lines, and what they say."""
