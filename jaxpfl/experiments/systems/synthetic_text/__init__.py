"""The study of synthetic text: how much private clients improve a downstream model."""
