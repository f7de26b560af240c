"""Private federated learning in JAX: simulate it, measure it, trust it."""
