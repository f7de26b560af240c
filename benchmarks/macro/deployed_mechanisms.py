"""One word model, 400 rounds and one epsilon by deployed mechanisms; and whom noise harms.

    python -m benchmarks.macro.deployed_mechanisms         (needs JAXPFL_DATA)

Clients are nicks of #ubuntu. Noise is real, and each run has a ledger of its own. All arms share
settings that were not searched: one pair of clip norm and rate was looked at on validation nicks,
with `poisson`. The arms, with a separation of 20:

    poisson            independent noise on Poisson cohorts
    cyclic_poisson     amplified bands: at most every 20 rounds, and then with some probability
    banded, blt, tree  correlated noise, at most every 20 rounds
    noiseless          NOT PRIVATE: the same rounds without noise

`poisson` and `cyclic_poisson` are private when a client is added or removed, the others but the
last when one is zeroed, which is another promise. `mean_rms` is computed: the deviation of the
noise on the sum of the rounds' means so far, root mean square over the rounds, in clip norms. State
is what the noise keeps in memory between rounds, beside the model. Rows of "group" have the scores
of test nicks by how many messages they hold, of the run `poisson`, the noiseless one of the same
seed (a SIMULATION) and the untrained model.
"""

import dataclasses
import math
import pathlib
import tempfile
import time
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.micro.strategies import variances

SEPARATION, BUFFERS = 20, 3
CONFIG = {
    "data": {
        "source": "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz",
        "public": "$JAXPFL_DATA/public_techdocs_nova/nova_docs.jsonl.gz?client=doc",
        "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
    },
    "model": {
        "name": "cifg_lm", "vocab_size": 500, "sequence_length": 10, "embedding": 16, "hidden": 32,
        "projection": 16, "unigram_prior": True,
    },
    "training": {
        "rounds": 400, "clients_per_round": 140, "batch_size": 4, "max_examples": 4,
        "client": {"name": "sgd", "learning_rate": 1.0},
        "server": {"name": "nesterov", "learning_rate": 1.0, "momentum": 0.9},
    },
    "privacy": {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 0.3},
    "evaluation": {"every": 0},
    "run": {"devices": 1, "checkpoint_every": 1_000},
}  # fmt: skip
ARMS: dict[str, tuple[str, str]] = {
    "poisson": ("poisson", "independent"),
    "cyclic_poisson": ("cyclic_poisson", "banded"),
    "banded": ("min_separation", "banded"),
    "blt": ("min_separation", "blt"),
    "tree": ("min_separation", "tree"),
    "noiseless": ("poisson", "independent"),
}
GROUPS = ((1, 1), (2, 4), (5, 12), (13, 10**6))


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] = tuple(ARMS)
    part: str = "test"
    rounds: int = 400
    clip_norm: float = 0.3
    rate: float = 1.0
    store: bool = True


def main(config: Config) -> None:
    harness.use_cpu_devices(1)
    study, evaluator = prepared(config)
    for seed in config.seeds:
        finished: dict[str, tuple[Any, Any]] = {}
        for arm in config.arms:
            row, start, params = measured(config, study, evaluator, arm, seed)
            finished[arm] = start, params
            rows = [row]
            if {"noiseless", "poisson"} == finished.keys():
                groups = by_group(evaluator, finished["poisson"], finished["noiseless"][1])
                rows += [{"seed": seed, **group} for group in groups]
            if config.store:
                harness.record("deployed_mechanisms", rows)
            for one in rows:
                print(one, flush=True)


def prepared(config: Config) -> tuple[Any, Any]:
    """The clients and the model, and what scores it."""
    import jaxpfl as jp
    from jaxpfl.experiments.registry import from_mapping, system_of

    study = system_of("federated_training").part("study")
    study = study.prepare(from_mapping(CONFIG, "deployed_mechanisms"))
    public = jp.DeclaredPublic(with_group(study.encode(study.held_out[config.part])), config.part)
    model = study.network.model
    return study, jp.Evaluator(model, public, max_examples=10_000, batch_size=32)


