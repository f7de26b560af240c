"""Sweeps: one experiment, carried out at every point of a grid.

config    what a sweep is, and the config of every point
points    carries out all points, one after the other in one process, and compares them
page      the table, and `report.html`
"""
