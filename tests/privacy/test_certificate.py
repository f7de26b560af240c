"""Certificates: others can check them, and one that was changed is refused with a reason.

TRUST 49. Changed certificates are sealed again, as somebody would who wants to be believed.
"""

import ast
import copy
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import dp_accounting
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl import files
from jaxpfl.privacy import Ledger, accounting, certificate, events, participation, verify
from tests.plans import OWN, epsilon_of
from tests.privacy.ledgers import (
    ASKED,
    CLIENTS,
    EVERYONE,
    FIXED,
    GAUSSIAN,
    NAMES,
    OTHER,
    PLAN,
    charge,
    filled,
    five_rounds,
    fixed,
    poisson,
    truncated,
)

DELTA = 1e-5
WEIGHTS = {"model.safetensors": b"weights", "below/tokenizer.json": b"{}"}


pytestmark = pytest.mark.usefixtures("whole_curves")


@pytest.fixture(scope="module")
def made(whole_curves, tmp_path_factory):
    """A folder with a ledger of two runs, weights, and the certificate of both."""
    folder = tmp_path_factory.mktemp("made")
    with Ledger(folder / "ledger.jsonl", CLIENTS) as ledger:
        five_rounds(ledger)
        charge(ledger, 1, GAUSSIAN(4.0), "fred", run="another")
        charge(ledger, 2, EVERYONE, "fed_avg_gan", run="another")
    for name, data in WEIGHTS.items():
        (folder / "weights" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "weights" / name).write_bytes(data)
    ledger = Ledger.read(folder / "ledger.jsonl")
    found = certificate.certificate(
        "federated_training", {"ledger.jsonl": ledger}, DELTA,
        statement=f"(epsilon = {accounting.rounded_up(ledger.spent(DELTA))}, delta = {DELTA:g})",
        stamp="",
    )  # fmt: skip
    files.write_json(folder / certificate.NAME, found)
    certificate.with_weights(folder / certificate.NAME, folder / "weights")
    return folder


def lines(folder, *, ledger=True, weights=True, joined=False, path=None):
    return list(
        verify.verified(
            [path or folder / "weights" / certificate.NAME],
            [folder / "ledger.jsonl"] if ledger else [],
            folder / "weights" if weights else None,
            joined,
        )
    )


def certified(path):
    """The ledger at `path`, and a certificate of it alone."""
    ledger = Ledger.read(path)
    return ledger, certificate.certificate("x", {"l": ledger}, DELTA, statement="", stamp="")


def cost(record):
    """The epsilon of a certificate's only ledger, once it was checked."""
    verify.check(record)
    return verify.cost_of(record["ledgers"][0]["charges"])(DELTA)


def test_what_a_run_writes_fits(made):
    said = "\n".join(lines(made, joined=True))
    assert "7 releases cost" in said and "2 files fit" in said and "together" in said
    assert re.search(r"misses at least [1-9][0-9.]*%", said)
    # The run's own certificate has no weights, and is checked without any.
    verify.main([str(made / certificate.NAME)])


def test_float_noise_is_among_what_is_not_covered_and_exact_noise_is_not(tmp_path):
    for noise, labels in (
        ("exact", ["a"]),
        ("exact_banded", ["a"]),
        ("exact", "ab"),
        ("banded", "a"),
    ):
        path = tmp_path / f"{noise}{len(labels)}.jsonl"
        plan = jp.Plan(5, jp.Clip(1.0), jp.Noise(8.0, noise), jp.Cyclic(len(NAMES), 2), DELTA)
        with Ledger(path, CLIENTS) as ledger:
            for number, label in enumerate(labels):
                asked = None if number else {"plan": plan.to_dict(), **ASKED}
                names = {"run": "a", "round": 1, "identity": label}
                ledger.charge(plan.charge_event(), label, query=asked, **names)
        said = any("float32" in each for each in certified(path)[1]["not_covered"])
        assert said == (noise == "banded" or len(labels) > 1)


def test_what_was_not_given_is_said_not_to_be_checked(made):
    said = lines(made, ledger=False, weights=False)[-1]
    assert "--ledger" in said and "--weights" in said and "other ledgers" in said


def test_the_verifier_needs_dp_accounting_alone():
    tree = ast.parse(Path(verify.__file__).read_text())
    named = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    named |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in named} - set(sys.stdlib_module_names)
    # numpy comes with dp-accounting.
    assert others == {"dp_accounting", "numpy"}


