"""Pages, plots and tables."""
