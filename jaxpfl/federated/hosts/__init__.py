"""Several processes that compute one run; `release` does not know them, and is handed them."""
