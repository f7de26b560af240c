"""The write-ahead ledger: every release on a source of clients, charged before it is made.

An append-only file (`chain`) with a budget. It belongs to a source of clients, not to a run: all
releases of all algorithms on these clients, on parts of them and on whatever is computed from their
data are charged to it and compose to ONE epsilon. A charge is on the disk before `charge` returns,
and only then may data be touched, so that a crash may leave a charge without a release, but never a
release without a charge.

Guarantees:
- The file is protected, and locked for one process, as described in `chain`. Only a caller that
  keeps `head` elsewhere, as checkpoints do, notices that lines were cut off its end.
- A charge is identified by its `identity`, a keyed hash of everything that the release depends on,
  so that the same release, repeated after a crash, is not charged twice. `record` notes a hash of
  the result, so that a repetition with another result is noticed, and charged.
- All charges have one unit, because guarantees for clients and examples have no common epsilon.
- Splits, selections, other orders, columns or examples of a population share its ledger. Another
  source is refused, unless somebody says that it is of the same clients (`Ledger.add_source`): to
  add up what different people spent is never too little.
- All hashes of data and ids in the file are keyed, so that no guess can be tested without the
  ledger's secret: 32 random bytes in private/LEDGER.key next to it, mode 0600, made before the
  ledger's first line. Without the secret, the ledger can be read but not charged; do not publish it
  with the ledger. The file holds `run`, `label`, queries, `identity` and releases as given.
- There is no clock: with the same secret, equal runs write equal ledgers.
"""

import dataclasses
import hmac
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

import dp_accounting

from jaxpfl import checks, files
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, named
from jaxpfl.privacy import events
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.chain import Chain, altered
from jaxpfl.privacy.events import Adjacency
from jaxpfl.privacy.guarantee import Account, Budget, Guarantee, Unit

FORMAT = "jaxpfl ledger 3"
_HEADER = {"key": str, "unit": str, "budget": dict | None, "population": str}
_CHARGE = {"run": str, "label": str, "round": int, "identity": str, "event": dict}
_QUERY = {"run": str, "label": str, "plan": dict, "program": str}
_QUERY |= {"captured": list, "flow_checked": bool}
_KEY_BYTES = 32
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Clients(Protocol):
    """The part of `data.Population` that a ledger reads."""

    @property
    def fingerprint(self) -> str: ...


