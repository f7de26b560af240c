"""`jaxpfl fred`: ranks public corpora by their distance to private clients, from one release.

The same release chooses single texts of these corpora, see `algorithms.chosen_texts`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import require_affordable
from jaxpfl.algorithms.fred import FredPlan, fred, private_moments, public_moments, used_examples
from jaxpfl.algorithms.fred.scores import BestMixture, best_mixture, score
from jaxpfl.algorithms.gaussian_moments import Moments, moments
from jaxpfl.compilation_cache import caches
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine.cost import both_statements
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, mark_of
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import Table, text_lines
from jaxpfl.experiments.report.plots import bars, plain
from jaxpfl.federated.hosts import processes
from jaxpfl.federated.mesh import leads
from jaxpfl.privacy.certificate import certify
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.columns import texts_of
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import Embedder, embed, embedder, embeddings_of

_NAMED = re.compile(r"([\w.%+-][\w .%+-]*)=(.+)", re.DOTALL)


def choose_corpus(
    private: str | Population,
    candidates: Sequence[str],
    *,
    plan: FredPlan,
    embedder_name: str = "hashed",
    cut: str = "messages",
    choose: int | None = None,
    texts: str | Path | None = None,
    out: str | Path,
    ledger: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Releases the clients' moments once and ranks the candidates, each SOURCE or NAME=SOURCE.

    Texts of clients and candidates are cut by the rule `cut`, see `text.cut`. With `choose`, so
    many single texts of all candidates are chosen by the same release. They are written to `texts`,
    a .jsonl or .parquet file (default: chosen.jsonl in the folder `out`), each with its "source",
    the candidate's name, its "weight", and the candidates' columns "license", "licence" and
    "attribution", where one has them. Texts that are empty, or were there before, are ranked with
    the others and not chosen. The embeddings of all candidates are then in memory.

    The folder `out` gets fred.json (the returned record), certificate.json, fred.png (a bar for
    each candidate), moments.npz (the released moments, which score further candidates at no cost),
    private/ (the clients' embeddings) and, unless `ledger` names another file, ledger.jsonl.
    Several processes of `jax.distributed` share it if all call this alike: process 0 alone reads
    corpora and writes.

    Raises:
      InputError: a candidate holds the clients' data, or together they have no more texts than are
        to be chosen; nothing was released.
      BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
    """
    with processes.shared():
        sources, function = named(candidates), embedder(embedder_name)
        rule, whole = Cut.without_model(cut), open_population(private)
        directory, clients = files.user_path(out), rule.population(whole)
        query = fred(plan, units=plan.units(clients), dimension=function.dimension)
        used = used_examples(clients, plan, seed=0)
        pieces, corpora, pool, distinct = ({} for _ in range(4))
        repeated = 0
        file = files.user_path(texts) if texts else directory / "chosen.jsonl"
        path = files.user_path(ledger) if ledger else directory / "ledger.jsonl"
        chart, stamp = directory / "fred.png", "" if plan.private else NOT_PRIVATE

        def read() -> None:
            nonlocal repeated
            content = PrivateContent(whole)
            # Public corpora first: a candidate that is refused must not cost any privacy.
            text_pool.check_file(file)
            for name, source in sources.items():
                pool[name] = corpus = open_population(source, public=True)
                pieces[name] = rule.population(corpus)
                if pieces[name].num_examples == 1:
                    how = "say how a text file is divided, as in FILE.txt?split=lines"
                    one = f"candidate {name} = {source!r} is one text, expected many"
                    raise InputError(f"{one}: {how}")
                content.refuse(corpus, f"candidate {name} = {source!r}")
                if choose is None:
                    corpora[name] = _moments(pieces[name], function, plan.clip_norm, progress)
                else:
                    rows_NxD = embeddings_of(embed(pieces[name], function, progress=progress))
                    columns = {**pieces[name].columns, "embedding": rows_NxD}
                    pieces[name] = pieces[name].with_columns(columns)
                    corpora[name] = moments(rows_NxD, plan.clip_norm)
            if choose is not None:
                of_all, repeated = text_pool.without_repeats(pieces)
                distinct.update(of_all)
                number = sum(corpus.num_examples for corpus in distinct.values())
                text_pool.require_larger(number, choose, "the texts that are to be chosen")

        def stated() -> str:
            released.save(directory / "moments.npz")
            return plan.claimed(both_statements(charged, [charged.charges[-1].run], plan.delta))

        def ranked() -> dict[str, Any]:
            rows = [
                {"rank": rank, "candidate": near.name, "source": sources[near.name], **near.row()}
                for rank, near in enumerate(score(released, corpora, progress=progress), 1)
            ]
            choice, texts_by_name = None, lambda name: texts_of(pieces[name])
            cautions = chosen.of_division(cut, private, sources, texts_by_name)
            if choose is not None:
                embeddings = {name: embeddings_of(corpus) for name, corpus in distinct.items()}
                choice = text_pool.choose_from(released, embeddings, choose, progress=progress)
                text_pool.write(file, {"": choice}, pool, distinct)
                choice = {**chosen.record_of(choice, None), "file": str(file), "repeated": repeated}
                cautions += chosen.cautions(choice)
            record = files.jsonable(
                {
                    "private": plan.private,
                    "statement": statement,
                    "plan": plan.to_dict(),
                    "clients": clients.name,
                    "embedder": function.name,
                    "cut": cut,
                    "dimension": len(released.moments.mean_D),
                    "released_count": released.moments.count,
                    "noise": released.noise._asdict(),
                    "candidates": rows,
                    "best_mixture": best_mixture(released, corpora)._asdict(),
                    "choice": choice,
                    "cautions": cautions,
                    "ledger": str(path),
                    "chart": str(chart),
                }
            )
            files.write_json(directory / "fred.json", record)
            certify(directory, "fred", [plan], statement=statement, stamp=stamp, ledgers=[path])
            plain(bars(rows, mark_of(stamp))).savefig(chart)
            return record

        processes.decide("the candidates", read)
        books: Any = Ledger(path, clients, unit=plan.unit) if leads() else nullcontext()
        with books as charged:
            processes.decide("the budget", lambda: require_affordable(query, charged, run=""))
            if leads():
                file.parent.mkdir(parents=True, exist_ok=True)
                # Kept for the next ranking.
                stored = files.private_directory(directory / "private") / _key(used, function)
                if not stored.exists():
                    embed(used, function, progress=progress).save(stored)
                embedded = Population.load(stored)
            else:
                embedded = embed(used, function, progress=False)
            released = private_moments(embedded, plan, ledger=charged)
            statement = processes.decide("the statement", stated)
        return processes.decide("the ranking", ranked)


