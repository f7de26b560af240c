"""What a round of synthetic text costs a client and the server, by method: POPri's Table 2.

    python -m benchmarks.macro.popri_cost
    python -m benchmarks.macro.popri_cost --paper-clients

Sizes and settings are those of a study's config; everything else is a stand-in, so that no private
time is shown: clients' texts and public corpora are docstrings, scores and votes are noise, and
models of the study's shapes are pretrained for a moment, so that responses end where lines would.

    client s     one client's step, on one device: local training, scores or votes, and clipping;
                 without the time that the floats are under way
    own texts s  what scores and votes need of a client once for all rounds: its texts embedded
    server s     of a round: DP-FedAvg noise and the optimiser's step; private evolution the
                 variations, and their embeddings; POPri responses, their embeddings, the space of
                 the scores, and tuning. Adding up what clients send is left out of all

`--paper-clients` adds a client's step at the paper's size, 18,000 candidates (PE: 1,800) in 384
dimensions, with POPri's in two forms: ours, whose d coordinates stand for all scores, and the
published one, which gets the candidates and sends a score of each. Times are the best of the
repeats, without compiling; `response tokens` is the mean length of what the generator wrote. Rows
"paper" are of Hou et al. 2025, Table 2 (bioRxiv, 1,000 clients a round, Llama 3 8B on GPUs), to be
compared in floats; its seconds are of other models and hardware.
"""

import dataclasses
import pathlib
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.algorithms import Scorer
from jaxpfl.algorithms.base import server_step
from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.adamw import DecoderModelConfig
from jaxpfl.experiments.engine.build import build_optimizer
from jaxpfl.experiments.registry import load
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import CorpusWriter, loaded_embedder
from jaxpfl.federated.clients.client import ClientFn, Examples, contribution
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.scores import (
    LinearScores,
    NearestVotes,
    mean_embeddings,
    score_space,
    unit_rows,
)
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.releaser import Released
from jaxpfl.privacy.clipping import Clip, clip_factors
from jaxpfl.privacy.mechanisms import cut, standard_normal
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.secret import RunSecret

STUDY = pathlib.Path(__file__).parents[2] / "configs" / "popri_small.yaml"
COLUMNS = ["what", "floats down", "floats up", "client s", "own texts s", "server s"]
PAPER = (
    ("paper: DP-FedAvg", 82_000_000, 82_000_000, 4.8, None),
    ("paper: PE", 700_000, 1_800, 0.0027, 326.25),
    ("paper: POPri", 7_000_000, 18_000, 0.01, 13_547.84),
)


@dataclasses.dataclass(frozen=True)
class Config:
    study: pathlib.Path = STUDY
    source: str = "docstrings:numpy,jax"  # stands for all corpora and clients
    corpus_texts: int = 4_000  # of it are used
    texts: int = 8  # of a client
    paper_clients: bool = False
    rounds: int = 3  # of the server, besides one that compiles
    calls: int = 20  # of a client's step, in each repeat
    repeats: int = 5
    devices: int | None = None  # virtual CPU devices of the server; default one a core


