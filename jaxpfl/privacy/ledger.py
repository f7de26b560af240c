"""The ledger: what has been released about a population, written down before it happens.

A ledger belongs to a population (its fingerprint), not to a run: every release of every algorithm
on the same clients is charged to it, and it composes them all. It is a file of JSON lines, each
carrying the SHA-256 of the line before it, so that an edited, reordered or deleted line breaks
the chain. A charge is on the disk (fsync) before `charge` returns, and only then may the release
be made; a crash can therefore leave a charge without a release, never a release without a charge.

Removing lines from the END leaves a valid chain. A run's checkpoint therefore stores the ledger's
`head`, and refuses to resume on a ledger that no longer contains it.

Lines carry no clock time: a resumed run writes the same ledger as an uninterrupted one.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, RunLocked
from jaxpfl.privacy import accounting
from jaxpfl.privacy.accounting import Accountant, Adjacency

_FORMAT = "jaxpfl ledger 1"
_START = "0" * 64
_LOCK_ATTEMPTS = 100  # 5 seconds: a charge takes milliseconds


@dataclass(frozen=True)
class Budget:
    """A hard limit on everything in a ledger: (epsilon, delta)."""

    epsilon: float
    delta: float

    def __post_init__(self):
        checks.positive("budget epsilon", self.epsilon)
        checks.open_fraction("budget delta", self.delta)


@dataclass(frozen=True)
class Entry:
    """One charge: what was to be released, by which run, in which round."""

    event: dp_accounting.DpEvent
    label: str
    run: str
    round: int


class Ledger:
    """An open ledger.

    Args:
      path: the file; made if absent, with its folder.
      fingerprint: of the population; must be the file's.
      budget: if given, a charge that would exceed it raises BudgetExhausted and writes nothing.

    Raises:
      CorruptFile: the chain is broken, or the file is no ledger; names the line.
      InputError: the ledger is of another population.

    An incomplete last line, which a crash while writing leaves behind, is a charge that never
    returned, so nothing was released under it: it is cut off.
    """

    def __init__(self, path: str | Path, fingerprint: str, *, budget: Budget | None = None):
        self.path = Path(path)
        self.budget = budget
        self._affordable: dict[tuple, int] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not self.path.exists() or self.path.stat().st_size == 0:
                self._reset()
                self._append({"format": _FORMAT, "population": fingerprint, "unit": "client"})
                _sync_folder(self.path.parent)
            self._load(repair=True)
        if self.fingerprint != fingerprint:
            raise InputError(
                f"{self.path}: is the ledger of population {self.fingerprint[:12]}, the data is "
                f"population {fingerprint[:12]}: each population has its own ledger"
            )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Opens an existing ledger to look at it; it cannot be charged."""
        ledger = cls.__new__(cls)
        ledger.path, ledger.budget, ledger._affordable = Path(path), None, {}
        if not ledger.path.is_file():
            raise InputError(f"{path}: no such ledger")
        ledger._load(repair=False)
        return ledger

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return self._hashes[-1]

    def contains(self, head: str) -> bool:
        """Whether a line had this hash: whether the ledger goes on from there."""
        return head in self._hashes

    def charge(self, event: dp_accounting.DpEvent, label: str, *, run: str, round: int) -> Entry:
        """Charges one release; it is on the disk when this returns. Call BEFORE the release.

        Charging the same (run, label, round) again, as a resumed run does when it replays a
        round, costs nothing if the event is the same, and is refused if not.

        Raises:
          BudgetExhausted: the budget does not allow it; nothing was written.
          InputError: this round was charged with another event, or the ledger holds releases
            of the other adjacency.
          RunLocked: another process is writing.
        """
        entry = Entry(event, label, run, checks.non_negative_int("round", round))
        with self._locked():
            if self.path.stat().st_size != self._size:
                self._load(repair=True)  # another run charged the same population meanwhile
            known = self._by_address.get((run, label, round))
            if known is not None:
                if known.event != event:
                    raise InputError(
                        f"{self.path}: round {round} of {label!r} was charged with another event"
                    )
                return known
            self._same_adjacency(event)
            if self.budget is not None and self.affordable(event) < 1:
                raise BudgetExhausted(
                    f"{self.path}: the next release ({label}, round {round}) would exceed the "
                    f"budget of epsilon = {self.budget.epsilon:g} at delta = "
                    f"{self.budget.delta:g}; epsilon = {self.spent(self.budget.delta):.4g} is spent"
                )
            fields = {"label": label, "run": run, "round": round, "event": encode_event(event)}
            self._append(fields)
            self._remember(entry)
        return entry

    def spent(self, delta: float, accountant: Accountant | None = None) -> float:
        """Returns the epsilon of all releases together, at `delta`.

        The accountant defaults to PLD, or RDP where PLD has no support.
        """
        checks.open_fraction("delta", delta)
        return self._epsilon(self._counts, delta, accountant)

    def affordable(self, event: dp_accounting.DpEvent, most: int = 100_000) -> int:
        """Returns how many more releases of `event` the budget allows; `most` without a budget."""
        if self.budget is None:
            return most
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return 0
        # The answer for one state of the ledger holds, less one, after each such charge.
        state = (event, *sorted((repr(e), n) for e, n in self._counts.items() if e != event))
        total = self._affordable.get(state)
        if total is None:
            total = self._affordable[state] = self._most_of(event, most)
        return max(0, total - self._counts.get(event, 0))

    def verify(self) -> None:
        """Reads the file again and checks the whole chain.

        Raises:
          CorruptFile: a line was edited, reordered or deleted; names the first bad line.
        """
        self._load(repair=False)

    def summary(self, delta: float, accountant: Accountant | None = None) -> dict[str, Any]:
        """Returns what a reader wants to know, ready for JSON."""
        return {
            "ledger": str(self.path),
            "epsilon": self.spent(delta, accountant),
            "delta": delta,
            "unit": "client",
            "adjacency": self.adjacency,
            "accountant": accountant or self._accountant(),
            "releases": len(self),
            "by_label": dict(Counter(entry.label for entry in self.entries)),
            "private": not any(
                isinstance(entry.event, dp_accounting.NonPrivateDpEvent) for entry in self.entries
            ),
        }

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation of the releases so far."""
        fixed = any(_is_fixed_size(event) for event in self._counts)
        return "replace_one" if fixed else "add_or_remove_one"

    def _accountant(self) -> Accountant:
        return "rdp" if self.adjacency == "replace_one" else "pld"

    def _epsilon(
        self, counts: dict[dp_accounting.DpEvent, int], delta: float, accountant: Accountant | None
    ) -> float:
        present = {event: count for event, count in counts.items() if count}
        if not present:
            return 0.0
        if any(isinstance(event, dp_accounting.NonPrivateDpEvent) for event in present):
            return float("inf")
        composed = [
            dp_accounting.SelfComposedDpEvent(event, count) for event, count in present.items()
        ]
        event = composed[0] if len(composed) == 1 else dp_accounting.ComposedDpEvent(composed)
        return accounting.epsilon(event, delta, accountant or self._accountant(), self.adjacency)

    def _most_of(self, event: dp_accounting.DpEvent, most: int) -> int:
        """The largest total count of `event` within the budget, beside everything else."""
        assert self.budget is not None

        def fits(count: int) -> bool:
            counts = {**self._counts, event: count}
            return self._epsilon(counts, self.budget.delta, None) <= self.budget.epsilon

        low, high = 0, 1
        while high <= most and fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return min(low, most)

    def _same_adjacency(self, event: dp_accounting.DpEvent) -> None:
        private = [
            known
            for known in self._counts
            if not isinstance(known, dp_accounting.NonPrivateDpEvent)
        ]
        if private and not isinstance(event, dp_accounting.NonPrivateDpEvent):
            if _is_fixed_size(event) != _is_fixed_size(private[0]):
                raise InputError(
                    f"{self.path}: holds releases under {self.adjacency}, the new one is under the "
                    "other adjacency; one epsilon cannot speak of both: use one kind of sampling"
                )

    def _reset(self) -> None:
        self._hashes: list[str] = [_START]
        self._size = 0
        self.fingerprint = ""
        self.entries: list[Entry] = []
        self._by_address: dict[tuple[str, str, int], Entry] = {}
        self._counts: dict[dp_accounting.DpEvent, int] = {}

    def _remember(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._by_address[(entry.run, entry.label, entry.round)] = entry
        self._counts[entry.event] = self._counts.get(entry.event, 0) + 1

    def _append(self, fields: dict[str, Any]) -> None:
        line = {"number": len(self._hashes) - 1, "before": self._hashes[-1], **fields}
        text = json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        with self.path.open("ab") as file:
            start = file.tell()
            try:
                file.write(text.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                # A full disk: take the partial line off, so that the file stays a ledger.
                os.ftruncate(file.fileno(), start)
                raise
        self._hashes.append(hashlib.sha256(text.encode()).hexdigest())
        self._size = self.path.stat().st_size

    def _load(self, *, repair: bool) -> None:
        raw = self.path.read_bytes()
        self._reset()
        whole, _, torn = raw.rpartition(b"\n")
        if torn and repair:
            # The lock is held and the line has no end: its writer died before charge returned.
            with self.path.open("r+b") as file:
                file.truncate(len(raw) - len(torn))
                os.fsync(file.fileno())
        for number, line in enumerate(whole.split(b"\n") if whole else []):
            try:
                fields = json.loads(line)
                linked = fields["number"] == number and fields["before"] == self._hashes[-1]
                if number == 0:
                    known = fields["format"] == _FORMAT
                    self.fingerprint = fields["population"]
                    entry = None
                else:
                    known = True
                    entry = Entry(
                        decode_event(fields["event"]),
                        fields["label"],
                        fields["run"],
                        fields["round"],
                    )
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptFile(f"{self.path}: line {number + 1} is not a ledger's") from error
            if not known or not linked:
                raise CorruptFile(
                    f"{self.path}: line {number + 1} does not follow from the line before it: "
                    "the ledger was edited, reordered or cut"
                )
            self._hashes.append(hashlib.sha256(line).hexdigest())
            if entry is not None:
                self._remember(entry)
        if not self.fingerprint:
            raise CorruptFile(f"{self.path}: has no first line, expected {_FORMAT!r}")
        self._size = self.path.stat().st_size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the ledger's lock while one charge is written; other runs wait their turn."""
        with Path(f"{self.path}.lock").open("a") as file:
            for attempt in range(_LOCK_ATTEMPTS):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if attempt + 1 == _LOCK_ATTEMPTS:
                        raise RunLocked(
                            f"{self.path}: another process has held the ledger for 5 seconds"
                        ) from error
                    time.sleep(0.05)
            yield


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_fixed_size(event: dp_accounting.DpEvent) -> bool:
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _is_fixed_size(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return any(_is_fixed_size(part) for part in event.events)
    return isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)


