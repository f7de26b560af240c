"""What an experiment is: shared sections, YAML files, the command line."""
