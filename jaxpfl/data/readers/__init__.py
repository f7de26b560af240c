"""From a source to a population, one file per format."""
