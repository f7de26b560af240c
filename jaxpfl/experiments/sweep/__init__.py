"""One experiment at every point of a grid."""
