"""Preference optimisation of language models."""
