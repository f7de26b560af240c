"""Several processes that compute one run; `release` does not know them, and is handed them.

Nothing is added up here: the devices of all processes are one mesh, see `release.vector`.
"""