class Phases:
    """A `stored_rounds.LoadOrCompute` that stores nothing but times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Any:
        began = time.perf_counter()
        found = make()
        self.seconds[name] = time.perf_counter() - began
        return found

    def best(self, what: str, rounds: int) -> float:
        """Of the rounds but the first, which compiles, and for evolution the last."""
        return min(self.seconds[f"round {round} {what}"] for round in range(2, 2 + rounds))


@dataclasses.dataclass(frozen=True)
class TimedScorer(Scorer):
    """Times the server's part of a release.

    Attributes:
      candidates: of all releases, [prompts, responses, d].
      seconds: of all releases.
    """

    candidates: list[Any] = dataclasses.field(default_factory=list, compare=False)
    seconds: list[float] = dataclasses.field(default_factory=list, compare=False)

    def release(self, release: Any, candidates_KxJxD: Any, round: int) -> np.ndarray:
        self.candidates.append(candidates_KxJxD)
        began = time.perf_counter()
        found = super().release(release, candidates_KxJxD, round)
        self.seconds.append(time.perf_counter() - began)
        return found


class Server:
    """One method's rounds without clients: the server's part, over draws of what they would send.

    Args:
      study: with stand-ins.
      method: "popri" or "private_evolution".
    """

    def __init__(self, study: SyntheticTextConfig, method: str) -> None:
        plan = Plan.without_privacy(
            rounds=study.training.rounds, clip=Clip(1.0), participation=Poisson(1, 1)
        )
        config = dataclasses.replace(study, method=method)
        kind = "per_prompt" if method == "popri" else "nn_histogram"
        self.timed = TimedScorer(plan, kind)
        self.writer = CorpusWriter(config)
        self.store = Phases()
        self._rng = np.random.default_rng(0)

    def run(self, on_round: Callable[[Any], None] = lambda found: None) -> None:
        """All rounds; times are left in `store` and `timed`."""
        with tempfile.TemporaryDirectory() as folder:
            directory = pathlib.Path(folder)
            releases: Any = types.SimpleNamespace(load_or_compute=self.store, ask=self._ask)
            self.writer.tuned(directory, releases, self.timed, lambda texts: 0.0, on_round)

    def _ask(self, step: Callable, state: Any, round: int) -> tuple[Any, Any]:
        return step(state, self._release, round)

    def _release(self, query: Query, broadcast: Any) -> Released:
        """Stands for `federated.Release`."""
        if isinstance(query.client_fn, NearestVotes):
            drawn = self._rng.exponential(size=len(broadcast)).astype(np.float32)
        else:
            drawn = self._rng.standard_normal(len(broadcast), np.float32)
        return Released(jnp.asarray(drawn), jnp.float32(1))


def main(config: Config) -> list[dict[str, Any]]:
    harness.use_cpu_devices(config.devices)
    study = load(config.study)
    if not isinstance(study, SyntheticTextConfig):
        raise SystemExit(f"{config.study} is no study of synthetic text")
    clients: dict[str, ClientStep] = {}
    with tempfile.TemporaryDirectory() as folder:
        stand_in = with_stand_ins(study, config, folder)
        try:
            texts = clients_texts(config)
            rows = [
                fed_avg(stand_in, config, texts, clients),
                evolution(stand_in, config, texts, clients),
                popri(stand_in, config, texts, clients),
            ]
        except InputError as error:
            raise SystemExit(str(error)) from None
    # Not the study's, which remembers its last texts.
    function = loaded_embedder(study.embedder)
    if config.paper_clients:
        rows += at_papers_size(config.texts, clients)
    programs: dict[str, Callable[[], object]] = {
        what: step.times(config.calls) for what, step in clients.items()
    }
    programs["own texts"] = lambda: [function(texts) for _ in range(config.calls)]
    seconds = harness.interleaved(programs, config.repeats)
    for row in rows:
        row |= {
            "floats down": clients[row["what"]].down,
            "floats up": clients[row["what"]].up,
            "client s": seconds[row["what"]] / config.calls,
            "texts of a client": config.texts,
            "study": config.study.name,
        }
        if row.pop("embeds", False):
            row["own texts s"] = seconds["own texts"] / config.calls
    cited = [dict(zip((*COLUMNS[:4], "server s"), row, strict=True)) for row in PAPER]
    harness.table([*rows, *(_without_none(row) for row in cited)], COLUMNS)
    phases = ["responses s", "embeddings s", "scores s", "tuning s", "variations s"]
    harness.table(
        [row for row in rows if "embeddings s" in row], ["what", *phases, "response tokens"]
    )
    print(f"recorded in {harness.record('popri_cost', rows)}")
    return rows


def with_stand_ins(study: SyntheticTextConfig, config: Config, folder: str) -> SyntheticTextConfig:
    """The study's sizes with another source for everything, and models that hardly learn."""
    generator, downstream = study.generator, study.downstream
    # The studies of the table have small decoders that are pretrained here.
    assert isinstance(generator, DecoderModelConfig) and isinstance(downstream, DecoderModelConfig)
    once = dataclasses.replace(generator.pretraining, epochs=1)
    return dataclasses.replace(
        study,
        corpora={"stand-in": config.source},
        corpus_texts=config.corpus_texts,
        generator=dataclasses.replace(generator, corpora=None, pretraining=once),
        downstream=dataclasses.replace(downstream, corpora=None, pretraining=once),
        popri=dataclasses.replace(study.popri, samples=None),
        cache=folder,
        # Evolution varies in all rounds but the last.
        training=dataclasses.replace(study.training, rounds=config.rounds + 2),
    )


