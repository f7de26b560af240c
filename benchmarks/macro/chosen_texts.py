"""Do texts that one look chooses train a model better than the best corpora? All arms cut alike.

    JAXPFL_DATA=... python -m benchmarks.macro.chosen_texts irc --repetitions 5
    JAXPFL_DATA=... python -m benchmarks.macro.chosen_texts congress --simulate 72000

A repetition redraws the split of people, the release, the drawn texts and the order of training.
Clients release the moments of their embeddings by MiniLM once, at epsilon 7, through the door and
a ledger; the noise is real unless `--simulate` names a larger population. All texts, of clients,
held-out people and pool, are runs of 20 words. Each arm gives as many texts of the pool:

  nearest, all, mixture   random ones of the nearest corpus by FreD, of all corpora alike, and of
                          the best mixture by the release
  chosen                  `chosen_texts.choose`
  descent                 its first form
  own                     the training clients' own texts: NOT PRIVATE, the ceiling; `used` tells
                          how many, where they have fewer

and is measured against held-out people:

  frechet           distance by MiniLM's embeddings, which the release saw
  hashed            the same by hashed words, which no arm saw
  precision, recall of 5 nearest neighbours by MiniLM's embeddings
  bits              of a token of held-out texts under the unigrams of the arm's texts
  accuracy, loss    of a GPT-2 of 0.9 M that was pretrained on Wikipedia's sentences alone, which
                    are not in the pool, and fine-tuned on the arm's texts; in nats of a token
  closed            of the loss between that checkpoint and `own`
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.algorithms.chosen_texts import Evidence, choose, descend
from jaxpfl.algorithms.chosen_texts.choice import systematic_sample
from jaxpfl.algorithms.chosen_texts.matching import capped_softmax, weighted_moments
from jaxpfl.algorithms.frechet import Reference, moments
from jaxpfl.algorithms.fred import FredPlan, best_mixture, private_moments
from jaxpfl.algorithms.fred.scores import score
from jaxpfl.data import Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.data.selection import at_most
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.public_models import PublicModels, data_mesh
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.systems.synthetic_text.config import DOWNSTREAM
from jaxpfl.privacy import Ledger
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import embedder
from jaxpfl.text.metrics.baselines import unigram_bits
from jaxpfl.text.metrics.neighbours import precision_recall
from jaxpfl.text.metrics.prediction import evaluate
from jaxpfl.text.tokenisers.base import text_rows

DATA = "$JAXPFL_DATA/"
CLIENTS = {
    "congress": DATA + "text_congress_record/congress_speeches.jsonl.gz",
    "irc": DATA + "text_irc_ubuntu/ubuntu_irc.jsonl.gz",
    "commits": DATA + "text_commits_nova/nova_commits.jsonl.gz",
    "pubmed": DATA + "public_pubmedqa/pubmed_abstracts.jsonl.gz?client=*",
}
CORPORA = {
    "novels": DATA + "public_novels/novels.tar.xz",
    "presidents": DATA + "text_presidents/presidents.jsonl.gz",
    "pubmed": DATA + "public_pubmedqa/pubmed_abstracts.jsonl.gz?client=*",
    "docs": DATA + "public_techdocs_nova/nova_docs.jsonl.gz?client=doc",
    "darwin": DATA + "public_nonfiction/darwin.txt.gz?split=lines",
    "commits": DATA + "text_commits_nova/nova_commits.jsonl.gz",
}
PRETRAINED_ON = {"wikisplit": DATA + "public_wikisplit/wiki_sentences.jsonl.gz"}
CUT, MOST_SPANS, HELD_OUT, TEST_SHARE = "words:20", 5, 2_000, 0.3
EPSILON, DELTA, SHARE = 7.0, 1e-4, 0.1
NETWORK = dataclasses.replace(
    DOWNSTREAM,
    pretraining=Training(epochs=1, batch_size=32, learning_rate=0.003, weight_decay=0.1),
)
FINE_TUNING, TOKENS = Training(epochs=3, batch_size=32, learning_rate=0.001), 40
MEASURES = ("frechet", "hashed", "bits", "accuracy", "loss", "closed")


def with_vectors(population: Population, cache: Path, name: str) -> Population:
    """The texts with the columns "embedding" (MiniLM) and "hashed", from the cache if it has it."""
    folder = cache / f"{name}-{population.content[:12]}"
    if not folder.exists():
        texts = population.columns["text"].to_pylist()
        vectors = {"embedding": "minilm", "hashed": "hashed:128"}
        arrays = {column: np.asarray(embedder(kind)(texts)) for column, kind in vectors.items()}
        population.with_columns({"text": population.columns["text"], **arrays}).save(folder)
    return Population.load(folder)


def people(name: str, cache: Path) -> tuple[Population, np.ndarray]:
    """The clients, cut, and the person behind each; a client of Congress is a speech."""
    clients = open_population(CLIENTS[name])
    if name == "congress":
        texts = {
            str(c): clients.examples(i)["text"].to_pylist()
            for i, c in enumerate(clients.client_ids)
        }
        clients = from_clients(
            {f"{c}/{n}": {"text": [t]} for c, of in texts.items() for n, t in enumerate(of)}
        )
    clients = Cut.parse(CUT).population(clients)
    clients = clients.keeping(at_most(clients, MOST_SPANS, seed=0)).with_min_examples(1)
    ids = np.array([str(c).split("/")[0] for c in clients.client_ids])
    return with_vectors(clients, cache, name), ids


def pool_of(
    name: str, cache: Path, of_corpus: int
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Texts, their corpora, and both embeddings; the clients' own corpus is not among them."""
    parts = []
    for corpus, source in CORPORA.items():
        if corpus != name:
            cut = Cut.parse(CUT).population(open_population(source))
            rows = np.random.default_rng(0).permutation(cut.num_examples)[:of_corpus]
            chosen = np.isin(np.arange(cut.num_examples), rows)
            parts.append((corpus, with_vectors(cut.keeping(chosen), cache, corpus)))
    texts = [text for _, part in parts for text in part.columns["text"].to_pylist()]
    names_N = np.concatenate([np.repeat(corpus, part.num_examples) for corpus, part in parts])
    vectors = [
        np.concatenate([part.column(c) for _, part in parts]) for c in ("embedding", "hashed")
    ]
    return texts, names_N, vectors[0], vectors[1]


