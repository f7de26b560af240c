"""Joined words: federated language models show a tokenizer's bug."""
