"""A chosen public corpus: single public texts, chosen by one release of clients' moments."""