def _moments(corpus: Population, function: Embedder, clip_norm: float, progress: bool) -> Moments:
    """`public_moments` from the user's cache, or computed and kept there."""
    folder, key = caches() / "moments", _key(corpus, function, clip_norm)
    compute = partial(public_moments, corpus, function, clip_norm, progress=progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return compute()  # a home that cannot be written
    cache = Artifacts(folder, "public")
    arrays = cache.load_or_compute(key, lambda: Artifact(arrays=vars(compute()))).arrays
    return Moments(float(arrays["count"]), arrays["mean_D"], arrays["covariance_DxD"])


def _key(population: Population, function: Embedder, *settings: float) -> str:
    made_of = json.dumps([population.content, function.name, *settings])
    return hashlib.sha256(made_of.encode()).hexdigest()[:32]


def named(candidates: Sequence[str]) -> dict[str, str]:
    """Returns sources by name, from SOURCE or NAME=SOURCE; the default is the source's own name."""
    sources: dict[str, str] = {}
    for candidate in candidates:
        # A name has no ":", "?" or "/", so docstrings:a and digits?alpha=1 are sources.
        match, path = _NAMED.fullmatch(candidate), candidate.partition("?")[0]
        # docstrings:numpy is numpy; /a/b/c.jsonl.gz?client=x is c.
        in_word = path.partition(":")[2] if not Path(path).suffix else ""
        own = in_word or Path(path).name.split(".")[0] or candidate
        name, source = match.groups() if match else (own, candidate)
        if name in sources:
            rename = f"rename one, as in OTHER={source}"
            raise InputError(f"two candidates have the name {name!r}: {rename}")
        sources[name] = source
    return sources


def table(record: Mapping[str, Any]) -> str:
    """The ranking for a terminal, and what it cost."""
    titles = {"distance": "FreD", "corrected": "corrected", "low": "from", "high": "to"}
    rows = []
    for row in record["candidates"]:
        values = [f"{row[name]:.5g}" for name in titles]
        tied = "tied with the next" if row["tied"] else ""
        rows.append((f"{row['rank']:>2}. {row['candidate']}", *values, tied))
    ranking = Table(("public corpus", *titles.values(), ""), rows, numbers=(1, 2, 3, 4))
    lines = [f"Frechet distance (FreD) to what the clients of {record['clients']} hold:"]
    if record["cut"] != "messages":
        lines.append(f"(all texts are cut alike, to {record['cut']})")
    lines += [*text_lines(ranking), str(BestMixture(**record["best_mixture"]))]
    if (choice := record["choice"]) is not None:
        lines += ["", *chosen.lines(choice), chosen.of_repeats(choice["repeated"])]
        lines += [f"chosen texts: {choice['file']}", ""]
    if len(rows) > 1 and all(row["tied"] for row in record["candidates"][:-1]):
        lines.append(
            "All are tied: the noise hides which is nearest. A smaller embedder, as hashed:16, "
            "or a larger epsilon tells more, and is charged anew."
        )
    lines += [f"caution: {caution}" for caution in record["cautions"]]
    lines += ["", record["statement"], f"ledger: {record['ledger']}", f"chart: {record['chart']}"]
    return "\n".join(lines)
