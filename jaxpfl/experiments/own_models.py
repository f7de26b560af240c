"""What clients' own models predict for rows of these clients. PRIVATE: for `private/` alone.

Of Ditto and APFL it is the shared model, after the client has trained it on its own examples; of
IFCA, the released one that fits these best. No file has it: it is made anew (`jaxpfl.Personal`).
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pyarrow as pa

from jaxpfl import data, files
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.open import fields_of
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments import export
from jaxpfl.experiments.carry_out import as_written
from jaxpfl.experiments.engine.by_client import Personal
from jaxpfl.experiments.engine.evaluate import check_examples
from jaxpfl.experiments.registry import load_run, system_of
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.personal import BestFitting
from jaxpfl.trained import Trained, load


def predict(run: str | Path, table: str, own: str) -> tuple[pa.Table, int]:
    """Predictions for a table's rows, and how many of its clients have no rows in `own`.

    The shared model, or IFCA's first, predicts for those. `InputError`: the run has no such models,
    or a source does not fit.

    Args:
      run: the directory of a finished run: of a config's Ditto or APFL, or of `algorithms.ifca`.
      table: a source with the fields that the model reads, and the field of clients.
      own: a source of the clients' own examples, as `data.source` of a config.
    """
    directory, examples = files.user_path(run), data.open(own)
    with as_written(directory, "it has no models of clients' own"):
        trained, personal = _of_run(directory, examples)
    for name in ("features", "classes"):
        names, expected = fields_of(own).get(name, []), list(trained.fields.get(name, []))
        # A run from Python knows no names of features, and numbers its classes.
        if names != expected and (trained.fields or name == "classes"):
            both = [",".join(one) or "none" for one in (expected, names)]
            form = "--own must name the {} of the run, in their order: expected {}, found {}"
            raise InputError(form.format(name, *both))
    index = {client: place for place, client in enumerate(examples.client_ids.to_pylist())}
    absent = 0

    def own_params(client: str) -> Any:
        nonlocal absent
        absent += client not in index
        return personal(index[client]) if client in index else trained.params

    return trained.predict_by_client(table, own_params), absent


def _of_run(directory: Path, own: Population) -> tuple[Trained, Personal]:
    """A run's shared model, and its clients' own."""
    made, _, _ = export.made_by(directory)
    if made.written is None:
        config = load_run(directory)
        personal = getattr(system_of(config.system).part("export"), "personal", None)
        if personal is None:
            raise InputError(f"system {config.system} makes none")
        shared = made.models[0]
        trained = Trained(shared.model, shared.params, shared.words, shared.fields)
        return trained, personal(config, made, own)
    clusters = [load(folder) for folder in made.folders]
    if len(clusters) == 1:
        raise InputError("no config says what its clients do: use jaxpfl.Personal in Python")
    trained = clusters[0]
    if trained.words is not None:
        own = trained.words.encode(own)
    check_examples(trained.model, own, "--own")
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(model.params for model in clusters))
    client = BestFitting(trained.model, LocalTraining(trained.model, optax.identity()))
    return trained, Personal(client, params, own, CohortSpec(batch_size=16, max_examples=256))
