"""Two federated GANs show inverted pixels (Augenstein et al. 2020, section 6)."""
