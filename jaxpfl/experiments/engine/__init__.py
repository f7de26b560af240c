"""What carries rounds out: the run directory, its artifacts, metrics, and what they cost."""
