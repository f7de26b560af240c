"""A sweep of three points, of which some fail, and what they come to."""

import yaml

BASE = {
    "data": {"source": "digits?clients=60", "split": {"train": 0.7, "valid": 0.1, "test": 0.2}},
    "model": {
        "name": "cnn", "image_shape": [8, 8, 1], "classes": 10, "hidden": 8,
        "features": [[4, True]],
    },
    "privacy": {"epsilon": 8.0, "delta": 1.0e-3, "clip_norm": 0.5, "accountant": "rdp"},
    "training": {"rounds": 2, "clients_per_round": 10, "batch_size": 8, "max_examples": 16},
    "evaluation": {"declared_public": True, "every": 2},
}  # fmt: skip


def written(folder, sweep, base=BASE):
    """The path of a sweep over accuracy; its base lies beside it."""
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    path = folder / "grid.yaml"
    mapping = {"base": "base.yaml", "metric": "accuracy"} | sweep
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    return path


def result(config, _=None):
    value = config.training.clients_per_round / 100 + config.run.seed
    return {"metrics": {"accuracy": value}, "private": True, "privacy": "(8, 0)"}


def failing(*errors):
    """The points of 10 clients a round fail, once for each error."""
    left = list(errors)

    def result_of(config, _):
        if config.training.clients_per_round == 10 and left:
            raise left.pop(0)
        return result(config)

    return result_of
