"""Metrics of language models."""
