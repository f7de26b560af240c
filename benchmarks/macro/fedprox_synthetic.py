"""FedProx's synthetic data with stragglers, beside Li et al. 2020, Figures 1 and 2.

    python -m benchmarks.macro.fedprox_synthetic
    python -m benchmarks.macro.fedprox_synthetic --data 1,1 --stragglers 0.9 --seeds 3

As there (section 5 and appendix C.1): 30 devices, 10 of them in each of 200 rounds, logistic
regression of 60 features and 10 classes, 20 epochs of batches of 10 at a rate of 0.01. Stragglers
do 1 to 20 epochs: "FedAvg" drops them, "FedProx" takes what they did.

Data (alpha, beta): W_k x + b_k is largest for the label of x on device k. Entries of W_k and b_k
are from N(u_k, 1), u_k from N(0, alpha); x from N(v_k, diag(j^-1.2)), entries of v_k from
N(B_k, 1), B_k from N(0, beta); second arguments are variances. "iid": one W and b for all, from
N(0, 1), and v_k = 0. A tenth of a device's examples is for testing.

Otherwise than there, devices count alike, each is a straggler by itself, a device has at most 1,000
examples (50 and a log-normal number), and FedAvg's mean is over the expected number of those that
were not dropped, because their number is private.
"""

import dataclasses
import itertools
import time

import numpy as np
import tyro

from benchmarks import harness

DEVICES, COHORT, FEATURES, CLASSES = 30, 10, 60, 10
BATCH, EPOCHS, RATE, MOST = 10, 20, 0.01, 1_000
LAST = 5
"""Scores of the table are means over so many evaluations."""


@dataclasses.dataclass(frozen=True)
class Config:
    data: tuple[str, ...] = ("iid", "0,0", "0.5,0.5", "1,1")
    stragglers: tuple[float, ...] = (0.0, 0.5, 0.9)
    rounds: int = 200
    every: int = 10
    mu: float = 1.0
    seeds: int = 1


def main(config: Config) -> None:
    harness.use_cpu_devices(1)
    for data in config.data:
        for share in config.stragglers:
            # Without stragglers, FedAvg is FedProx of mu = 0.
            arms = {"FedAvg": (0.0, True)} if share else {}
            arms |= {"FedProx, mu = 0": (0.0, False), "FedProx": (config.mu, False)}
            for name, (mu, drop) in arms.items():
                for seed in range(config.seeds):
                    began = time.perf_counter()
                    curve = trained(config, data, seed, mu=mu, stragglers=share, drop=drop)
                    row = {"data": data, "stragglers": share, "arm": name, "mu": mu, "seed": seed}
                    row |= {f"{key} curve": [point[key] for point in curve] for key in curve[0]}
                    row |= {
                        key: round(float(np.mean([point[key] for point in curve[-LAST:]])), 4)
                        for key in ("accuracy", "loss")
                    }
                    row["seconds"] = round(time.perf_counter() - began, 1)
                    harness.record("fedprox_synthetic", [row])
                    shown = ("data", "stragglers", "arm", "seed", "accuracy", "loss", "seconds")
                    print({key: row[key] for key in shown}, flush=True)


def devices(data: str, seed: int) -> list[dict[str, np.ndarray]]:
    """The examples of each device."""
    rng = np.random.default_rng(seed)
    alpha, beta = (0.0, 0.0) if data == "iid" else map(float, data.split(","))
    std_F = np.arange(1, FEATURES + 1) ** -0.6
    sizes = np.minimum(50 + rng.lognormal(4, 2, DEVICES).astype(int), MOST)
    shared = rng.normal(size=(FEATURES + 1, CLASSES))
    found = []
    for size in sizes:
        own, mean_F = shared, np.zeros(FEATURES)
        if data != "iid":
            own = rng.normal(alpha**0.5 * rng.normal(), 1, shared.shape)
            mean_F = rng.normal(beta**0.5 * rng.normal(), 1, FEATURES)
        x_NxF = mean_F + std_F * rng.normal(size=(size, FEATURES))
        label_N = (x_NxF @ own[:-1] + own[-1]).argmax(1)
        found.append({"x": x_NxF.astype(np.float32), "label": label_N.astype(np.int32)})
    return found


def trained(
    config: Config, data: str, seed: int, *, mu: float, stragglers: float, drop: bool
) -> list[dict[str, float]]:
    """Test accuracy and training loss during the rounds."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import rounds
    from jaxpfl.federated import LocalTraining, Proximal

    held = devices(data, seed)
    kept = [{name: rows[: int(0.9 * len(rows))] for name, rows in each.items()} for each in held]
    rest = [{name: rows[int(0.9 * len(rows)) :] for name, rows in each.items()} for each in held]
    train, test = (
        {name: jnp.concatenate([each[name] for each in part]) for name in ("x", "label")}
        for part in (kept, rest)
    )

    def init(key):
        del key
        return {"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros((1, CLASSES))}

    def loss(params, batch):
        logits = batch["x"] @ params["w"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    @jax.jit
    def scores(params):
        right = (test["x"] @ params["w"] + params["b"]).argmax(1) == test["label"]
        return {"accuracy": jnp.mean(right), "loss": jnp.mean(loss(params, train))}

    model = jp.models.from_functions(init, loss, columns=["x", "label"])
    algorithm = jp.algorithms.fed_avg(
        model,
        client=LocalTraining(model, optax.sgd(RATE), penalty=Proximal(mu) if mu else None),
        server=optax.sgd(1 / (1 - stragglers) if drop else 1.0),
        plan=jp.Plan.without_privacy(
            rounds=config.rounds, clip=jp.Clip(1e6), participation=jp.FixedSize(DEVICES, COHORT)
        ),
        cohort=jp.CohortSpec(
            BATCH,
            MOST,
            epochs=EPOCHS,
            clients_per_bucket=COHORT,
            stragglers=stragglers,
            drop_stragglers=drop,
        ),
    )
    clients, curve = jp.data.from_clients({str(k): each for k, each in enumerate(kept)}), []
    states = itertools.islice(rounds(algorithm, clients, seed), config.rounds)
    for number, (state, _) in enumerate(states, 1):
        if number % config.every == 0:
            found = jax.device_get(scores(state.params))
            curve.append({name: round(float(value), 4) for name, value in found.items()})
    return curve


if __name__ == "__main__":
    main(tyro.cli(Config))