def encode_event(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns an event as plain values for JSON.

    Raises:
      InputError: the event is of a kind that the ledger does not know.
    """
    match event:
        case dp_accounting.GaussianDpEvent():
            return {"gaussian": event.noise_multiplier}
        case dp_accounting.PoissonSampledDpEvent():
            return {"poisson": event.sampling_probability, "of": encode_event(event.event)}
        case dp_accounting.SampledWithoutReplacementDpEvent():
            return {
                "sampled": event.sample_size,
                "population": event.source_dataset_size,
                "of": encode_event(event.event),
            }
        case dp_accounting.SelfComposedDpEvent():
            return {"times": event.count, "of": encode_event(event.event)}
        case dp_accounting.ComposedDpEvent():
            return {"all": [encode_event(part) for part in event.events]}
        case dp_accounting.NonPrivateDpEvent():
            return {"non_private": True}
    raise InputError(f"the ledger has no form for an event of type {type(event).__name__}")


def decode_event(fields: dict[str, Any]) -> dp_accounting.DpEvent:
    """Returns the event that `encode_event` described.

    Raises:
      ValueError: the fields describe no event.
    """
    match fields:
        case {"gaussian": float() | int() as noise, **rest} if not rest:
            return dp_accounting.GaussianDpEvent(noise)
        case {"poisson": float() | int() as rate, "of": dict() as of, **rest} if not rest:
            return dp_accounting.PoissonSampledDpEvent(rate, decode_event(of))
        case {"sampled": int() as n, "population": int() as total, "of": dict() as of}:
            return dp_accounting.SampledWithoutReplacementDpEvent(total, n, decode_event(of))
        case {"times": int() as count, "of": dict() as of, **rest} if not rest:
            return dp_accounting.SelfComposedDpEvent(decode_event(of), count)
        case {"all": list() as parts, **rest} if not rest:
            return dp_accounting.ComposedDpEvent([decode_event(part) for part in parts])
        case {"non_private": True}:
            return dp_accounting.NonPrivateDpEvent()
    raise ValueError("not an event")
