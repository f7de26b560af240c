"""Do texts that one look chooses train a model better than the best corpora? All arms cut alike.

    JAXPFL_DATA=... python -m benchmarks.macro.chosen_texts irc --seeds 0 1 2 3 4
    JAXPFL_DATA=... python -m benchmarks.macro.chosen_texts congress --simulate 72000
    JAXPFL_DATA=... python -m benchmarks.macro.chosen_texts irc --writer smollm2 \
        --measured chosen pick_write_pick placebo
    JAXPFL_DATA=... python -m benchmarks.macro.chosen_texts irc --texts 1000 2500 --measured \
        nearest all mixture chosen descent untuned pe pe_sft popri one_look steered others

A repetition redraws the split of people, the release, the drawn texts and the order of training.
Clients release the moments of their embeddings by MiniLM once, at epsilon 7, through the door and
a ledger; the noise is real unless `--simulate` names a larger population. All texts, of clients,
held-out people and pool, are runs of 20 words. Each arm gives as many texts of the pool:

  nearest, all, mixture   random ones of the nearest corpus by FreD, of all corpora alike, and of
                          the best mixture by the release
  chosen                  `chosen_texts.choose`
  descent                 its first form
  joint                   chosen by MiniLM's embeddings and by hashed words, whose moments share
                          one release of the same epsilon; `hashed` is then no unseen measure
  pick_write_pick         chosen, once more, of the pool and as many texts that a model wrote after
                          prompts of the chosen ones; placebo: after prompts of random ones
  untuned, pe, pe_sft, popri, one_look, steered
                          what a small generator writes after prompts of the pool: alternatives to
                          `chosen`, each with an epsilon of its own, see `generated_texts`
  own                     the training clients' own texts: NOT PRIVATE, the ceiling; `used` tells
                          how many, where they have fewer
  others                  texts of half of the held-out people, NOT PRIVATE, that no measure reads:
                          the floor of distances and MAUVE; the audit compares with the other half

and is measured against held-out people:

  frechet           distance by MiniLM's embeddings, which the release saw
  hashed            the same by hashed words, which no arm saw
  precision, recall of 5 nearest neighbours by MiniLM's embeddings
  mauve             of 2,500 texts, by the hidden states of that GPT-2 before it is fine-tuned
  audit             of `jaxpfl audit --texts`: whether training people have more in common with the
                    arm's texts than held-out people; `own` must fail it
  bits              of a token of held-out texts under the unigrams of the arm's texts
  accuracy, loss    of a GPT-2 of 0.9 M that was pretrained on Wikipedia's sentences alone, which
                    are not in the pool, and fine-tuned on the arm's texts; in nats of a token
  closed            of the loss between that checkpoint and `own`
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro

from benchmarks import harness
from benchmarks.macro.generated_texts import GENERATORS, generated, small
from benchmarks.macro.judged_texts import DATA, Judge, audited, of_people
from jaxpfl.algorithms.base import releaser_of, run_rounds
from jaxpfl.algorithms.chosen_texts import Choice, Evidence, choose, descend
from jaxpfl.algorithms.chosen_texts.choice import systematic_sample
from jaxpfl.algorithms.chosen_texts.matching import capped_softmax, weighted_moments
from jaxpfl.algorithms.fred import FredPlan, best_mixture, fred, moments
from jaxpfl.algorithms.fred.query import by_embedding
from jaxpfl.algorithms.fred.scores import score
from jaxpfl.algorithms.popri import synthesise
from jaxpfl.data import Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.data.selection import at_most
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedGeneratorConfig
from jaxpfl.experiments.systems.chosen_corpus.author import settings_of
from jaxpfl.privacy import Ledger
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import embedder

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
CUT, MOST_SPANS, TEST_SHARE = "words:20", 5, 0.3
EPSILON, DELTA, SHARE = 7.0, 1e-4, 0.1
MEASURES = ("frechet", "hashed", "mauve", "accuracy", "loss", "closed", "audit")


class Pool(NamedTuple):
    """Texts, their corpora, and their embeddings by MiniLM and by hashed words."""

    texts: list[str]
    names_N: np.ndarray
    rows_NxD: np.ndarray
    hashed_NxD: np.ndarray


class Sample(NamedTuple):
    """The texts of an arm, and their vectors by the measure that reads them."""

    texts: list[str]
    rows: dict[str, np.ndarray]

    @classmethod
    def of(cls, population: Population, rows_M: np.ndarray) -> "Sample":
        columns = {"frechet": "embedding", "hashed": "hashed"}
        texts = [population.columns["text"][int(row)].as_py() for row in rows_M]
        return cls(texts, {name: population.column(c)[rows_M] for name, c in columns.items()})


def with_vectors(population: Population, cache: Path, name: str) -> Population:
    """The texts with the columns "embedding" (MiniLM) and "hashed", from the cache if it has it."""
    folder = cache / f"{name}-{population.content[:12]}"
    if not folder.exists():
        texts = population.columns["text"].to_pylist()
        vectors = {"embedding": "minilm", "hashed": "hashed:128"}
        arrays = {column: np.asarray(embedder(kind)(texts)) for column, kind in vectors.items()}
        population.with_columns({"text": population.columns["text"], **arrays}).save(folder)
    return Population.load(folder)


def embedded(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """The texts' vectors by the measure that reads them."""
    kinds = {"frechet": "minilm", "hashed": "hashed:128"}
    return {measure: np.asarray(embedder(kind)(texts)) for measure, kind in kinds.items()}


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


