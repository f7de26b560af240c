"""Sweeps: one experiment, carried out at every point of a grid."""
