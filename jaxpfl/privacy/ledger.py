"""The write-ahead ledger: every release on a population, charged before it is made.

A file of JSON lines that only grows. It belongs to a population (by fingerprint), not to a run:
all releases of all algorithms on these clients are charged to it and compose to ONE epsilon. A
charge is on the disk (fsync) before `charge` returns, and only then may data be touched, so that
a crash can cost a charge for nothing but never a release for nothing.

What is guaranteed, and against what:
- Each line carries the SHA-256 of the line before it and of itself. An edited, reordered,
  inserted or deleted line is refused with file and line. A cut-off END leaves a valid chain: who
  must notice it keeps `head` elsewhere (a checkpoint does) and asks `verify(head)` or `contains`.
- A last line that a crash cut short is a charge that never returned; it is removed. A last line
  that lacks only its newline is kept.
- All charges have one unit (client or example), fixed by the first: what protects an example and
  what protects a client have no common epsilon.
- A charge is identified by (run, label, round): a resumed run that charges a round again is not
  charged twice, because its noise key makes the same release again.
- One process at a time: the kernel's lock is held from opening to `close`.
- No clock: equal runs write equal ledgers.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, RunLocked
from jaxpfl.privacy import accounting, events
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.events import Adjacency, Counts
from jaxpfl.privacy.plan import Unit

FORMAT = "jaxpfl ledger 1"
_NO_LINE = "0" * 64
_MOST_REPEATS = 10_000_000


@dataclasses.dataclass(frozen=True)
class Budget:
    """A hard limit on everything a ledger is charged with.

    Attributes:
      epsilon: at most this, at
      delta: in (0, 1).
    """

    epsilon: float
    delta: float

    def __post_init__(self):
        checks.positive("budget epsilon", self.epsilon)
        checks.open_fraction("budget delta", self.delta)


@dataclasses.dataclass(frozen=True)
class Charge:
    """One line: the release `event`, made by `run` under `label` in `round`."""

    run: str
    label: str
    round: int
    event: dp_accounting.DpEvent


class Ledger:
    """An open ledger; a context manager.

    Args:
      path: the file; made, with its folder, if absent.
      population: fingerprint of the clients that the releases are about.
      budget: hard limit. A new file records it for ever; of a recorded and a given budget both
        hold.
      unit: what every release protects; recorded in a new file.

    Raises:
      CorruptFile: the file is not an unaltered ledger; names the line.
      InputError: the ledger is of another population or unit.
      RunLocked: another process, or another open `Ledger`, holds the file.
    """

    def __init__(
        self,
        path: str | Path,
        population: str,
        *,
        budget: Budget | None = None,
        unit: Unit = "client",
    ) -> None:
        if not isinstance(population, str) or not population:
            raise InputError("a ledger needs the fingerprint of its population, a string")
        checks.one_of("unit", unit, ("client", "example"))
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        created = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # Ends the lock also where a ledger is forgotten instead of closed.
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._descriptor: int | None = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise RunLocked(f"{self.path}: another run holds this ledger; wait for it") from None
        try:
            if created:
                _fsync_directory(self.path.parent)
            self._clear()
            self._repair(descriptor)
            if self._load():
                if self.population != population:
                    raise InputError(
                        f"{self.path}: is the ledger of another population (fingerprint "
                        f"{self.population[:12]}..., this one is {population[:12]}...)"
                    )
                if self.unit != unit:
                    raise InputError(
                        f"{self.path}: protects each {self.unit}, this run each {unit}: there is "
                        "no common epsilon, so use one unit or a ledger of its own"
                    )
            else:
                self._append(
                    {
                        "format": FORMAT,
                        "population": population,
                        "unit": unit,
                        "budget": None if budget is None else dataclasses.asdict(budget),
                    }
                )
                self.population, self.recorded_budget, self.unit = population, budget, unit
        except BaseException:
            self.close()
            raise
        self._given_budget = budget

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Returns a ledger that can be looked at but not charged; takes no lock.

        Raises:
          CorruptFile: the file is not an unaltered ledger; names the line.
        """
        ledger = cls.__new__(cls)
        ledger.path = Path(path)
        ledger._descriptor = None
        ledger._given_budget = None
        ledger._clear()
        if not ledger._load():
            raise CorruptFile(f"{path}: is empty, expected a ledger")
        return ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the file and its lock; what was charged can still be read."""
        if self._descriptor is not None:
            self._descriptor = None
            self._closer()

    def __len__(self) -> int:
        """Returns the number of charges."""
        return len(self.charges)

    @property
    def head(self) -> str:
        """SHA-256 of the last line: who keeps it can tell later that no line was cut off."""
        return self._hashes[-1] if self._hashes else _NO_LINE

    def contains(self, head: str) -> bool:
        """Returns whether `head` was this ledger's head at some time."""
        return head in self._hashes

    def verify(self, expected_head: str | None = None) -> None:
        """Reads the file again and checks every line.

        Raises:
          CorruptFile: a line was altered, or `expected_head` is not in the chain.
        """
        known = list(self._hashes)
        self._clear()
        try:
            self._load()
        except BaseException:
            self.close()  # nothing may be charged to what could not be read
            raise
        if self._hashes[: len(known)] != known:
            raise CorruptFile(f"{self.path}: the ledger was altered while it was open")
        if expected_head is not None and not self.contains(expected_head):
            raise CorruptFile(
                f"{self.path}: does not contain the line that it once ended with: the ledger was "
                "cut off or replaced"
            )

    @property
    def adjacency(self) -> Adjacency:
        """What all charges share; add-or-remove-one while there is none."""
        return self._adjacency or "add_or_remove_one"

    def charge(self, event: dp_accounting.DpEvent, label: str, *, run: str, round: int) -> None:
        """Charges one release; on return it is on the disk.

        Does nothing where (run, label, round) was charged with the same event before.

        Args:
          event: what will be released, as `Plan.round_event` makes it.
          label: names the algorithm and release; public.
          run: identifies the run, whose noise key makes a repeated round the same release.
          round: of the run.

        Raises:
          BudgetExhausted: it would exceed a budget; nothing was written.
          InputError: another event under the same (run, label, round), another adjacency than
            the ledger's, or the ledger is closed.
        """
        for name, value in (("label", label), ("run", run)):
            if not isinstance(value, str) or not value:
                raise InputError(f"{name} of a charge must be a string, found {value!r}")
        charge = Charge(run, label, checks.non_negative_int("round", round), event)
        releases = events.counts(event)
        if self._descriptor is None:
            raise InputError(f"{self.path}: the ledger is closed or was opened for reading")
        before = self._by_name.get((run, label, charge.round))
        if before is not None:
            if events.counts(before.event) != releases:
                raise InputError(
                    f"{self.path}: round {round} of {label!r} in run {run} was charged with "
                    "another event before"
                )
            return
        self._require_adjacency(event, releases)
        self._require_budget(event, releases, charge)
        self._append(
            {"run": run, "label": label, "round": charge.round, "event": events.to_json(event)}
        )
        self._count(charge)

    def spent(self, delta: float, accountant: Accountant | None = None) -> float:
        """Returns the epsilon of everything charged; infinite where a release had no noise.

        Args:
          delta: in (0, 1).
          accountant: None = PLD where it has support, else RDP.
        """
        chosen = accountant or accounting.default_accountant(self._counts)
        return accounting.epsilon_of_counts(self._counts, delta, chosen, self.adjacency)

    def affordable(self, event: dp_accounting.DpEvent) -> int | None:
        """Returns how many more times `event` fits every budget; None without a budget."""
        releases = events.counts(event)
        if not self._budgets():
            return None
        if not releases:
            return _MOST_REPEATS

        def fits(times: int, accountant: Accountant) -> bool:
            return self._fit(_sum(self._counts, releases, times), event, accountant)

        # RDP is quick and never below PLD: where it fits, PLD fits.
        rough = _most(lambda times: fits(times, "rdp"), 0)
        if accounting.default_accountant(self._counts | releases) == "rdp":
            return rough
        return _most(lambda times: fits(times, "pld"), rough)

    def summary(self, delta: float, accountant: Accountant | None = None) -> dict[str, Any]:
        """Returns what was spent, under which terms, and how many charges each label made."""
        labels: dict[str, int] = {}
        for charge in self.charges:
            labels[charge.label] = labels.get(charge.label, 0) + 1
        epsilon = self.spent(delta, accountant)
        return {
            "epsilon": epsilon,
            "delta": delta,
            "private": math.isfinite(epsilon),
            "unit": self.unit,
            "adjacency": self.adjacency,
            "accountant": accountant or accounting.default_accountant(self._counts),
            "population": self.population,
            "charges": len(self),
            "labels": labels,
            "budget": None
            if self.recorded_budget is None
            else dataclasses.asdict(self.recorded_budget),
        }

    def _budgets(self) -> list[Budget]:
        both = (self.recorded_budget, self._given_budget)
        return list(dict.fromkeys(budget for budget in both if budget is not None))

    def _fit(
        self, total: Counts, event: dp_accounting.DpEvent, accountant: Accountant | None = None
    ) -> bool:
        """Whether releases `total`, of the adjacency of `event`, are within every budget."""
        chosen = accountant or accounting.default_accountant(total)
        adjacency = self._adjacency or events.adjacency(event)
        return all(
            accounting.epsilon_of_counts(total, budget.delta, chosen, adjacency) <= budget.epsilon
            for budget in self._budgets()
        )

    def _require_budget(
        self, event: dp_accounting.DpEvent, releases: Counts, charge: Charge
    ) -> None:
        if not self._budgets():
            return
        after = _sum(self._counts, releases, 1)
        if all(count <= self._affordable.get(leaf, 0) for leaf, count in after.items()):
            return
        if not self._fit(after, event):
            limits = " and ".join(
                f"(epsilon = {budget.epsilon:g}, delta = {budget.delta:g})"
                for budget in self._budgets()
            )
            spent = self.spent(self._budgets()[0].delta)
            raise BudgetExhausted(
                f"{self.path}: round {charge.round} of {charge.label!r} would exceed the budget "
                f"{limits}; spent so far: epsilon = {spent:.4g}; nothing was released"
            )
        # Epsilon never falls with a count, so everything below counts that fit fits too.
        for share in (1, 1 / 2, 1 / 4, 1 / 16, 0):
            ahead = {leaf: count + math.ceil(share * count) for leaf, count in after.items()}
            if share == 0 or self._fit(ahead, event):
                self._affordable = ahead
                return

    def _require_adjacency(self, event: dp_accounting.DpEvent, releases: Counts) -> None:
        if not releases or all(
            isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf in releases
        ):
            return
        found = events.adjacency(event)
        if self._adjacency is not None and found != self._adjacency:
            raise InputError(
                f"{self.path}: its releases are accounted for under {self._adjacency}, this one "
                f"under {found}; they have no common epsilon, so sample all of them the same way "
                "or keep them apart and add up both guarantees"
            )

    def _clear(self) -> None:
        self.charges: list[Charge] = []
        self.population = ""
        self.unit: Unit = "client"
        self.recorded_budget: Budget | None = None
        self._hashes: list[str] = []
        self._counts: Counts = {}
        self._affordable: Counts = {}
        self._by_name: dict[tuple[str, str, int], Charge] = {}
        self._adjacency: Adjacency | None = None

    def _count(self, charge: Charge) -> None:
        releases = events.counts(charge.event)
        self._require_adjacency(charge.event, releases)
        self.charges.append(charge)
        self._by_name[(charge.run, charge.label, charge.round)] = charge
        self._counts = _sum(self._counts, releases, 1)
        if any(not isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf in releases):
            self._adjacency = events.adjacency(charge.event)

    def _append(self, fields: dict[str, Any]) -> None:
        assert self._descriptor is not None
        line, digest = _seal(fields, self.head)
        start = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            os.fsync(self._descriptor)
        except OSError as error:
            # The charge did not happen: leave no trace, and let nobody go on charging.
            try:
                os.ftruncate(self._descriptor, start)
            finally:
                self.close()
            message = f"the ledger cannot be written: {error}"
            raise OSError(error.errno, message, str(self.path)) from error
        self._hashes.append(digest)

    def _repair(self, descriptor: int) -> None:
        """Ends what a crash left half done: see the head of this file."""
        content = self.path.read_bytes()
        last = content.rpartition(b"\n")[2]
        if not last:
            return
        if _is_complete(last):
            os.write(descriptor, b"\n")
        else:
            os.ftruncate(descriptor, len(content) - len(last))
        os.fsync(descriptor)

    def _load(self) -> bool:
        """Reads and checks the file; False where it is empty."""
        content = self.path.read_bytes()
        *lines, last = content.split(b"\n")
        if _is_complete(last):
            lines.append(last)
        for number, line in enumerate(lines, 1):
            try:
                self._take(line, number)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                reason = str(error) if isinstance(error, InputError) else "it is not a ledger line"
                raise CorruptFile(f"{self.path}: line {number} was altered: {reason}") from None
        return bool(lines)

    def _take(self, line: bytes, number: int) -> None:
        fields = json.loads(line)
        digest = fields.pop("hash")
        if fields.pop("previous") != self.head:
            raise InputError("it does not follow the line before it")
        if (line + b"\n", digest) != _seal(fields, self.head):
            raise InputError("its hash is not that of its content")
        if number == 1:
            if fields["format"] != FORMAT:
                raise InputError(f"expected the format {FORMAT!r}")
            self.population, self.unit = fields["population"], fields["unit"]
            budget = fields["budget"]
            self.recorded_budget = None if budget is None else Budget(**budget)
        else:
            event = events.from_json(fields["event"])
            self._count(Charge(fields["run"], fields["label"], fields["round"], event))
        self._hashes.append(digest)


def _is_complete(last: bytes) -> bool:
    """Whether the line that a crash cut short lacks its newline only."""
    try:
        return isinstance(json.loads(last), dict)
    except ValueError:
        return False


def _seal(fields: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Returns the line of `fields` after the line with hash `previous`, and its own hash."""
    body = {**fields, "previous": previous}
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({**body, "hash": digest}) + b"\n", digest


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sum(total: Counts, more: Counts, times: int) -> Counts:
    result = dict(total)
    for leaf, count in more.items():
        result[leaf] = result.get(leaf, 0) + times * count
    return result


def _most(fits: Callable[[int], bool], low: int) -> int:
    """Returns the largest number that fits, at least `low`, which is known to fit (or is 0)."""
    step = max(1, low // 4)
    high = low + step
    while high <= _MOST_REPEATS and fits(high):
        low, step = high, 2 * step
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