def unit_of(name: str) -> str:
    return "speech" if name == "congress" else "person"


def divided(
    ids: np.ndarray, generator: np.random.Generator, number: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of so many training clients, 0 for all, and of held-out people's, ascending."""
    order = generator.permutation(np.unique(ids))
    test = np.isin(ids, order[: round(TEST_SHARE * len(order))])
    train = generator.permutation(np.flatnonzero(~test))[: number or None]
    return np.sort(train), np.flatnonzero(test)


def pool_of(name: str, cache: Path, of_corpus: int) -> Pool:
    """The corpora but the clients' own."""
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
    return Pool(texts, names_N, *vectors)


def release(train: Population, simulate: int, joint: bool = False) -> list[Any]:
    """FreD's moments of the training clients, through the door and a ledger of their own.

    One for each embedder; all are one release.
    """
    columns = ["embedding", "hashed"][: 1 + joint]
    delta = min(DELTA, SHARE / len(train))
    larger = min(DELTA, SHARE / simulate) if simulate else delta
    settings: Any = {"max_examples": MOST_SPANS, "shares": (1 / len(columns),) * len(columns)}
    plan = FredPlan.calibrated(epsilon=EPSILON, delta=larger, **settings)
    if simulate:
        plan = plan.simulated_by(len(train), delta, simulate)
    embedded = train.with_columns({name: train.column(name) for name in columns})
    dimensions = {name: embedded.column(name).shape[1] for name in columns}
    algorithm = fred(plan, units=len(train), dimension=dimensions)
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/l.jsonl", embedded) as ledger:
        releaser = releaser_of(algorithm, embedded, ledger, None)
        state = run_rounds(algorithm, releaser, jax.random.key(0))
    return [moments(*part) for part in by_embedding(plan, state)]


def about(choice: Choice) -> dict[str, Any]:
    return {"kappa": choice.kappa, "effective": choice.effective_size, "shares": choice.shares}


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
        return systematic_sample(weights_N, names_N, texts, generator)

    nearest = score(released, corpora)[0].name
    return {
        "nearest": (sampled(equal[nearest]), {"shares": {nearest: 1.0}}),
        "all": (sampled(np.full(len(names_N), 1 / len(names_N))), {}),
        "mixture": (sampled(mixture_N), {"shares": mixture.shares}),
        "chosen": (choice.rows_M, about(choice)),
        "descent": (sampled(descend(evidence, base_N, cap)), {}),
    }


def writer_of(name: str, cache: Path) -> Any:
    """A published model, or for "small" the Llama of a million that popri_small pretrains."""
    if name == "small":
        writer = small(cache).generator
    else:
        published = PublishedModel.of(PublishedGeneratorConfig(name, chat=False), "writer")
        writer = published.loaded()
    return dataclasses.replace(writer, cut=Cut.parse(CUT))


def with_written(pool: Pool, rows_M: np.ndarray, writer: Any, number: int, seed: int) -> Pool:
    """The pool and what is written after prompts of these rows: new texts, and none empty."""
    settings = settings_of(writer.tokeniser, writer.cut, pool.texts[:: len(pool.texts) // 2_000])
    # The small model reads no more.
    most = writer.model.config.positions - settings.new_tokens - 1
    settings = dataclasses.replace(settings, prompt_tokens=min(settings.prompt_tokens, most))
    samples = [pool.texts[row] for row in rows_M]
    texts, _ = synthesise(writer, samples, number, settings, seed=seed)
    new = sorted(set(texts) - set(pool.texts))
    rows, hashed = embedded(new).values()
    return Pool(
        pool.texts + new,
        np.append(pool.names_N, np.repeat("written", len(new))),
        np.concatenate([pool.rows_NxD, rows]),
        np.concatenate([pool.hashed_NxD, hashed]),
    )


def main(
    clients: tyro.conf.Positional[Literal["congress", "irc", "commits", "pubmed"]],
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    texts: tuple[int, ...] = (1_000,),
    simulate: int = 0,
    number: int = 0,
    of_corpus: int = 3_000,
    measured: tuple[str, ...] = ("nearest", "all", "mixture", "chosen", "descent"),
    writer: str = "",
    models: Path = Path("runs/public_models"),
    cache: Path = Path("runs/chosen_texts"),
) -> None:
    """Appends a row for each arm and repetition.

    Args:
      clients: whose texts.
      seeds: one for each repetition.
      texts: how many are chosen.
      simulate: the number of clients whose noise is added: a SIMULATION; 0: the real one.
      number: of training clients, drawn from all; 0: all.
      of_corpus: the most texts of a corpus that are in the pool.
      measured: the arms, beside `own`.
      writer: the model of `pick_write_pick` and `placebo`: smollm2, a folder, or "small".
      models: where the small generator is, or is pretrained to.
      cache: of embeddings and of the downstream model.
    """
    everyone, ids = people(clients, cache)
    pool, author = pool_of(clients, cache, of_corpus), writer and writer_of(writer, models)
    for seed in seeds:
        generator = np.random.default_rng(100 + seed)
        train, rest = divided(ids, generator, number)
        half = np.isin(
            ids[rest], np.random.default_rng(seed).permutation(np.unique(ids[rest]))[::2]
        )
        rows_of = {"train": train, "rest": rest, "half": rest[~half]}
        sides = {side: of_people(everyone.select(of), ids[of]) for side, of in rows_of.items()}
        train, held_out = everyone.select(train), everyone.select(rest)
        judge, (released,) = Judge(held_out, cache, seed), release(train, simulate)
        jointly = release(train, simulate, joint=True) if "joint" in measured else ()
        others = np.flatnonzero(np.repeat(half, held_out.sizes()))
        unread = judge.unread_M[np.isin(judge.unread_M, others)]
        public, written = small(models), {}  # Loaded, or pretrained, when it first writes.
        for arm in filter(GENERATORS.__contains__, measured):
            options = {"epsilon": EPSILON, "delta": min(DELTA, SHARE / len(train)), "cut": CUT}
            options |= {"texts": max(texts), "spans": MOST_SPANS, "seed": seed}
            of_arm, said = generated(arm, train, pool.texts, public, **options)
            written[arm] = Sample(of_arm, embedded(of_arm)), said
            print(arm, said, of_arm[:3], flush=True)
        for many in texts:
            common = {
                "clients": clients,
                "train": len(train),
                "unit": unit_of(clients),
                "simulate": simulate,
                "pool": len(pool.texts),
                "texts": many,
                "seed": seed,
            }
            drawn = arms(released, pool.names_N, pool.rows_NxD, many, seed)
            if jointly:
                both = map(Evidence, jointly, (pool.rows_NxD, pool.hashed_NxD))
                choice = choose(list(both), pool.names_N, many, seed=seed)
                drawn["joint"] = choice.rows_M, about(choice)
            prompts = {"pick_write_pick": drawn["chosen"][0], "placebo": drawn["all"][0]}
            results = {"checkpoint": (judge.checkpoint, {})}
            for arm in ("own", *measured):
                of_arm, compared = pool, "rest"
                if arm in prompts:
                    of_arm = with_written(pool, prompts[arm], author, many, seed)
                    evidence = [Evidence(released, of_arm.rows_NxD)]
                    choice = choose(evidence, of_arm.names_N, many, written="written", seed=seed)
                    said = about(choice) | {"writer": writer, "pool": len(of_arm.texts)}
                    drawn[arm] = choice.rows_M, said
                if arm == "own":
                    own = generator.permutation(train.num_examples)[:many]
                    sample, said = Sample.of(train, own), {"used": len(own)}
                elif arm == "others":
                    # Where the measures have read all, the audit alone is made.
                    rows, compared = (unread if len(unread) >= many else others)[:many], "half"
                    sample, said = Sample.of(held_out, rows), {"used": len(rows), "epsilon": None}
                elif arm in GENERATORS:
                    sample, said = written[arm]
                    sample = Sample(
                        sample.texts[:many], {k: v[:many] for k, v in sample.rows.items()}
                    )
                else:
                    rows_M, said = drawn[arm]
                    rows = {"frechet": of_arm.rows_NxD[rows_M], "hashed": of_arm.hashed_NxD[rows_M]}
                    sample = Sample([of_arm.texts[i] for i in rows_M], rows)
                values = {} if arm == "others" and len(unread) < many else judge(*sample)
                audit = audited(sample.texts, sides["train"], sides[compared])
                results[arm] = values | audit, said
            top, bottom = results["checkpoint"][0]["loss"], results["own"][0]["loss"]
            rows = [
                {
                    **common,
                    "arm": arm,
                    "epsilon": EPSILON,
                    "noise": released.noise.mean,
                    **values,
                    **(
                        {"closed": (top - values["loss"]) / (top - bottom)}
                        if "loss" in values
                        else {}
                    ),
                    **said,
                }
                for arm, (values, said) in results.items()
            ]
            harness.table(rows, ["arm", *MEASURES])
            print(harness.record("chosen_texts", rows), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
