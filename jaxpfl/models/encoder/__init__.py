"""Encoders of the BERT family."""