def clients_texts(config: Config) -> list[str]:
    """Texts of one client: the first that are sentences rather than a word or two."""
    texts = open_population(config.source).columns["text"].to_pylist()
    return [text for text in texts if len(text.split()) >= 5][: config.texts]


@dataclasses.dataclass(frozen=True)
class ClientStep:
    """What one client does in a round, clipped as the door clips it.

    Attributes:
      down, up: floats that it receives and sends.
    """

    function: ClientFn
    broadcast: Any
    examples: Examples
    clip_norm: float
    down: int

    @property
    def up(self) -> int:
        like = jax.eval_shape(
            partial(contribution, self.function), self.broadcast, self.examples, jax.random.key(0)
        )
        return sum(leaf.size for leaf in jax.tree.leaves(like))

    def times(self, calls: int) -> Callable[[], None]:
        """A function that does it so often, one after the other, on the default device."""
        bound = jnp.float32(self.clip_norm)

        @jax.jit
        def step(broadcast: Any, examples: Examples, key: jax.Array) -> Any:
            found = contribution(self.function, broadcast, examples, key)
            factors, _, counts = clip_factors(found, bound)
            return jax.tree.map(lambda x, by: jnp.where(counts, x * by, 0.0), found, factors)

        held = jax.device_put((self.broadcast, self.examples), jax.devices()[0])
        key = jax.random.key(0)

        def several() -> None:
            for _ in range(calls):
                jax.block_until_ready(step(*held, key))

        return several


