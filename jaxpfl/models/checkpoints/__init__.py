"""Published models: their files, their weights, and adapters."""
