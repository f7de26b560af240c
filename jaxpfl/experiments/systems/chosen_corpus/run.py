"""Carries out the study: embeds the pool, asks the clients once, chooses, and writes the corpus.

    runs/moments/    the one release, which has a page of its own
    artifacts/       what the writer wrote in each round, if there is one
    corpus.jsonl     the chosen texts, with the name of their corpus, their weight, its terms, and
                     their label, if labels are given
    card.md          what the corpus is

An interrupted run chooses again from the same release, and from the same texts.
"""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms import gaussian_moments
from jaxpfl.algorithms.chosen_texts import Choice, Evidence, choose
from jaxpfl.data.population import Population
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.config.sections import WRITTEN
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.systems import CORPUS
from jaxpfl.experiments.systems.chosen_corpus.config import JUDGE
from jaxpfl.experiments.systems.chosen_corpus.page import card
from jaxpfl.experiments.systems.chosen_corpus.study import Study
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.text.columns import texts_of
from jaxpfl.text.embed import embed, embeddings_of

# Of the texts of each corpus by each embedder's column: float32 [n, d].
_Embeddings = dict[str, dict[str, np.ndarray]]

# Words of English that no topic lacks, and the least share of them in English texts.
_ENGLISH = {"the", "of", "and", "to", "in", "a", "is", "that", "it", "for"}
_LEAST_ENGLISH = 0.05
# Texts beyond this share of the clients' own spread are not like theirs.
_FAR = 0.5


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    author, progress, config = study.author, workspace.progress, study.config
    writer, embeddings = None, _Embeddings()

    def read() -> None:
        nonlocal writer
        if author is not None:
            # Before the release: a model that cannot write is refused at no charge.
            writer = author.loaded(progress)
            author.try_out(writer, workspace.artifacts())
        embeddings.update(_embedded(study, study.pool, progress))
        study.require_visible(_covariances(study, embeddings))

    decide("the public texts", read)
    run: Any = {"name": "moments", "privacy": config.privacy}
    run["ask"] = lambda: study.embedded(progress)
    result = workspace.train(study.release, study.clients, **run)
    return decide("the choice", lambda: _chosen(study, workspace, result, embeddings, writer))


def _embedded(study: Study, corpora: Mapping[str, Population], progress: bool) -> _Embeddings:
    embeddings = _Embeddings()
    for name, corpus in corpora.items():
        by = {c: embed(corpus, f, progress=progress) for c, f in study.embedders.items()}
        embeddings[name] = {column: embeddings_of(embedded) for column, embedded in by.items()}
    return embeddings


def _rows(embeddings: _Embeddings, column: str) -> np.ndarray:
    """The embeddings of all corpora, one after another, by one embedder: float32 [N, d]."""
    return np.concatenate([of_corpus[column] for of_corpus in embeddings.values()])


def _covariances(study: Study, embeddings: _Embeddings) -> dict[str, np.ndarray]:
    clip_norm = study.moments.clip_norm
    return {
        column: gaussian_moments.moments(_rows(embeddings, column), clip_norm).covariance_DxD
        for column in study.embedders
    }