def open_key(path: Path, *, create: bool) -> bytes:
    """Reads a key; with `create`, a missing one is made, mode 0600, and on the disk on return."""
    if create and not path.exists():
        files.private_directory(path.parent)
        files.write_atomically(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise CorruptFile(
            f"{path} is missing: without its key, a ledger can be read but not charged"
        ) from None
    if len(key) != _KEY_BYTES:
        raise CorruptFile(f"{path} has {len(key)} bytes, expected a key of {_KEY_BYTES}")
    return key


@dataclasses.dataclass(frozen=True)
class Charge:
    """One line: the release `event` of `run`, `label` and `round`, identified by `identity`."""

    run: str
    label: str
    round: int
    event: dp_accounting.DpEvent
    identity: str


class Ledger(Chain, AbstractContextManager["Ledger"]):
    """An open ledger: a `Chain` whose lines are charges; a context manager.

    Attributes:
      population: HMAC (hex) of the fingerprint of the source that it was made for.
      key: a hash that identifies the ledger's secret key; public.
      recorded_budget: the file's own.
      charges: in the order in which they were made.
      queries: the queries to clients, the fields of each line of `_QUERY`.

    Args:
      path: the file; made, with its folder and its key, if absent.
      clients: the `data.Population` that releases are made of.
      budget: hard limit, which a new file records, and which holds beside a recorded one.
      unit: what every release protects; recorded in a new file.

    Raises:
      CorruptFile: a line was altered (the message names it), or the key is missing or wrong.
      InputError: the ledger is of another source of clients or of another unit.
      RunLocked: another process, or another open `Ledger`, holds the file.
    """

    _given_budget: Budget | None = None
    _secret: bytes | None = None

    def __init__(
        self,
        path: str | Path,
        clients: Clients,
        *,
        budget: Budget | None = None,
        unit: Unit = "client",
    ) -> None:
        checks.one_of("unit", unit, ("client", "example"))
        self._open(files.user_path(path), clients, budget, unit)
        if not self.covers(clients):
            self.close()
            raise InputError(
                f"{path}: is the ledger of another population; keep one ledger for each. If these "
                "are the same clients with more or other data, say so once: "
                "jaxpfl.privacy.Ledger.add_source(ledger, clients)"
            )

    def _open(self, path: Path, clients: Clients, budget: Budget | None, unit: Unit) -> None:
        if not hasattr(clients, "client_ids"):
            raise InputError(
                f"a ledger needs the Population of its clients, found {type(clients).__name__}"
            )
        self._given_budget = budget
        super().__init__(path)
        try:
            # By whatever link the ledger is named, it has one key.
            file = path.resolve()
            key_path = file.parent / "private" / f"{file.name}.key"
            self._secret = open_key(key_path, create=not self.lines)
            identified = self.digest("key", "")
            if not self.lines:
                limit = None if budget is None else dataclasses.asdict(budget)
                header = {"format": FORMAT, "key": identified, "unit": unit, "budget": limit}
                self.append({**header, "population": self._digest_of(clients)})
                self._take_lines()
            if self.key != identified:
                raise CorruptFile(f"{key_path}: is not the key of {path}")
            if self.unit != unit:
                raise InputError(
                    f"{path}: protects each {self.unit}, this run each {unit}; they have no "
                    "common epsilon: use the unit of the ledger"
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def add_source(cls, path: str | Path, clients: Clients) -> None:
        """States in a line that these are clients of the ledger, too, such as people's new data.

        From then on releases of either source are charged to it.

        Raises:
          InputError: there is no such ledger, or `clients` is no population.
          CorruptFile, RunLocked: as `Ledger`.
        """
        ledger = cls.__new__(cls)
        ledger._open(files.user_path(path), clients, None, cls.read(path).unit)
        with ledger:
            if not ledger.covers(clients):
                ledger.append({"population": ledger._digest_of(clients)})

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """As `Chain.read`, without the ledger's key; `CorruptFile` also if the file is empty."""
        ledger = super().read(path)
        if not ledger.lines:
            raise CorruptFile(f"{path}: is empty, expected a ledger")
        return ledger

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.charges)

    def _repr_html_(self) -> str:
        from jaxpfl.printable import facts

        labels = Counter(charge.label for charge in self.charges)
        released = "\n".join(f"{label}: {number}" for label, number in labels.items())
        rows = {"file": self.path, "unit": self.unit, "budget": self.recorded_budget}
        return facts("Ledger", {**rows, "releases": released})

    def covers(self, clients: Clients) -> bool:
        """Returns whether these clients' releases are charged here; raises as `digest`."""
        return self._digest_of(clients) in self._sources

    def _digest_of(self, clients: Clients) -> str:
        # Of a plain hash, by which one client fewer is another source.
        return self.digest("population", clients.fingerprint)

    def digest(self, purpose: str, text: str) -> str:
        """The HMAC-SHA256 (hex) of a PRIVATE text: only who holds the ledger's key tests a guess.

        Raises:
          InputError: the ledger was opened for reading, without its key.
        """
        if self._secret is None:
            raise InputError(f"{self.path}: was opened for reading, without the key to its clients")
        return hmac.digest(self._secret, f"{purpose}\0{text}".encode(), "sha256").hex()

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency of all charges; add-or-remove-one while there is none."""
        return self._account.adjacency

    def exhausted(self, what: str) -> BudgetExhausted:
        """The error that says that `what` does not fit the budget, with what was spent."""
        budgets = self._account.budgets
        limits = " and ".join(
            f"(epsilon = {budget.epsilon:g}, delta = {budget.delta:g})" for budget in budgets
        )
        return BudgetExhausted(
            f"{self.path}: {what} would exceed the budget {limits}; spent so far: "
            f"epsilon = {self.spent(budgets[0].delta):.4g}; nothing was released. Its first run "
            "sets a ledger's limit; `jaxpfl verify A B --together` adds up two ledgers"
        )

    def charge(
        self,
        event: dp_accounting.DpEvent,
        label: str,
        *,
        run: str,
        round: int,
        identity: str,
        query: Mapping[str, Any] | None = None,
    ) -> None:
        """Charges one release; on return it, and every line before it, is on the disk.

        Does nothing if the same event was already charged under this identity.

        Args:
          event: what will be released, as `Plan` makes it.
          label, run: names of the algorithm and release, and of the run. They are public, so that
            they must not be plain hashes of private data.
          identity: a keyed hash of everything that the release depends on; public.
          query: its `PreparedQuery.ledger_entry`, public, for a line before its first charge.

        Raises:
          BudgetExhausted: the release would exceed a budget; nothing was written.
          CorruptFile: the file changed while it was open, or so did a run directory that this
            process holds; nothing was written.
          InputError: another event was charged under this identity, the event has another adjacency
            than the ledger, or the ledger is closed.
        """
        for name, value in (("label", label), ("run", run), ("identity", identity)):
            _check_text(f"{name} of a charge", value)
        charge = Charge(run, label, checks.non_negative_int("round", round), event, identity)
        releases = events.counts(event)
        self.require_unchanged()
        if (before := self._by_identity.get(identity)) is not None:
            if events.counts(before.event) != releases:
                raise InputError(
                    f"{self.path}: the identity of round {round} of {label!r} in run {run} was "
                    "charged with another event before"
                )
            return
        with named(self.path):
            fits = self._account.fits(event, ahead=True)
        if not fits:
            raise self.exhausted(f"round {charge.round} of {label!r}")
        names = {"run": run, "label": label}
        if query is not None and (entry := {**names, **query}) not in self.queries:
            self.append(entry)
            self.queries.append(entry)
        fields = {**names, "round": charge.round, "identity": identity}
        self.append({**fields, "event": events.to_json(event)})
        self._count(charge)

    def charged(self, identity: str) -> bool:
        return identity in self._by_identity

    def record(self, identity: str, release: str) -> None:
        """Notes a public hash of a release, once; it is on the disk on return.

        Raises:
          CorruptFile: as `charge`.
          InputError: the ledger is closed or was opened for reading.
        """
        _check_text("the hash of a release", release)
        self.require_unchanged()
        if release not in self._recorded.get(identity, ()):
            self.append({"identity": identity, "release": release})
            self._recorded.setdefault(identity, []).append(release)

    def recorded(self, identity: str) -> str | None:
        """Returns the first hash that was recorded for this identity's release, if any."""
        return next(iter(self._recorded.get(identity, ())), None)

    def spent(self, delta: float, accountant: Accountant | None = None) -> float:
        """Returns the epsilon of all charges at `delta`; infinite if a release had no noise.

        Without an accountant, it is by the tightest that supports the releases.
        """
        return self._account.spent(delta, accountant)

    def fits(self, event: dp_accounting.DpEvent) -> bool:
        with named(self.path):
            return self._account.fits(event)

    def summary(self, delta: float, accountant: Accountant | None = None) -> dict[str, Any]:
        """Returns what was spent, under which terms, and the number of charges of each label."""
        epsilon, budget = self.spent(delta, accountant), self.recorded_budget
        return {
            "epsilon": epsilon,
            "delta": delta,
            "private": math.isfinite(epsilon),
            "unit": self.unit,
            "adjacency": self.adjacency,
            "accountant": accountant or self._account.accountant,
            "population": self.population,
            "charges": len(self),
            "labels": dict(Counter(charge.label for charge in self.charges)),
            "budget": budget and dataclasses.asdict(budget),
        }

    def _load(self) -> int:
        end = super()._load()
        self._take_lines()
        return end

    def _take_lines(self) -> None:
        self.charges: list[Charge] = []
        self.queries: list[dict[str, Any]] = []
        self._by_identity: dict[str, Charge] = {}
        self._recorded: dict[str, list[str]] = {}
        self._sources: set[str] = set()
        for number, fields in enumerate(self.lines, 1):
            try:
                self._take(fields, first=number == 1)
            except _FAULTS as error:
                expected = isinstance(error, InputError)
                reason = str(error) if expected else "it is not a line of a ledger"
                raise altered(self.path, number, reason) from None

    def _take(self, fields: dict[str, Any], *, first: bool) -> None:
        if first:
            if fields.get("format") != FORMAT:
                raise InputError(f"expected the format {FORMAT!r}")
            files.record_of(fields, "its content", _HEADER)
            checks.one_of("unit", fields["unit"], ("client", "example"))
            budget = fields["budget"]
            self.unit: Unit = fields["unit"]
            self.recorded_budget = None if budget is None else Budget(**budget)
            self.population: str = fields["population"]
            self.key: str = fields["key"]
            both = (self.recorded_budget, self._given_budget)
            self._account = Account([budget for budget in both if budget is not None])
        if "population" in fields:
            files.record_of(fields, "its content", {"population": str})
            self._sources.add(fields["population"])
        elif "event" in fields:
            files.record_of(fields, "its content", _CHARGE)
            event = events.from_json(fields["event"])
            run, label, round = fields["run"], fields["label"], fields["round"]
            self._count(Charge(run, label, round, event, fields["identity"]))
        elif "plan" in fields:
            self.queries.append(files.record_of(fields, "its content", _QUERY))
        else:
            files.record_of(fields, "its content", {"identity": str, "release": str})
            self._recorded.setdefault(fields["identity"], []).append(fields["release"])

    def _count(self, charge: Charge) -> None:
        self._account.add(charge.event)
        self.charges.append(charge)
        self._by_identity[charge.identity] = charge


def guarantee_of(charges: Iterable[Charge], delta: float, unit: Unit = "client") -> Guarantee:
    """Returns the guarantee of charges together; raises `InputError` as `Guarantee.of_events`."""
    return Guarantee.of_events((charge.event for charge in charges), delta, unit)


def together(
    ledgers: Sequence[Ledger], delta: float, accountant: Accountant | None = None
) -> Guarantee:
    """Returns the cost of all releases on several ledgers, for whoever's data is in all of them.

    For somebody who is in fewer of them it is an upper bound.

    Raises:
      InputError: they have different units or adjacencies, or two of them are copies of one, whose
        lines would be counted twice.
    """
    keys, first = dict[str, Ledger](), ledgers[0]
    for ledger in ledgers:
        if (other := keys.setdefault(ledger.key, ledger)) is not ledger:
            raise InputError(
                f"{ledger.path}: is {other.path} or a copy of it, whose releases would count "
                "twice: name the longer one alone"
            )
        if ledger.unit != first.unit or not events.common(ledger.adjacency, first.adjacency):
            terms = [f"{one.adjacency} {one.unit}".replace("_", " ") for one in (first, ledger)]
            raise InputError(
                f"{first.path} is of neighbours by {terms[0]}, {ledger.path} by {terms[1]}: they "
                "have no common epsilon, state that of each"
            )
    charged = (charge.event for ledger in ledgers for charge in ledger.charges)
    return Guarantee.of_events(charged, delta, first.unit, accountant)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} must be a string that is not empty, found {value!r}")
