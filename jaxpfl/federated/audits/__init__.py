"""Releases on made-up clients: what they would cost, and what an attacker would see."""