class Judge:
    """Measures texts against those of held-out people, DECLARED PUBLIC here."""

    def __init__(self, held_out: Population, cache: Path, seed: int):
        order_N = np.random.default_rng(1).permutation(held_out.num_examples)[:HELD_OUT]
        self.references = {
            measure: Reference(moments(held_out.column(column)[order_N], np.inf))
            for measure, column in (("frechet", "embedding"), ("hashed", "hashed"))
        }
        self.real = held_out.column("embedding")[order_N]
        models = PublicModels(PRETRAINED_ON, 15_000, 2_048, cache)
        self.model, self.seed = models.decoder("downstream", NETWORK, 64), seed
        texts = held_out.columns["text"].to_pylist()
        self.rows = text_rows(self.model.tokeniser, [texts[i] for i in order_N], TOKENS)
        self.checkpoint = self._evaluated(self.model.params)

    def _evaluated(self, params: Any) -> dict[str, float]:
        measured = evaluate(self.model.model, params, self.rows, mesh=data_mesh(16))
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
        return {
            **{
                measure: reference.distance(moments(rows[measure], np.inf))
                for measure, reference in self.references.items()
            },
            "bits": unigram_bits(_ids(tokens), _ids(self.rows), vocab_size=2_048),
            **precision_recall(rows["frechet"], self.real)._asdict(),
            **self._evaluated(fitted.params),
        }


def _ids(rows_NxL: np.ndarray) -> list[np.ndarray]:
    """The tokens of each row without its padding."""
    return [row[row >= 0] for row in rows_NxL]


def release(train: Population, simulate: int) -> Any:
    """FreD's moments of the training clients, through the door and a ledger of their own."""
    delta = min(DELTA, SHARE / len(train))
    larger = min(DELTA, SHARE / simulate) if simulate else delta
    plan = FredPlan.calibrated(epsilon=EPSILON, delta=larger, max_examples=MOST_SPANS)
    if simulate:
        plan = plan.simulated_by(len(train), delta, simulate)
    embedded = train.with_columns({"embedding": train.column("embedding")})
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/l.jsonl", embedded) as ledger:
        return private_moments(embedded, plan, ledger=ledger)


