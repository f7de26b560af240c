"""The flow of information through a traced program; knows no release, and is handed its steps."""
