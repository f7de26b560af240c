"""Inverted pixels: federated GANs show what a classifier's errors are made of."""
