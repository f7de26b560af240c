"""One folder per system: its config, its study and its page."""

CONFIG = "config.yaml"
"""The resolved config, at the root of a run's directory; its first line shows the stamp."""

RESULT = "result.json"
"""The public record of a finished run, at the root of its directory."""

SIMULATION = "simulation.json"
"""The record of simulations, which the privacy statement does not cover, if there are any."""

CORPUS = "corpus.jsonl"
"""The synthetic texts of a finished run that wrote some, at the root of its directory."""

ARTIFACTS = "artifacts"
"""The folder, in a run's directory, of the intermediate results."""