def measured(config: Config, study: Any, evaluator: Any, arm: str, seed: int) -> tuple:
    """An arm's row, and its parameters before and after the rounds."""
    import jax

    import jaxpfl as jp
    from jaxpfl.experiments.engine.build import build_plan
    from jaxpfl.experiments.registry import from_mapping

    sampling, noise = ARMS[arm]
    privacy = {**CONFIG["privacy"], "sampling": sampling, "noise": noise}
    privacy["clip_norm"] = config.clip_norm
    if sampling != "poisson":
        privacy["separation"] = SEPARATION
    if arm == "noiseless":
        privacy = {"private": False, "clip_norm": config.clip_norm}
    client = {"name": "sgd", "learning_rate": config.rate}
    training = {**CONFIG["training"], "rounds": config.rounds, "client": client}
    parts = {**CONFIG, "privacy": privacy, "training": training}
    settings = from_mapping(parts, "deployed_mechanisms")
    plan = build_plan(settings.privacy, settings.training, len(study.clients))
    algorithm = study.network.algorithm(settings.training, plan)
    start: list[Any] = []

    def look(round: Any) -> None:
        if round.number == 0:
            start.append(jax.device_get(round.params))

    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        began, wall = time.process_time(), time.perf_counter()
        result = jp.run(
            algorithm, study.train, ledger=out / "ledger.jsonl", out=out / "run", seed=seed,
            every=config.rounds, on_round=look,
        )  # fmt: skip
        seconds, wall = time.process_time() - began, time.perf_counter() - wall
    parameters = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(result.params))
    scores = evaluator(result.params).result()
    row = {
        "what": arm, "seed": seed, "noise": "real" if plan.private else "NOT PRIVATE",
        "scored_on": config.part, "clip_norm": config.clip_norm, "rate": config.rate,
        "rounds": plan.rounds, "clients": plan.population, "per_round": plan.clients_per_round,
        "adjacency": plan.adjacency, "parameters": parameters,
        **{name: scores[name] for name in ("perplexity", "accuracy")},
        "cpu_seconds_a_round": seconds / plan.rounds, "seconds_a_round": wall / plan.rounds,
        "state_mb": 4e-6 * parameters * state(arm),
        **(costs(plan, noise) if plan.private else {}),
    }  # fmt: skip
    return row, start[0], result.params


def with_group(clients: Any) -> Any:
    """The clients, who are public, with a column of how many messages each holds, in classes."""
    sizes = np.diff(clients.offsets)
    classes = np.zeros(len(sizes), np.int32)
    for index, (least, most) in enumerate(GROUPS):
        classes[(sizes >= least) & (sizes <= most)] = index
    return clients.with_columns({**clients.columns, "messages": np.repeat(classes, sizes)})


def by_group(evaluator: Any, private: tuple[Any, Any], noiseless: Any) -> list[dict[str, Any]]:
    """The scores of each class of nicks."""
    start, params = private
    scores = evaluator.by_group("messages", params, untrained=start, noiseless=noiseless)
    return [
        {
            "what": "group", "noise": "SIMULATION: the noiseless run is not private",
            "least": GROUPS[int(row["messages"])][0], "nicks": row["clients"],
            **{model: row[model] for model in scores.means}, "metric": "accuracy",
            "cost_of_noise": row["cost of noise"],
        }
        for row in scores.rows("accuracy")
    ]  # fmt: skip


def state(arm: str) -> int:
    """How often the parameters the noise keeps in memory."""
    return {"banded": SEPARATION - 1, "cyclic_poisson": SEPARATION - 1, "blt": BUFFERS}.get(arm, 0)


def costs(plan: Any, noise: str) -> dict[str, float]:
    """The stated epsilon, and the noise that it buys."""
    variance_T = variances(noise, plan.rounds, SEPARATION)
    rms = plan.noise_multiplier * math.sqrt(float(np.mean(variance_T))) / plan.denominator
    return {
        "epsilon": plan.epsilon(),
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "mean_rms": rms,
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
