"""The certificate of a run, made from its public files when its result is written."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.federated.flow.captured import captured
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.releaser import charge_label
from jaxpfl.privacy import events
from jaxpfl.privacy.certificate import NAME, certificate
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan


def described(run: str, name: str | None, queries: Sequence[Query]) -> list[dict[str, Any]]:
    """What clients are asked in a run, as its `run.json` and its certificate say it.

    What a client function captured is public by declaration: a reader must be able to see it.
    """
    return [
        {
            "run": run,
            "label": charge_label(query, name, len(queries)),
            "plan": query.plan.to_dict(),
            "event": events.to_json(query.plan.charge_event()),
            "captured": [*captured(query.client_fn), *captured(query.prepare)],
            "flow_checked": not query.plan.unchecked,
        }
        for query in queries
    ]


def certify(
    directory: Path,
    system: str,
    plans: Iterable[Plan],
    *,
    statement: str,
    stamp: str,
    ledgers: Iterable[Path],
) -> None:
    """Writes a run's `certificate.json`.

    Args:
      plans: of what clients were asked; the first one with noise gives the delta.
      statement, stamp: as they are printed.
      ledgers: of the releases that the statement is of; none is charged by a run that asks nobody.
    """
    found = {_name(path, directory): path for path in ledgers if path.exists()}
    queries = [
        query
        for path in sorted(directory.rglob("run.json"))
        for query in files.read_record(path).get("asked", [])
    ]
    record = certificate(
        system,
        {name: Ledger.read(path) for name, path in found.items()},
        next((plan.delta for plan in plans if plan.private), None),
        statement=statement,
        stamp=stamp,
        queries=queries,
    )
    files.write_json(directory / NAME, record)


def _name(ledger: Path, directory: Path) -> str:
    inside = ledger.is_relative_to(directory)
    return ledger.relative_to(directory).as_posix() if inside else ledger.name
