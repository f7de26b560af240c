"""How good texts are by those of held-out people, and whether they repeat people who were asked."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.macro.mauve import LEAST_TEXTS, last_states, mauve
from benchmarks.macro.neighbours import precision_recall
from jaxpfl.algorithms.frechet import Reference, moments
from jaxpfl.data import Population, from_clients
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.public_models import PublicModels, data_mesh
from jaxpfl.experiments.central.scoring import in_batches, score
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.systems.synthetic_text.config import DOWNSTREAM
from jaxpfl.federated.clients.client import Static
from jaxpfl.text.metrics.leakage import SIDES, leakage
from jaxpfl.text.microbatches import dealt, placed
from jaxpfl.text.tokenisers.base import text_rows

DATA = "$JAXPFL_DATA/"
PRETRAINED_ON = {"wikisplit": DATA + "public_wikisplit/wiki_sentences.jsonl.gz"}
HELD_OUT = 2_000
NETWORK = dataclasses.replace(
    DOWNSTREAM,
    pretraining=Training(epochs=1, batch_size=32, learning_rate=0.003, weight_decay=0.1),
)
# What is added to each count where texts are few beside the tokens of a vocabulary.
_ADDED = 0.02
FINE_TUNING, TOKENS = Training(epochs=3, batch_size=32, learning_rate=0.001), 40


class Judge:
    """Measures texts against those of held-out people, DECLARED PUBLIC here.

    Attributes:
      unread_M: rows of the held-out texts that no measure reads.
    """

    def __init__(self, held_out: Population, cache: Path, seed: int):
        order_N = np.random.default_rng(1).permutation(held_out.num_examples)
        self.unread_M, read_N = order_N[max(HELD_OUT, LEAST_TEXTS) :], order_N[:HELD_OUT]
        self.references = {
            measure: Reference(moments(held_out.column(column)[read_N], np.inf))
            for measure, column in (("frechet", "embedding"), ("hashed", "hashed"))
        }
        self.real = held_out.column("embedding")[read_N]
        models = PublicModels(PRETRAINED_ON, 15_000, 2_048, cache)
        self.model, self.seed = models.decoder("downstream", NETWORK, 64), seed
        texts = held_out.columns["text"].to_pylist()
        self.rows = text_rows(self.model.tokeniser, [texts[i] for i in read_N], TOKENS)
        self.checkpoint = self.evaluated(self.model.params)
        self.states = last_states(self.model, [texts[i] for i in order_N[:LEAST_TEXTS]])

    def evaluated(self, params: Any) -> dict[str, float]:
        mesh = data_mesh(16)
        batches = dealt(in_batches({"tokens": self.rows}, 16), mesh)
        measured = score(Static(self.model.model), placed(params, mesh), batches).result()
        return {name: measured[name] for name in ("accuracy", "loss")}

    def __call__(self, texts: list[str], rows: dict[str, np.ndarray]) -> dict[str, float]:
        tokens = text_rows(self.model.tokeniser, texts, TOKENS)
        fitted = fit(
            self.model.model,
            self.model.params,
            {"tokens": tokens},
            FINE_TUNING,
            seed=self.seed,
            mesh=data_mesh(FINE_TUNING.batch_size),
        )
        measured = {
            measure: reference.distance(moments(rows[measure], np.inf))
            for measure, reference in self.references.items()
        }
        if min(len(texts), len(self.states)) >= LEAST_TEXTS:
            measured["mauve"] = mauve(last_states(self.model, texts)[:LEAST_TEXTS], self.states)
        return {
            **measured,
            "bits": unigram_bits(_ids(tokens), _ids(self.rows), vocab_size=2_048),
            **precision_recall(rows["frechet"], self.real)._asdict(),
            **self.evaluated(fitted.params),
        }


def unigram_bits(
    written: Sequence[np.ndarray], held_out: Sequence[np.ndarray], *, vocab_size: int
) -> float:
    """The bits of a token of held-out texts by the frequencies of the tokens of written ones.

    Args:
      written, held_out: the ids of each text; every id is a target.
    """
    counts_V = np.bincount(np.concatenate(written), minlength=vocab_size) + _ADDED
    return float(-np.log2(counts_V / counts_V.sum())[np.concatenate(held_out)].mean())


def _ids(rows_NxL: np.ndarray) -> list[np.ndarray]:
    """The tokens of each row without its padding."""
    return [row[row >= 0] for row in rows_NxL]


def of_people(clients: Population, person_C: np.ndarray) -> Population:
    """The same texts by the person behind each client, for audits: people were divided at random.

    All clients of a person follow one another.
    """
    texts, sizes = clients.columns["text"].to_pylist(), clients.sizes()
    starts = np.flatnonzero(np.r_[True, person_C[1:] != person_C[:-1]])
    ends = np.cumsum(sizes)[np.append(starts[1:], len(sizes)) - 1]
    parts = np.split(np.array(texts, object), ends[:-1])
    return from_clients(
        {person: {"text": list(part)} for person, part in zip(person_C[starts], parts, strict=True)}
    )


def audited(texts: Sequence[str], training: Population, held_out: Population) -> dict[str, Any]:
    """`jaxpfl audit --texts`: its verdict, and the longest run of words in common with each side.

    Also, by number of words, how many training and held-out people have such a run. Exact counts,
    of people whose texts are published.
    """
    result = leakage({"texts": texts}, training, held_out)
    by_writer = result["writers"]["texts"]
    longest = {side: len(by_writer["by_words"][side]) - 1 for side in SIDES}
    tests = by_writer["tests"]
    return {
        "audit": result["verdict"],
        **{f"longest, {side}": words for side, words in longest.items()},
        "shared": {t["words"]: [t["training"], t["held_out"]] for t in tests},
        "p": min(t["p"] for t in tests),
    }
