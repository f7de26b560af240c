"""Texts that language models write."""
