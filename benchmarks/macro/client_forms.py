"""What the two forms of a client function cost, on clients of different sizes.

    python -m benchmarks.macro.client_forms

The same local training of the EMNIST CNN three times; clients have 1 to 200 examples (log-normal,
median 20) in batches of 20: by steps, where a bucket has the steps of its largest client and the
engine loops; as a whole function that loops over its own `examples.steps`; and as a whole function
that scans over all batches, which are as many as the cap allows. A round is everything that a run
does in one; "bucket MB" is the largest bucket of clients' examples.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    clients: int = 50
    repeats: int = 5


def main(config: Config) -> None:
    harness.use_cpu_devices(None)
    import jax
    import optax

    import jaxpfl as jp
    from jaxpfl.federated import LocalTraining, Releaser, RunSecret, contribution
    from jaxpfl.federated.audits.rehearsal import ask

    rng = np.random.default_rng(0)
    most, count = 200, config.clients
    clients = jp.data.from_clients(
        {
            str(i): {
                "image": rng.integers(0, 256, (n, 28, 28, 1)).astype(np.uint8),
                "label": rng.integers(0, 62, n).astype(np.int32),
            }
            for i, n in enumerate(np.clip(rng.lognormal(3.0, 1.0, count), 1, most).astype(int))
        }
    )
    model = jp.models.emnist_cnn()
    params = jax.device_get(model.init(jax.random.key(0)))
    steps = LocalTraining(model, optax.sgd(0.1))

    def own_steps(broadcast: Any, examples: Any, key: Any) -> Any:
        return contribution(steps, broadcast, examples, key)

    def all_batches(broadcast: Any, examples: Any, key: Any) -> Any:
        whole = examples._replace(steps=np.int32(examples.mask.shape[0]))
        return contribution(steps, broadcast, whole, key)

    forms: dict[str, Any] = {
        "by steps": steps,
        "whole, loops over its own steps": own_steps,
        "whole, scans over all batches": all_batches,
    }
    plan = jp.Plan(100_000, jp.Clip(0.5), jp.Noise(1.0), jp.Poisson(count, count), 1e-7)
    spec = jp.CohortSpec(20, most)
    queries = {name: jp.Query(name, form, plan, spec) for name, form in forms.items()}
    with tempfile.TemporaryDirectory() as folder:
        ledger = jp.Ledger(Path(folder) / "ledger.jsonl", clients)
        releaser = Releaser(clients, ledger, RunSecret.reproducible(0), run="benchmark")

        def round_of(query: jp.Query) -> Callable[[], Any]:
            rounds = itertools.count(1)
            return lambda: releaser.release(query, params, round=next(rounds)).value

        rounds = {name: round_of(query) for name, query in queries.items()}
        taken = harness.turns(rounds, config.repeats)
    columns = {name: clients.columns[name] for name in ("image", "label")}
    rows = []
    for name, turns in taken.items():
        best = min(turns, key=lambda turn: turn.seconds)
        size = ask(queries[name], params, columns)[0].bucket
        row = {"form": name, "clients": count, "seconds": best.seconds}
        rows.append({**row, "cpu_seconds": best.cpu_seconds, "bucket MB": size / 1e6})
    harness.table(rows, list(rows[0]))
    print(f"recorded in {harness.record('client_forms', rows)}")


if __name__ == "__main__":
    main(tyro.cli(Config))
