"""From configs to run directories."""
