"""`jaxpfl fred`: ranks public corpora by their distance to private clients, from one release."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import require_affordable
from jaxpfl.algorithms.fred import (
    FredPlan,
    PrivateMoments,
    fred,
    private_moments,
    public_moments,
    score,
    used_examples,
)
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine.cost import both_statements
from jaxpfl.experiments.engine.run_directory import run_id
from jaxpfl.experiments.report.ranking_plots import bars
from jaxpfl.federated import mesh
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret
from jaxpfl.text.embed import embed, embedder

_NAMED = re.compile(r"([\w.%+-][\w .%+-]*)=(.+)", re.DOTALL)


def choose_corpus(
    private: str | Population,
    candidates: Sequence[str],
    *,
    plan: FredPlan | None,
    without_privacy: FredPlan | None = None,
    embedder_name: str = "hashed",
    out: str | Path,
    ledger: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Releases the clients' moments once and ranks the candidates; writes to the folder `out`.

    The folder gets fred.json (the returned record), fred.png (a bar for each candidate),
    moments.npz (the released moments, which score further candidates at no cost) and, unless
    `ledger` names another file, ledger.jsonl.

    Args:
      private: a source of clients, or the population.
      candidates: public sources, each SOURCE or NAME=SOURCE.
      plan: of the private release; None for no private release.
      without_privacy: computes the distances without noise, too, or alone. They are NOT private,
        say so, and are charged to a ledger of their own, ledger-not-private.jsonl.
      embedder_name: see `text.embed.embedder`.

    Raises:
      InputError: a source, name or embedder is not valid, a candidate holds the clients' data, or
        no plan is given.
      BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
    """
    mesh.require_one_process("a comparison of corpora needs")
    sources = named(candidates)
    plans = [each for each in (plan, without_privacy) if each is not None]
    if len({(each.clip_norm, each.unit, each.max_examples) for each in plans}) != 1:
        raise InputError(
            "plan and without_privacy: at least one is required, and both need the same clip norm, "
            f"unit and max_examples, found {len(plans)} plans"
        )
    function = embedder(embedder_name)
    directory = Path(out)
    clients = open_population(private)
    content = PrivateContent(clients)
    # Public corpora first: a candidate that is refused must not cost any privacy.
    corpora = {}
    for name, source in sources.items():
        corpus = open_population(source)
        content.refuse(corpus, f"candidate {name} = {source!r}")
        corpora[name] = public_moments(corpus, function, plans[0].clip_norm, progress=progress)
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, PrivateMoments] = {}
    paths = {
        "private": Path(ledger) if ledger is not None else directory / "ledger.jsonl",
        "non_private": directory / "ledger-not-private.jsonl",
    }
    with ExitStack() as stack:
        ledgers = {
            kind: stack.enter_context(Ledger(paths[kind], clients, unit=each.unit))
            for kind, each in (("private", plan), ("non_private", without_privacy))
            if each is not None
        }
        if plan is not None:
            units = len(clients) if plan.unit == "client" else clients.num_examples
            algorithm = fred(plan, units=units, dimension=function.dimension)
            require_affordable(algorithm, ledgers["private"], run="")
        used = used_examples(clients, plans[0], seed=0)
        embedded = embed(used, function, progress=progress)
        statement = ""
        if plan is not None:
            secret = RunSecret()
            run = f"fred {run_id(secret)}"
            found["private"] = private_moments(
                embedded, plan, ledger=ledgers["private"], secret=secret, run=run
            )
            found["private"].save(directory / "moments.npz")
            statement = both_statements(ledgers["private"], [run], plan.delta)
        if without_privacy is not None:
            found["non_private"] = private_moments(
                embedded, without_privacy, ledger=ledgers["non_private"]
            )
            statement = statement or without_privacy.statement()
    record = _record(found, corpora, sources, function.name, paths, directory)
    record |= {"clients": clients.name, "statement": statement}
    files.write_json(directory / "fred.json", record)
    stamp = "" if record["private"] else "NOT PRIVATE"
    bars(record["candidates"], stamp).savefig(directory / "fred.png")
    return record


def named(candidates: Sequence[str]) -> dict[str, str]:
    """Returns sources by name, from SOURCE or NAME=SOURCE; the default is the source's own name.

    Raises:
      InputError: two candidates have one name.
    """
    sources: dict[str, str] = {}
    for given in candidates:
        match = _NAMED.fullmatch(given)
        # A name has no ":", "?" or "/", so docstrings:a and digits?alpha=1 are sources.
        name, source = (match[1], match[2]) if match else (_short(given), given)
        if name in sources:
            raise InputError(
                f"two candidates have the name {name!r}: rename one, as in OTHER={source}"
            )
        sources[name] = source
    return sources


def _short(source: str) -> str:
    """docstrings:numpy -> numpy; /a/b/c.jsonl.gz?client=x -> c."""
    path = source.partition("?")[0]
    if not Path(path).suffix and ":" in path:
        return path.partition(":")[2]
    return Path(path).name.split(".")[0] or source


def _record(
    found: Mapping[str, PrivateMoments],
    corpora: Mapping[str, Any],
    sources: Mapping[str, str],
    embedder_name: str,
    paths: Mapping[str, Path],
    directory: Path,
) -> dict[str, Any]:
    main = "private" if "private" in found else "non_private"
    exact = {}
    if "non_private" in found:
        exact = {each.name: each.distance for each in score(found["non_private"], corpora)}
    rows = []
    for rank, each in enumerate(score(found[main], corpora), 1):
        row = {"rank": rank, "candidate": each.name, "source": sources[each.name]}
        if main == "private":
            row |= each.row()
        if exact:
            row["non_private"] = exact[each.name]
        rows.append(row)
    released = found[main]
    return files.jsonable(
        {
            "private": "non_private" not in found,
            "statement": released.plan.statement(),
            "plan": released.plan.to_dict(),
            "embedder": embedder_name,
            "dimension": len(released.moments.mean_D),
            "released_count": released.moments.count,
            "noise": released.noise._asdict(),
            "candidates": rows,
            "ledger": str(paths[main]),
            "chart": str(directory / "fred.png"),
        }
    )


def table(record: Mapping[str, Any]) -> str:
    """The ranking and its cost as text."""
    rows = record["candidates"]
    titles = {
        "distance": "FreD",
        "corrected": "corrected",
        "low": "from",
        "high": "to",
        "non_private": "NOT PRIVATE",
    }
    columns = [name for name in titles if name in rows[0]]
    width = max(24, *(len(row["candidate"]) + 4 for row in rows))
    lines = [
        f"Frechet distance (FreD) to what the clients of {record['clients']} hold:",
        f"{'public corpus':{width}}" + "".join(f"{titles[name]:>13}" for name in columns),
    ]
    for row in rows:
        values = "".join(f"{row[name]:>13.5g}" for name in columns)
        tie = "  tied with the next" if row.get("tied") else ""
        lines.append(f"{row['rank']:>2}. {row['candidate']:{width - 4}}{values}{tie}")
    lines += ["", record["statement"], f"ledger: {record['ledger']}", f"chart: {record['chart']}"]
    if not record["private"]:
        lines.append("The column and marks NOT PRIVATE are exact statistics of private data.")
    return "\n".join(lines)
