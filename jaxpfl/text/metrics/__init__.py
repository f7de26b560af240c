"""How well language models predict."""