def arms(
    released: Any, names_N: np.ndarray, rows_NxD: np.ndarray, texts: int, seed: int
) -> dict[str, tuple[np.ndarray, dict[str, Any]]]:
    """The drawn rows of each arm, and what is to be said of it."""
    generator = np.random.default_rng(seed)
    equal = {str(c): (names_N == c) / np.sum(names_N == c) for c in np.unique(names_N)}
    corpora = {name: weighted_moments(w_N, rows_NxD) for name, w_N in equal.items()}
    mixture = best_mixture(released, corpora)
    mixture_N = np.sum([share * equal[name] for name, share in mixture.shares.items()], axis=0)
    evidence, cap = Evidence(released, rows_NxD), (1 - 1e-9) / texts
    choice = choose([evidence], names_N, texts, seed=seed)
    base_N = 0.9 * mixture_N + 0.1 / len(names_N)

    def sampled(weights_N: Any) -> np.ndarray:
        weights_N = capped_softmax(np.log(np.maximum(weights_N, 1e-12 / len(names_N))), cap)
        return systematic_sample(weights_N, texts, generator)

    nearest = score(released, corpora)[0].name
    about = {"kappa": choice.kappa, "effective": choice.effective_size, "shares": choice.shares}
    return {
        "nearest": (sampled(equal[nearest]), {"shares": {nearest: 1.0}}),
        "all": (sampled(np.full(len(names_N), 1 / len(names_N))), {}),
        "mixture": (sampled(mixture_N), {"shares": mixture.shares}),
        "chosen": (choice.rows_M, about),
        "descent": (sampled(descend(evidence, base_N, cap)), {}),
    }


def main(
    clients: tyro.conf.Positional[Literal["congress", "irc", "commits", "pubmed"]],
    repetitions: int = 5,
    texts: tuple[int, ...] = (1_000,),
    simulate: int = 0,
    number: int = 0,
    of_corpus: int = 3_000,
    measured: tuple[str, ...] = ("nearest", "all", "mixture", "chosen", "descent"),
    cache: Path = Path("runs/chosen_texts"),
) -> None:
    """Appends a row for each arm and repetition.

    Args:
      clients: whose texts.
      texts: how many are chosen.
      simulate: the number of clients whose noise is added: a SIMULATION; 0: the real one.
      number: of training clients, drawn from all; 0: all.
      of_corpus: the most texts of a corpus that are in the pool.
      measured: the arms, beside `own`.
      cache: of embeddings and of the downstream model.
    """
    everyone, ids = people(clients, cache)
    pool, names_N, rows_NxD, hashed_NxD = pool_of(clients, cache, of_corpus)
    for seed in range(repetitions):
        generator = np.random.default_rng(100 + seed)
        order = generator.permutation(np.unique(ids))
        test = np.isin(ids, order[: round(TEST_SHARE * len(order))])
        train = generator.permutation(np.flatnonzero(~test))[: number or None]
        train, held_out = everyone.select(np.sort(train)), everyone.select(np.flatnonzero(test))
        judge, released = Judge(held_out, cache, seed), release(train, simulate)
        for many in texts:
            own = generator.permutation(train.num_examples)[:many]
            own_texts = [train.columns["text"][int(i)].as_py() for i in own]
            own_rows = {
                "frechet": train.column("embedding")[own],
                "hashed": train.column("hashed")[own],
            }
            common = {
                "clients": clients,
                "train": len(train),
                "unit": "speech" if clients == "congress" else "person",
                "simulate": simulate,
                "pool": len(pool),
                "texts": many,
                "seed": seed,
            }
            results = {
                "checkpoint": (judge.checkpoint, {}),
                "own": (judge(own_texts, own_rows), {"used": len(own)}),
            }
            drawn = arms(released, names_N, rows_NxD, many, seed)
            for arm in measured:
                rows_M, about = drawn[arm]
                vectors = {"frechet": rows_NxD[rows_M], "hashed": hashed_NxD[rows_M]}
                results[arm] = judge([pool[i] for i in rows_M], vectors), about
            top, bottom = results["checkpoint"][0]["loss"], results["own"][0]["loss"]
            rows = [
                {
                    **common,
                    "arm": arm,
                    "epsilon": EPSILON,
                    "noise": released.noise.mean,
                    **values,
                    "closed": (top - values["loss"]) / (top - bottom),
                    **about,
                }
                for arm, (values, about) in results.items()
            ]
            harness.table(rows, ["arm", *MEASURES])
            print(harness.record("chosen_texts", rows), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
