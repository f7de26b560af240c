"""Follows labels through a program's equations, into its loops, branches and calls.

A loop is followed until its carried values keep their labels. An operation that cannot be followed
is refused by name: an unknown primitive, a callback, anything with an effect.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jaxpfl.errors import InformationLeak
from jaxpfl.federated.flow.client_program import (
    effects,
    entering,
    named,
    programs,
    require_all_computing,
)
from jaxpfl.federated.flow.labels import (
    OF_CLIENTS,
    OF_SECRETS,
    Cause,
    Draws,
    Key,
    Kind,
    Noise,
    Value,
    chosen,
    joined,
)
from jaxpfl.federated.flow.lanes import COLLECTIVES, COMPUTES, name_of
from jaxpfl.federated.flow.rules import TransferFunctions

_CALLS: dict[str | None, str] = dict.fromkeys(("jit", "remat2", "shard_map"), "jaxpr")
_CALLS |= dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
# Labels form chains of four, so that a loop that goes on is a fault of this file.
_PASSES = 50


def _definition(function: Any) -> str:
    code = function.__wrapped__.__code__
    return f"{code.co_name} at {code.co_filename}"


class Steps(NamedTuple):
    """The only functions by which clients' data may reach a program's results, in this order.

    Each is compiled by itself, and recognised by where it is defined and not by its name alone.

    Attributes:
      compute: a client's computation, whose results are private.
      clip: `(contribution, bound) -> (factors, norm, finite)`.
      scale: `(rows, factors) -> rows`, or `(rows, factors, counts) -> rows`; others are zeros. If
        `add_noise` is empty, of all leaves at once and with their noise:
        `(leaves, factors, ..., secret, deviation) -> leaves`.
      bind: `(secret, sum) -> (key, name)`.
      draw: `key -> noise`.
      add_noise: `(sum, noise) -> released`.
      rules: of `jax.custom_batching`: no steps, but known to mix no clients side by side.
    """

    compute: Callable
    clip: Callable
    scale: Callable
    bind: Callable
    draw: Sequence[Callable]
    add_noise: Sequence[Callable]
    rules: Sequence[Callable] = ()


class Analysis:
    """One program's analysis.

    Attributes:
      clip_norm: the token of the round's clip norm, which contributions must be clipped to; None =
        the client function bounds them itself.
      drawn: for each key that noise was drawn with, the place of the draw.
      constants: kinds of the numbers that the program holds, and the lines where they enter.
      equations: ids of the equations that were followed.
    """

    def __init__(self, steps: Steps) -> None:
        self.rules = TransferFunctions()
        self._allowed_rules = steps.rules
        self.local = not steps.add_noise
        self.clip_norm: int | None = None
        self.drawn: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._computed: set[int] = set()  # ids of client programs that were read
        self.constants: set[str] = set()
        self.equations: set[int] = set()
        self._repeated = 0
        self._steps = {
            _definition(steps.compute): self._compute,
            _definition(steps.clip): self._clip,
            _definition(steps.scale): self._scale,
            _definition(steps.bind): self._bind,
            **{_definition(step): self._draw for step in steps.draw},
            **{_definition(step): self._add_noise for step in steps.add_noise},
        }

    def closed(
        self, jaxpr: Any, given: Sequence[Value], place: tuple[Any, ...] = ()
    ) -> list[Value]:
        self.constants |= entering(jaxpr)
        constants = getattr(jaxpr, "consts", ())
        values = [*(self.rules.public("constant", id(number)) for number in constants), *given]
        program = getattr(jaxpr, "jaxpr", jaxpr)
        value_of = dict(zip([*program.constvars, *program.invars], values, strict=True))

        def read(atom: Any) -> Value:
            if not isinstance(atom, core.Literal):
                return value_of[atom]
            if np.size(atom.val) == 1:
                return self.rules.public("literal", str(atom.val))
            return self.rules.public("constant", id(atom.val))

        for eqn in program.eqns:
            self.equations.add(id(eqn))
            here = (*place, id(eqn))
            results = self._equation(eqn, [read(atom) for atom in eqn.invars], here)
            value_of.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in program.outvars]

    def _equation(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        name = name_of(eqn)
        if name in _CALLS:
            body = eqn.params[_CALLS[name]]
            if name == "jit":
                # The definition of the called function: "NAME at FILE:LINE".
                defined = (body.jaxpr.debug_info.func_src_info or "").rpartition(":")[0]
                if defined in self._steps:
                    return self._steps[defined](eqn, given, place)
            if name != "shard_map":
                return self.closed(body, given, place)
            # Its body runs on each device, with equal keys. A draw that is whole on each device
            # could be added to the sums of all.
            given = [
                value if any(spec) else _without_noise(value)
                for value, spec in zip(given, eqn.params["in_specs"], strict=True)
            ]
            self._repeated += 1
            results = self.closed(body, given, place)
            self._repeated -= 1
            return results
        loops = {"while": self._while, "scan": self._scan, "cond": self._branches}
        if name in loops:
            return loops[name](eqn, given, place)
        _require_computing(eqn)
        return self.rules.equation(eqn, given, place)

    def _while(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition, consts = given[:first], given[first : first + second]
        body, carried = eqn.params["body_jaxpr"], given[first + second :]
        carried, _ = self._loop(body, consts, carried, [], place)
        operands = [*condition, *carried]
        (goes_on,) = self.closed(eqn.params["cond_jaxpr"], operands, (*place, "until"))
        return [
            self._result(eqn, chosen(goes_on, [value], counted=True), value, place, index)
            for index, value in enumerate(carried)
        ]

    def _scan(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        if "num_consts" in eqn.params:
            consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        else:
            # As JAX 0.12 has it: trees of constants, carried values and rows.
            consts, carries, _ = (len(tuple(part.vals)) for part in eqn.params["ft_in"].unpack())
        carried = given[consts : consts + carries]
        rows = self._unpaired(given[consts + carries :], place, "row")
        carried, stacked = self._loop(eqn.params["jaxpr"], given[:consts], carried, rows, place)
        return [*carried, *self._unpaired(stacked, place, "stacked")]

    def _loop(self, body, consts, carried, rows, place) -> tuple[list[Value], list[Value]]:
        """The carried values after any number of passes, and the others of a pass."""
        self._repeated += 1
        number = len(carried)
        # Added in every pass, one draw would be in several sums.
        consts, carried = (
            [_without_noise(value) for value in values] for values in (consts, carried)
        )
        for _ in range(_PASSES):
            # Tokens of their own, because the values differ between passes.
            carried = [
                self.rules.value(_without_source(value), place, "carried", index, cause=value.cause)
                for index, value in enumerate(carried)
            ]
            out = self.closed(body, [*consts, *carried, *rows], place)
            after = [
                Value(*joined(pair), pair[0].token, pair[0].cause or pair[1].cause)
                for pair in zip(carried, out[:number], strict=True)
            ]
            if [value.label for value in after] == [value.label for value in carried]:
                self._repeated -= 1
                return carried, out[number:]
            carried = after
        raise InformationLeak(f"a loop cannot be followed: its labels still change after {_PASSES}")

    def _branches(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        by, operands = given[0], given[1:]
        branches = [
            self.closed(branch, operands, (*place, number))
            for number, branch in enumerate(eqn.params["branches"])
        ]
        results = []
        for index, cases in enumerate(zip(*branches, strict=True)):
            worst = next((value for value in cases if value.kind is Kind.PRIVATE), cases[0])
            results.append(self._result(eqn, chosen(by, cases), worst, place, index))
        return results

    def _result(self, eqn, label, value: Value, place, index: int) -> Value:
        """A result of a loop or branch, which made it private if it was not before."""
        cause = value.cause
        if label[0] is Kind.PRIVATE and value.kind is not Kind.PRIVATE:
            cause = Cause(eqn, True)
        label = _without_source(Value(label[0], label[1], 0))
        return self.rules.value(label, place, index, cause=cause)

    def _unpaired(self, values: Sequence[Value], *description: Any) -> list[Value]:
        """Values whose rows are dealt to the passes of a loop."""
        results = []
        for index, value in enumerate(values):
            label = _without_source(value)
            if label[0] in (Kind.KEY, Kind.NOISE):
                label = Kind.SECRET, None
            results.append(self.rules.value(label, *description, index, cause=value.cause))
        return results

    def _compute(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        """A client's computation, whose results are private."""
        # Operations that a rule for several clients has brought in are read here.
        if id(eqn.params["jaxpr"]) not in self._computed:
            self._computed.add(id(eqn.params["jaxpr"]))
            require_all_computing(eqn.params["jaxpr"], self._allowed_rules)
        return [
            self.rules.value((Kind.PRIVATE, None), place, index, cause=Cause(eqn, False))
            for index in range(len(eqn.outvars))
        ]

    # The steps of the mechanism, each of which has tests of its own.

    def _clip(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        *leaves, bound = given
        if bound.kind is not Kind.PUBLIC:
            norm = f"a norm that depends on {what(bound)}"
            raise _leak(f"contributions are clipped to {norm}", eqn, bound)
        if self.clip_norm is not None and bound.token != self.clip_norm:
            raise _leak("contributions are clipped to another norm than the round's", eqn)
        labels: list[Any] = [(Kind.FACTOR, leaf.token) for leaf in leaves]
        labels += [(Kind.PRIVATE, None)] * 2
        return [
            self.rules.value(label, place, index, cause=Cause(eqn, False))
            for index, label in enumerate(labels)
        ]

    def _scale(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        if self.local:
            secret, deviation = given[-2:]
            if secret.kind not in OF_SECRETS or deviation.kind is not Kind.PUBLIC:
                wanted = "of a public deviation, and follow from a secret"
                kinds = f"{what(deviation)} and {what(secret)}"
                raise _leak(f"clients' noise must be {wanted}, found {kinds}", eqn)
        number, results = len(eqn.outvars), list[Value]()
        for index, (leaf, factor) in enumerate(zip(given[:number], given[number:], strict=False)):
            rows, factors = (eqn.invars[at].aval.shape for at in (index, number + index))
            own = factor.label == (Kind.FACTOR, leaf.token) and factors == rows[:1]
            kind, cause = (Kind.BOUNDED, None) if own else (Kind.PRIVATE, Cause(eqn, True))
            results.append(self.rules.value((kind, None), place, index, cause=cause))
        return results

    def _bind(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        secret, *leaves = given
        if secret.kind is not Kind.KEY:
            other = f"found one that depends on {what(secret)}"
            raise _leak(
                f"the noise's key must be bound to the sum by a secret, {other}", eqn, secret
            )
        bound = frozenset(leaf.token for leaf in leaves)
        return [
            self.rules.value((Kind.KEY, Key((*secret.detail.path, here), bound)), *here)
            for here in ((place, index) for index in range(len(eqn.outvars)))
        ]

    def _draw(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        (key,) = given
        if key.kind is not Kind.KEY:
            other = f"depends on {what(key)}, and not as a release's keys do"
            raise _leak(f"noise is drawn with a key that {other}", eqn, key)
        path, bound = key.detail
        if bound is None:
            raise _leak("noise is drawn with a key that is not bound to the sum", eqn)
        if eqn.invars[0].aval.shape:
            raise _leak("noise is drawn with several keys at once", eqn)
        if self._repeated:
            raise _leak("noise is drawn in a loop or on each device, with one key", eqn)
        for other, where in self.drawn.items():
            shorter = min(len(path), len(other))
            if path[:shorter] == other[:shorter] and where != place:
                raise _leak("noise is drawn twice with one key", eqn)
        self.drawn[path] = place
        size = int(np.prod(eqn.outvars[0].aval.shape))
        return [self.rules.value((Kind.NOISE, Noise((Draws(path, 0, size),), bound)), place)]

    def _add_noise(self, eqn: Any, given: list[Value], place: tuple[Any, ...]) -> list[Value]:
        *sums, noise = given
        for part in sums:
            if part.kind not in (Kind.PUBLIC, Kind.BOUNDED):
                other = f"no sum of clipped contributions, but depends on {what(part)}"
                raise _leak(f"noise is added to what is {other}", eqn, part)
        if noise.kind is not Kind.NOISE:
            origin = what(noise)
            if noise.kind is Kind.SECRET:
                origin = "secret keys otherwise, such as noise on some coordinates alone"
            wanted = "Gaussian noise of a public size on every coordinate"
            other = f"found something that depends on {origin}"
            raise _leak(f"what is added to the sum must be {wanted}, {other}", eqn, noise)
        if len({variable.aval.shape for variable in [*eqn.invars, *eqn.outvars]}) > 1:
            raise _leak("one draw of noise is added to several sums", eqn)
        label = self.rules.noised(sums, noise, place)
        if label[0] is Kind.PRIVATE:
            raise _leak("the noise's key is not bound to the sum that it is added to", eqn)
        return [self.rules.value(label, place)]


def _without_noise(value: Value) -> Value:
    """The value, as a secret if it is noise."""
    return value._replace(kind=Kind.SECRET, detail=None) if value.kind is Kind.NOISE else value


def _leak(sentence: str, eqn: Any, value: Value | None = None) -> InformationLeak:
    return InformationLeak(f"{sentence}: {named(eqn)}{because(value) if value else ''}")


def because(value: Value) -> str:
    return "" if value.cause is None else f"; it comes from {named(value.cause.equation)}"


def what(value: Value) -> str:
    if value.kind in OF_CLIENTS:
        return "the clients' data"
    words = {Kind.PUBLIC: "public values alone", Kind.RELEASED: "noisy sums"}
    return words.get(value.kind, "secret keys")


def _without_source(value: Value) -> tuple[Any, Any]:
    """A label that holds for other rows, too: factors belong to their own rows alone."""
    return (Kind.PRIVATE, None) if value.kind is Kind.FACTOR else value.label


def _require_computing(eqn: Any) -> None:
    """Refuses an equation whose result may not follow from its operands, or that has an effect."""
    if name_of(eqn) not in COMPUTES | COLLECTIVES or effects(eqn):
        raise _leak(f"{eqn.primitive.name} cannot be followed", eqn)
    for inner in programs(list(eqn.params.values())):
        for equation in getattr(inner, "jaxpr", inner).eqns:
            _require_computing(equation)