def _chosen(
    study: Study, workspace: Workspace, result: Result, embeddings: _Embeddings, writer: Any
) -> dict[str, Any]:
    """Writes the corpus that the release chooses, and returns the public record."""
    config, directory, author = study.config, workspace.directory, study.author
    of_all = study.released(result.state)
    released = study.shown(_covariances(study, embeddings), of_all)
    counts = [of_all[label]["embedding"].moments.count for label in released]
    numbers = dict(zip(released, shares_of(config.texts, counts), strict=True))

    def choice_of(label: str, pool: Mapping[str, Population]) -> Choice:
        new = {name: corpus for name, corpus in pool.items() if name not in embeddings}
        rows = {**embeddings, **_embedded(study, new, workspace.progress)}
        parts = {name: Evidence(of, _rows(rows, name)) for name, of in released[label].items()}
        names_N = np.repeat(list(pool), [corpus.num_examples for corpus in pool.values()])
        settings: Any = {"judge": parts.pop(JUDGE, None), "progress": workspace.progress}
        settings["written"] = WRITTEN if author else ""
        return choose(list(parts.values()), names_N, numbers[label], **settings)

    choices = {label: choice_of(label, study.pool) for label in released}
    pool, rounds = study.pool, []
    if author is not None and writer is not None:
        store = workspace.artifacts(result.run)
        # With a writer there are no labels.
        choices[""], pool, rounds = author.pick_again(
            writer, choices[""], partial(choice_of, ""), store, workspace.progress
        )
    corpora = {name: study.corpora.get(name, corpus) for name, corpus in pool.items()}
    text_pool.write(directory / CORPUS, choices, corpora, pool)
    # Not by `splitlines`: texts may have other ends of lines.
    rows = list(map(json.loads, (directory / CORPUS).read_text("utf-8").split("\n")[:-1]))
    drawn = Counter(row["source"] for row in rows)
    texts, abouts, warnings = iter(rows), dict[str, dict[str, Any]](), _cautions(study)
    if rounds and not rounds[-1]["written"]:
        warnings.append("The writer wrote no text of use: the texts were chosen without it.")
    none = "noise hides the clients' texts of this label, or there are none, and no texts were"
    warnings += [f"{label}: {none} chosen for it." for label in of_all if label not in released]
    for label, of in released.items():
        hidden = [name for column, name in config.embedders.items() if column not in of]
        by = f"{label and f'{label}: '}noise hides the clients' texts by"
        warnings += [f"{by} {name}, which chose none." for name in hidden]
    for label, choice in choices.items():
        of_row = {row: next(texts)["text"] for row in choice.rows_M.tolist()}
        about = chosen.record_of(choice, of_row.__getitem__)
        counted = of_all[label]["embedding"].moments.count
        abouts[label] = {**about, "clients": counted}
        sentences, parts = chosen.cautions(about), list(released[label].items())
        # By the release alone.
        own = [p for column, p in parts if column != JUDGE]
        spread = sum(float(np.trace(p.moments.covariance_DxD)) - p.noise.mean_bias for p in own)
        if not choice.distance <= _FAR * spread:
            sentences.append(
                "No public text is much like the clients': what was chosen is "
                f"{choice.distance:.2g} away from them, and their own texts are spread by "
                f"{spread:.2g} (squared distances). Other public sources may be nearer; to choose "
                "from these is another release."
            )
        warnings += [f"{label}: {text}" if label else text for text in sentences]
    about = abouts.pop("", None) or _together(abouts)
    terms = {name: set[str]() for name in about["shares"]}
    for row in rows:
        columns = row.keys() & text_pool.TERMS
        terms[row["source"]] |= {str(row[column]) for column in columns if row[column]}
    record = {
        "private": not workspace.stamp,
        "privacy": result.privacy,
        "clients": config.data.source,
        "number": len(study.clients),
        "embedder": ", ".join(f.name for name, f in study.embedders.items() if name != JUDGE),
        "judge": None if JUDGE not in study.embedders else study.embedders[JUDGE].name,
        "cut": config.cut,
        "choice": about,
        "labels": abouts,
        "corpora": [
            {
                "corpus": name,
                "source": config.corpora.get(name, "the writer"),
                "texts": pool[name].num_examples,
                "chosen": drawn[name],
                "terms": "; ".join(sorted(terms[name])[:10]) or "the source does not say",
            }
            for name in about["shares"]
        ],
        "repeated": study.repeated,
        "writer": None,
        "cautions": warnings,
        "metrics": {
            "epsilon": result.metrics.get("epsilon"),
            "distance": about["distances"]["chosen"],
            "drawn_distance": about["distances"]["drawn"],
            "mixture_distance": about["distances"]["mixture"],
            "effective_size": about["effective_size"],
        },
    }
    if author is not None:
        number = author.config.texts * author.config.rounds
        by = {"model": author.described(writer), "asked": number, "rounds": rounds}
        record["writer"] = by
    files.write_atomically(directory / "card.md", card(record, workspace.stamp))
    return files.jsonable(record)


def _cautions(study: Study) -> list[str]:
    """Sentences on what the corpus may be mistaken for, by public texts alone."""
    config, pool = study.config, study.pool
    warnings = []
    if study.author is not None:
        warnings.append(
            "Written texts may be a model's repetition of public text that it was trained on, or "
            "of its prompts; whoever has rights in such text may have them in these, too."
        )
    forms = config.cut, config.data.source, config.corpora
    warnings += chosen.of_division(*forms, lambda name: texts_of(pool[name]))
    if "minilm" in config.embedders.values():
        texts = itertools.chain.from_iterable(map(texts_of, pool.values()))
        words = Counter(word for text in texts for word in text.lower().split())
        if sum(words[word] for word in _ENGLISH) < _LEAST_ENGLISH * words.total():
            warnings.append(
                "The public texts do not look like English, the language that minilm was trained "
                "on: its distances mean little in another one. The embedder hashed reads any "
                "language."
            )
    return warnings


def shares_of(texts: int, counts: Sequence[float]) -> list[int]:
    """How many texts each label gets: one, and of the others as many as its released count says."""
    ends_K = np.cumsum(counts) / np.sum(counts) * (texts - len(counts))
    return (1 + np.diff(np.rint(ends_K), prepend=0)).astype(int).tolist()


def _together(labels: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What is said of the texts of all labels: sums, and means by the number of texts."""
    parts = list(labels.values())
    sizes = [part["texts"] for part in parts]
    together = {"texts": sum(sizes), "pool": parts[0]["pool"]}
    together["effective_size"] = sum(part["effective_size"] for part in parts)
    for name in ("shares", "distances", "judged"):
        values = [list(map(part[name].get, parts[0][name])) for part in parts]
        means = np.average(values, 0, sizes).tolist()
        together[name] = dict(zip(parts[0][name], means, strict=True))
    return {**together, "examples": [text for part in parts for text in part["examples"]]}
