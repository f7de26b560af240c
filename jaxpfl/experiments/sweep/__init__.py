"""Sweeps: one experiment, carried out at every point of a grid.

config      what a sweep is, and the config of every point
directory   what its directory holds, and how several processes share it
points      carries out the points, one after the other in one process, or in processes of Ray
results     compares the points that are there: values, means, the gap closed
page        `report.html`, its figure, and the same for a terminal
"""