def examples_of(column: str, rows_NxW: np.ndarray, batch: int, epochs: int = 1) -> Examples:
    """One client's examples as the cohort packs them."""
    steps = -(-len(rows_NxW) // batch)
    padded = np.zeros((steps * batch, *rows_NxW.shape[1:]), rows_NxW.dtype)
    padded[: len(rows_NxW)] = rows_NxW
    mask = (np.arange(steps * batch) < len(rows_NxW)).reshape(steps, batch)
    batches = np.tile(padded.reshape(steps, batch, *padded.shape[1:]), (epochs, 1, 1))
    mask = jnp.asarray(np.tile(mask, (epochs, 1)))
    return Examples({column: jnp.asarray(batches)}, mask, jnp.int32(steps * epochs))


def fed_avg(
    study: SyntheticTextConfig, config: Config, texts: list[str], clients: dict[str, ClientStep]
) -> dict[str, Any]:
    what, training = "DP-FedAvg, DP-FTRL", study.training
    writer = CorpusWriter(study)
    start, optimizer = writer.downstream, build_optimizer(training.server)
    params = jax.device_put(start.params, jax.devices()[0])
    rows = writer.rows(texts)[: training.max_examples]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    clients[what] = ClientStep(
        LocalTraining(start.model, build_optimizer(training.client)),
        params,
        examples_of("tokens", rows, training.batch_size, training.epochs),
        study.privacy.clip_norm,
        size,
    )
    # The step writes into what it is given.
    state: list[Any] = [jax.tree.map(jnp.copy, params), optimizer.init(params)]
    key, denominator = RunSecret().key("noise", ""), jnp.float32(training.clients_per_round)

    def server() -> None:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        noise = cut(standard_normal(key, (size,)) * jnp.float32(1e-3), params)
        state[:] = server_step(optimizer, *state, noise, denominator)[:2]
        jax.block_until_ready(state)

    return {
        "what": what,
        "server s": harness.interleaved({what: server}, config.repeats)[what],
        "parameters": size,
    }


def evolution(
    study: SyntheticTextConfig, config: Config, texts: list[str], clients: dict[str, ClientStep]
) -> dict[str, Any]:
    what, settings = "PE, PE+SFT", study.evolution
    server = Server(study, "private_evolution")
    server.run()
    store = server.store
    rows_NxD = np.asarray(server.writer.function(texts[: settings.max_texts]))
    unit_MxD = unit_rows(jnp.asarray(server.timed.candidates[-1][:, 0]))
    clients[what] = votes(rows_NxD, unit_MxD)
    return {
        "what": what,
        "embeds": True,
        "server s": store.best("votes", config.rounds) + store.best("texts", config.rounds),
        "embeddings s": store.best("votes", config.rounds),
        "variations s": store.best("texts", config.rounds),
        "form": settings.form,
        "candidates": settings.population,
        "dimension": rows_NxD.shape[1],
    }


def popri(
    study: SyntheticTextConfig, config: Config, texts: list[str], clients: dict[str, ClientStep]
) -> dict[str, Any]:
    what, settings = "POPri", study.popri
    server, lengths = Server(study, "popri"), []
    store, writer = server.store, server.writer

    def count(written: Any) -> None:
        drawn = [text for row in written.responses for text in row]
        lengths.extend(map(len, writer.public.tokeniser.encode(drawn)))

    server.run(count)
    rows_NxD = np.asarray(writer.function(texts))
    clients[what] = coordinates(rows_NxD, server.timed.candidates[-1])
    scoring = store.best("scores", config.rounds)
    phases = {
        "responses s": store.best("responses", config.rounds),
        "embeddings s": scoring - min(server.timed.seconds[1:]),
        "scores s": min(server.timed.seconds[1:]),
        "tuning s": store.best("adapters", config.rounds),
    }
    return {
        "what": what,
        "embeds": True,
        "server s": sum(phases.values()),
        **phases,
        "candidates": settings.prompts * settings.responses,
        "dimension": rows_NxD.shape[1],
        "response tokens": float(np.mean(lengths)),
    }


def at_papers_size(texts: int, clients: dict[str, ClientStep]) -> list[dict[str, Any]]:
    """Steps of a client with 1,800 prompts of 10 responses, and with 1,800 texts to vote for."""
    rng = np.random.default_rng(0)
    candidates_KxJxD = rng.standard_normal((1_800, 10, 384), np.float32)
    rows_NxD = rng.standard_normal((texts, 384), np.float32)
    unit_KxJxD = unit_rows(jnp.asarray(candidates_KxJxD))
    unit_MxD = unit_KxJxD.reshape(-1, 384)
    found = {
        "PE, paper's size": votes(rows_NxD, unit_KxJxD[:, 0]),
        "POPri, paper's size": coordinates(rows_NxD, candidates_KxJxD),
        "POPri as published": ClientStep(
            all_scores, unit_MxD, examples_of("embedding", rows_NxD, texts), 1.0, unit_MxD.size
        ),
    }
    clients |= found
    return [{"what": what, "dimension": 384} for what in found]


def all_scores(unit_MxD: jax.Array, examples: Examples, key: jax.Array) -> jax.Array:
    """POPri's Algorithm 1 on the client: the mean cosine of each candidate with its texts, [M]."""
    del key
    rows_NxD = unit_rows(examples.batches["embedding"][0])
    return jnp.mean(jnp.matmul(rows_NxD, unit_MxD.T, precision="highest"), axis=0)


def coordinates(rows_NxD: np.ndarray, candidates_KxJxD: np.ndarray) -> ClientStep:
    """Ours: half of a square down, a client's coordinates up."""
    factor_DxD = score_space(jnp.asarray(candidates_KxJxD), "prompt").factor_DxD
    dimension = len(factor_DxD)
    mean_1xD = mean_embeddings(rows_NxD, np.array([0, len(rows_NxD)]))
    examples = examples_of("mean_embedding", mean_1xD, 1)
    return ClientStep(
        LinearScores(1.0), factor_DxD, examples, 1.0, dimension * (dimension + 1) // 2
    )


def votes(rows_NxD: np.ndarray, unit_MxD: jax.Array) -> ClientStep:
    """Private evolution's: all candidates down, as many votes up."""
    examples = examples_of("embedding", rows_NxD, len(rows_NxD))
    return ClientStep(NearestVotes(), unit_MxD, examples, float(len(rows_NxD)), unit_MxD.size)


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
