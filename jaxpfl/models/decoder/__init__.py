"""Decoder language models."""
