"""Synthetic text by POPri and its rivals (Hou et al. 2025)."""
