"""The certificate of a run, made from its public files when its result is written."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpfl import files
from jaxpfl.privacy.certificate import NAME, certificate
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

if TYPE_CHECKING:  # a run without FreD does not load it
    from jaxpfl.algorithms.fred import FredPlan

WITHOUT_NOISE = 1e-6


def certify(
    directory: Path,
    system: str,
    plans: "Iterable[Plan | FredPlan]",
    *,
    statement: str,
    stamp: str,
    ledgers: Iterable[Path],
) -> None:
    """Writes a run's `certificate.json`.

    Args:
      plans: of what clients were asked; the first one with noise gives the delta, which is else
        `WITHOUT_NOISE`, for what other runs were charged with on these ledgers.
      ledgers: of the releases that the statement is of; none is charged by a run that asks nobody.
    """
    found = {}
    for path in ledgers:
        if path.exists():
            inside = path.is_relative_to(directory)
            name = path.relative_to(directory).as_posix() if inside else path.name
            found[name] = Ledger.read(path)
    record = certificate(
        system,
        found,
        next((plan.delta for plan in plans if plan.private), WITHOUT_NOISE),
        statement=statement,
        stamp=stamp,
    )
    files.write_json(directory / NAME, record)
