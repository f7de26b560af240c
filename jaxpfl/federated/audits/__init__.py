"""Releases on made-up clients: their cost and size, and an attacker's view of them."""
