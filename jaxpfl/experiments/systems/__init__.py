"""One folder per system: its config, its study and its page."""
