"""Federated language models show joined words (Augenstein et al. 2020, section 5)."""