@pytest.mark.parametrize(
    "parts",
    [
        [(GAUSSIAN(0.7), 1)],
        [(GAUSSIAN(3.0), 20), (GAUSSIAN(9.0), 1)],
        [(poisson(0.001, 0.8), 2_000)],
        [(poisson(0.3, 5.0), 10), (GAUSSIAN(4.0), 1)],
        [(poisson(0.02, 1.0), 50), (poisson(0.1, 3.0), 5)],
        [(truncated(1_000, 0.05, 70, 1.5), 20), (poisson(0.02, 1.0), 5)],
        [(events.ZeroOut(GAUSSIAN(2.0)), 5), (poisson(0.02, 1.0), 5)],
        [(fixed(1_000, 10, 0.5), 30)],
        [(dp_accounting.ZCDpEvent(0.01, 1e-6), 10), (GAUSSIAN(8.0), 3)],
    ],
    ids=lambda parts: "+".join(type(part[0]).__name__.removesuffix("DpEvent") for part in parts),
)
def test_epsilons_are_those_of_the_library_at_every_delta(parts):
    """By the verifier's own code; a tenth of a percent apart at most."""
    found = verify.cost_of(
        [{"event": events.to_json(e)} for e, times in parts for _ in range(times)]
    )
    adjacency = events.adjacency(dp_accounting.ComposedDpEvent([event for event, _ in parts]))
    total = events.counts(
        dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(*part) for part in parts])
    )
    accountant = accounting.default_accountant(total)
    for delta in (1e-2, 1e-5, 1e-9):
        expected = accounting.epsilon_of_counts(total, delta, accountant, adjacency)
        assert found(delta) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", participation.KINDS)
def test_a_plan_costs_what_the_verifier_says(kind):
    taken = participation.of(kind, 40, 4, **OWN.get(kind, {}))
    plan = dataclasses.replace(PLAN, participation=taken)
    assert verify._event_of(plan.to_dict()) == events.to_json(plan.charge_event())
    plain = jp.Plan.without_privacy(rounds=1, participation=taken)
    assert verify._event_of(plain.to_dict()) == events.to_json(plain.charge_event())


def test_trade_off_is_that_of_a_gaussian():
    """Dong, Roth, Su 2022: Phi(Phi^-1(1 - level) - mu); supporting lines lie below it."""
    from scipy import stats

    mu, deltas = 1.0, np.geomspace(1e-8, 0.38, 200)
    curve = [
        {"delta": d, "epsilon": float(dp_accounting.get_epsilon_gaussian(1 / mu, d))}
        for d in deltas.tolist()
    ]
    for level in (0.01, 0.05, 0.2, 0.5):
        exact = stats.norm.cdf(stats.norm.ppf(1 - level) - mu)
        assert verify.least_missed(level, curve) == pytest.approx(exact, abs=2e-3)
        assert verify.least_missed(level, curve) <= exact + 1e-6


def _place(record, path):
    for name in path[:-1]:
        record = record[name]
    return record, path[-1]


def _fields_of(record, path=()):
    """The paths of all values in a certificate, by name and index."""
    if isinstance(record, dict | list):
        for name in record if isinstance(record, dict) else range(len(record)):
            yield from _fields_of(record[name], (*path, name))
    else:
        yield path


def _less_cautious(name, value):
    """A number that claims more than the other one."""
    match name:
        case "noise_multiplier" | "false_positives":
            return 1.5 * value
        case "false_negatives":
            return 1.1 * value + 1e-3
        case "delta":
            return 1e-3 * value
    return 0.9 * value - 1e-3


def changes(certificate_):
    """Changed copies, each with what was changed: values, missing and added fields and lines."""
    words = ("stamp", "system", "name", "not_covered", "versions")
    for path in _fields_of(certificate_):
        if {*words, "seal"} & set(path):
            continue  # words, from which nothing follows
        where = copy.deepcopy(certificate_)
        record, name = _place(where, path)
        value = record[name]
        if path[-1] == "statement":
            record[name] = re.sub(r"epsilon = [0-9.]+", "epsilon = 0.01", value)
        elif isinstance(value, bool):
            record[name] = "yes"
        elif isinstance(value, int):
            record[name] = value + 1
        elif isinstance(value, float):
            record[name] = _less_cautious(name, value)
        elif value is None:
            record[name] = "pld"
        else:
            record[name] = value[:-1] + ("0" if value[-1:] != "0" else "1")
        yield "/".join(map(str, path)), where
    ledger = certificate_["ledgers"][0]
    for name in (*certificate_, *(("ledgers", 0, each) for each in ledger)):
        where = copy.deepcopy(certificate_)
        record, last = _place(where, name if isinstance(name, tuple) else (name,))
        del record[last]
        yield f"without {last}", where
    for number in range(len(ledger["charges"])):
        where = copy.deepcopy(certificate_)
        del where["ledgers"][0]["charges"][number]
        yield f"without charge {number}", where
    for value in ("NOT PRIVATE", 7, None, [], {"a": 1}):
        where = copy.deepcopy(certificate_)
        where["ledgers"][0]["note"] = value
        yield f"with the note {value!r}", where


def test_a_hundred_changes_are_refused_with_a_reason(made, tmp_path):
    """With the ledger and the weights given, nothing that is checked can be changed."""
    original = files.read_record(made / "weights" / certificate.NAME)
    number, path = 0, tmp_path / certificate.NAME
    for what, changed in changes(original):
        resealed = certificate.sealed(changed) if "seal" in changed else changed
        path.write_text(json.dumps(resealed))
        with pytest.raises((verify.Unfit, OSError)) as refused:
            lines(made, path=path)
            pytest.fail(f"{what}: fits")
        assert len(str(refused.value)) > 20, what
        number += 1
    assert number >= 100


