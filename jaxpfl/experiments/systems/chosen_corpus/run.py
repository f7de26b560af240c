"""Carries out the study: embeds the pool, asks the clients once, chooses, and writes the corpus.

    runs/moments/    the one release, which has a page of its own
    artifacts/       what the writer wrote in each round, if there is one
    corpus.jsonl     the chosen texts, with the name of their corpus, their weight, and its terms
    card.md          what the corpus is

An interrupted run chooses again from the same release, and from the same texts.
"""

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms import gaussian_moments
from jaxpfl.algorithms.chosen_texts import Choice
from jaxpfl.algorithms.fred import PrivateMoments, moments
from jaxpfl.data.population import Population
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.config.sections import WRITTEN
from jaxpfl.experiments.records.division import of_division
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.systems.chosen_corpus.page import card
from jaxpfl.experiments.systems.chosen_corpus.study import Study
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.federated.hosts.shared_rounds import Asked
from jaxpfl.text.columns import texts_of
from jaxpfl.text.embed import embed, embeddings_of

CORPUS, CARD = "corpus.jsonl", "card.md"
MOMENTS = "moments"
"""The run of the release, and its stage for several processes."""

# Words of English that no topic lacks, and the least share of them in English texts.
_ENGLISH = {"the", "of", "and", "to", "in", "a", "is", "that", "it", "for"}
_LEAST_ENGLISH = 0.05
# Texts beyond this share of the clients' own spread are not like theirs.
_FAR = 0.5


def asked(study: Study, workspace: Workspace, stage: str, known: Any) -> Asked:
    """The queries of the release, and the clients as they are asked."""
    return study.release.queries, study.embedded(workspace.progress)


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    config, plan, directory = study.config, study.moments, workspace.directory
    number, progress, author = config.texts, workspace.progress, study.author
    writer = None
    if author is not None:
        # Before the release: a model that cannot write is refused at no charge.
        writer = author.loaded(progress)
        author.try_out(writer, workspace.artifacts())

    def embedded(corpus: Population) -> np.ndarray:
        return embeddings_of(embed(corpus, study.embedder, progress=progress))

    embeddings = {name: embedded(corpus) for name, corpus in study.pool.items()}
    rows_NxD = np.concatenate(list(embeddings.values()))
    pool_DxD = gaussian_moments.moments(rows_NxD, plan.clip_norm).covariance_DxD
    study.require_visible(pool_DxD)
    result = workspace.train(
        study.release,
        study.clients,
        name=MOMENTS,
        privacy=config.privacy,
        ask=lambda: study.embedded(progress),
    )
    released = moments(plan, result.state)
    study.require_visible(pool_DxD, released)

    def choose(pool: Mapping[str, Population]) -> Choice:
        more = {name: embedded(corpus) for name, corpus in pool.items() if name not in embeddings}
        written = WRITTEN if author else ""
        return text_pool.choose_from(
            released, embeddings | more, number, written=written, progress=progress
        )

    choice, pool, rounds = choose(study.pool), study.pool, []
    if author is not None and writer is not None:
        store = workspace.artifacts(result.run)
        choice, pool, rounds = author.pick_again(writer, choice, choose, store, progress)
    corpora = {name: study.corpora.get(name, corpus) for name, corpus in pool.items()}
    text_pool.write(directory / CORPUS, choice, corpora, pool)
    rows = [json.loads(line) for line in (directory / CORPUS).read_text("utf-8").splitlines()]
    texts = dict(zip(choice.rows_M.tolist(), (row["text"] for row in rows), strict=True))
    drawn = Counter(row["source"] for row in rows)
    about = chosen.record_of(choice, texts.__getitem__)
    record = {
        "private": not workspace.stamp,
        "privacy": result.privacy,
        "clients": config.data.source,
        "number": len(study.clients),
        "embedder": study.embedder.name,
        "cut": config.cut,
        "choice": about,
        "corpora": [
            {
                "corpus": name,
                "source": config.corpora.get(name, "the writer"),
                "texts": pool[name].num_examples,
                "chosen": drawn[name],
                "terms": _terms([row for row in rows if row["source"] == name]),
            }
            for name in choice.shares
        ],
        "repeated": study.repeated,
        "writer": author
        and {
            "model": author.described(writer),
            "asked": author.config.texts * author.config.rounds,
            "written": pool[WRITTEN].num_examples,
            "rounds": rounds,
        },
        "cautions": [*chosen.cautions(about), *_cautions(study, released, choice.distance)],
        "metrics": {
            "epsilon": result.metrics.get("epsilon"),
            "distance": choice.distance,
            "drawn_distance": choice.drawn_distance,
            "mixture_distance": choice.mixture_distance,
            "effective_size": choice.effective_size,
        },
    }
    files.write_atomically(directory / CARD, card(record, workspace.stamp))
    return record


def _cautions(study: Study, released: PrivateMoments, distance: float) -> list[str]:
    """Sentences on what the corpus may be mistaken for, by public texts and the release alone."""
    config, pool = study.config, study.pool
    warnings = []
    if study.author is not None:
        warnings.append(
            "Written texts may be a model's repetition of public text that it was trained on, or "
            "of its prompts; whoever has rights in such text may have them in these, too."
        )
    warnings += of_division(
        config.cut, config.data.source, config.corpora, lambda name: texts_of(pool[name])
    )
    spread = float(np.trace(released.moments.covariance_DxD)) - released.noise.mean_bias
    if distance > _FAR * spread:
        warnings.append(
            f"No public text is much like the clients': what was chosen is {distance:.2g} away "
            f"from them, and their own texts are spread by {spread:.2g} (squared distances). Other "
            "public sources may be nearer; to choose from these is another release."
        )
    if config.embedder == "minilm" and _english(pool) < _LEAST_ENGLISH:
        warnings.append(
            "The public texts do not look like English, the language that minilm was trained on: "
            "its distances mean little in another one. The embedder hashed reads any language."
        )
    return warnings


def _english(pool: Mapping[str, Population]) -> float:
    """The share of the public texts' words that every English text has."""
    texts = itertools.chain.from_iterable(map(texts_of, pool.values()))
    words = Counter(word for text in texts for word in text.lower().split())
    return sum(words[word] for word in _ENGLISH) / max(1, words.total())


def _terms(rows: list[dict[str, Any]]) -> str:
    """The terms of use of some chosen texts, as their corpus has them in its columns."""
    values = {str(row[term]) for row in rows for term in row.keys() & text_pool.TERMS if row[term]}
    return "; ".join(sorted(values)[:10]) or "the source does not say"