def test_without_its_seal_renewed_a_change_of_words_is_refused(made, tmp_path):
    changed = files.read_record(made / certificate.NAME)
    changed["not_covered"] = []
    (tmp_path / "c.json").write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match="DOES NOT FIT: .*sealed"):
        verify.main([str(tmp_path / "c.json")])


def test_a_ledger_that_grew_is_said_to_hold_more(made, tmp_path):
    for name in ("ledger.jsonl", "private/ledger.jsonl.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((made / name).read_bytes())
    with Ledger(tmp_path / "ledger.jsonl", CLIENTS) as ledger:
        charge(ledger, 9)
    said = list(
        verify.verified([made / certificate.NAME], [tmp_path / "ledger.jsonl"], None, False)
    )
    assert any("1 later releases are not certified" in line for line in said)


@pytest.mark.parametrize("damage", ["cut", "edited", "another"])
def test_a_ledger_that_is_not_the_certificates_is_refused(made, tmp_path, damage):
    path = tmp_path / "ledger.jsonl"
    whole = (made / "ledger.jsonl").read_bytes()
    if damage == "cut":
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    elif damage == "edited":
        path.write_bytes(whole.replace(b'"round":3', b'"round":4'))
    else:
        filled(path, 1)
    with pytest.raises(verify.Unfit, match=r"ledger\.jsonl"):
        list(verify.verified([made / certificate.NAME], [path], None, False))


def test_changed_weights_are_refused(made, tmp_path):
    for name in WEIGHTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"other")
    path = made / "weights" / certificate.NAME
    with pytest.raises(verify.Unfit, match=r"tokenizer\.json|model\.safetensors"):
        list(verify.verified([path], [], tmp_path, False))


def test_several_certificates_cost_together_what_their_releases_cost(made, tmp_path):
    """One ledger counts once, however many certificates of it there are."""
    filled(tmp_path / "ledger.jsonl", 3, OTHER)
    other, found = certified(tmp_path / "ledger.jsonl")
    files.write_json(tmp_path / "c.json", found)
    paths = [made / certificate.NAME, made / "weights" / certificate.NAME, tmp_path / "c.json"]
    said = list(verify.verified(paths, [], None, True))[-2]
    events_ = [each.event for each in (*Ledger.read(made / "ledger.jsonl").charges, *other.charges)]
    whole = epsilon_of(dp_accounting.ComposedDpEvent(events_), DELTA, "pld", "add_or_remove_one")
    assert float(re.search(r"epsilon = ([0-9.]+)", said)[1]) == pytest.approx(whole, rel=1e-3)
    assert "10 releases on 2 ledgers" in said
    (ledger,) = found["ledgers"]
    with pytest.raises(verify.Unfit, match="other charges"):
        verify.together([ledger, {**ledger, "charges": ledger["charges"][1:]}])


def test_a_ledger_with_a_release_without_noise_is_stamped(tmp_path):
    """Also beside noisy ones, of this run or of another; without the stamp it does not fit."""
    with Ledger(tmp_path / "ledger.jsonl", CLIENTS) as ledger:
        charge(ledger, 1, dp_accounting.NonPrivateDpEvent())
        charge(ledger, 1, EVERYONE, run="another")
    _, found = certified(tmp_path / "ledger.jsonl")
    assert found["stamp"].startswith("NOT PRIVATE")
    assert math.isinf(cost(found))
    with pytest.raises(verify.Unfit, match="NOT PRIVATE"):
        verify.check(certificate.sealed({**found, "stamp": ""}))


@pytest.mark.parametrize("event", [FIXED, fixed(100, 100, 2.0)], ids=["some", "everyone"])
def test_cohorts_of_fixed_size(tmp_path, event):
    filled(tmp_path / "ledger.jsonl", 4, event)
    ledger, found = certified(tmp_path / "ledger.jsonl")
    assert cost(found) == pytest.approx(ledger.spent(DELTA))
    assert math.isfinite(found["ledgers"][0]["epsilon"])


def test_a_statement_names_no_stronger_adjacency_than_its_runs_have(tmp_path):
    """Whom a zeroed client's cost protects, it protects not from having been absent."""
    event = events.ZeroOut(dp_accounting.GaussianDpEvent(4.0))
    filled(tmp_path / "ledger.jsonl", 1, event)
    _, found = certified(tmp_path / "ledger.jsonl")
    spent = f"(epsilon = {2 * cost(found):.4g}, delta = {DELTA:g}), unit = client, adjacency = "
    verify.check(found, [spent + "zero out one client, accountant = PLD"])
    with pytest.raises(verify.Unfit, match="add or remove"):
        verify.check(found, [spent + "add or remove one client, accountant = PLD"])


def test_the_schema_is_that_of_certificates(made):
    jsonschema = pytest.importorskip("jsonschema")
    folder = Path(verify.__file__).parent
    schema = files.read_json(folder / "certificate.schema.json")
    validator = jsonschema.Draft202012Validator(schema)
    found = files.read_record(made / "weights" / certificate.NAME)
    assert list(validator.iter_errors(found)) == []
    assert list(validator.iter_errors({**found, "note": 1}))
