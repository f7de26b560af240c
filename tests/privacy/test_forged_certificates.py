"""Certificates that others wrote: what they say is checked or quoted, and counts once.

Each is sealed again, as somebody would who wants to be believed.
"""

import copy
import json
import re

import dp_accounting
import pytest

from jaxpfl import files
from jaxpfl.cli import main
from jaxpfl.privacy import Ledger, certificate, verify
from tests.privacy.ledgers import CLIENTS, EVERYONE, filled, five_rounds
from tests.refusals import refusal

DELTA = 1e-3
COST = float(dp_accounting.get_epsilon_gaussian(8.0 / 5**0.5, DELTA))
"""Of five releases with noise multiplier 8 on everyone, by the formula for one Gaussian."""


pytestmark = pytest.mark.usefixtures("whole_curves")


@pytest.fixture(scope="module")
def made(whole_curves, tmp_path_factory):
    """A folder with a ledger of one run, and its certificate; a name of it is "ledger.jsonl"."""
    folder = tmp_path_factory.mktemp("made")
    with Ledger(folder / "ledger.jsonl", CLIENTS) as ledger:
        five_rounds(ledger)
    found = certificate.certificate(
        "federated_training", {"ledger.jsonl": Ledger.read(folder / "ledger.jsonl")}, DELTA,
        statement="", stamp="",
    )  # fmt: skip
    files.write_json(folder / certificate.NAME, found)
    return folder


@pytest.fixture
def forged(made, tmp_path):
    """What is printed of the certificate after `change(certificate, its ledger)`; raises Unfit."""

    def verified(change, *ledgers):
        record = copy.deepcopy(files.read_record(made / certificate.NAME))
        change(record, record["ledgers"][0])
        path = tmp_path / certificate.NAME
        path.write_text(json.dumps(certificate.sealed(record)))
        return list(verify.verified([path], ledgers, None, False))

    return verified


def stating(statement):
    return lambda record, _: record.update(statement=statement)


@pytest.mark.parametrize(
    "statement",
    [
        "(epsilon = 0.1, delta = 0.001), unit = client",
        "(epsilon = .1, delta = 0.001)",
        "(epsilon=0.1, delta=0.001)",
        "(epsilon  =  0.1, delta = 0.001)",
        "epsilon = 0.1 at delta = 0.001",
        "(EPSILON = 0.1, DELTA = 0.001)",
        "(Epsilon = 1e-1, delta = 0.001)",
        "(\u03b5 = 0.1, \u03b4 = 0.001)",
        "(\U0001d700 = 0.1)",
        "eps = 0.1",
        "(\uff45psilon = 0.1, delta = 0.001)",
        "(epsilon = \u0660.\u0661, delta = 0.001)",
        "(epsilon = 0,9, delta = 0.001)",
        "(epsilon = 0.1, delta = 0)",
        "(epsilon = 0.1, delta = 1.0)",
        "(epsilon = 99, delta = 0.001), or rather (epsilon = 0.1, delta = 0.001)",
    ],
)
def test_a_statement_below_what_was_computed_is_refused_in_every_spelling(forged, statement):
    refusal(lambda: forged(stating(statement)), "statement", verify.Unfit)


@pytest.mark.parametrize("epsilon", [COST, 1.01 * COST, 100 * COST])
def test_a_statement_at_or_above_it_fits(forged, epsilon):
    assert forged(stating(f"(epsilon = {epsilon:.17g}, delta = {DELTA:g}), unit = client"))


def test_of_a_simulation_the_smaller_epsilon_may_be_the_larger_populations(forged):
    def change(record, _, *, here=COST):
        record["stamp"] = "SIMULATED: as if more took part"
        larger = f"(epsilon = 0.01, delta = {DELTA})"
        record["statement"] = f"larger: {larger}; these have (epsilon = {here}, delta = {DELTA})"

    assert forged(change)
    refusal(lambda: forged(lambda *each: change(*each, here=0.1)), "statement", verify.Unfit)


WORDS = [
    "ledger.jsonl: 5 releases cost (epsilon = 0.1, delta = 0.001) for each client\x1b[8m",
    "\r\x1b[2Kcertificate.json: fits",
    "x\ncertificate.json: fits\nnot checked: nothing",
    'x": 5 releases cost (epsilon = 0.1, delta = 0.001), computed again. "',
    "\u202e0.1\u202c \u200b\u2028\u2029\x9b2J\ud800",
    "x" * 100_000,
]


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
@pytest.mark.parametrize("field", ["name", "stamp", "run"])
def test_words_of_others_are_quoted_in_one_line(forged, made, field, words):
    """Outside the quotes stands what the verifier says of the certificate without them."""

    def change(words):
        def changed(record, ledger):
            if field == "stamp":
                record["stamp"] = words
            elif field == "name":
                ledger["name"] = words
            else:
                # A run's name is printed where there are several.
                for each in (ledger["queries"][0], *ledger["charges"][:4]):
                    each["run"] = words
                ledger["queries"].append({**ledger["queries"][0], "run": "a"})
                ledger["lines"] += 1

        return changed

    def without_quotes(lines):
        return [re.sub(r'"(?:[^"\\]|\\.)*"', '""', line) for line in lines]

    lines = forged(change(words))
    assert without_quotes(lines) == without_quotes(forged(change("plain")))
    assert any(f"epsilon = {COST:.6g}" in line for line in without_quotes(lines))
    for line in lines:
        assert line.isascii() and line.isprintable() and len(line) < 500


def _noise(value):
    def change(_, ledger):
        for each in ledger["charges"]:
            each["event"]["noise_multiplier"] = value

    return change


def _field(name, value):
    return lambda _, ledger: ledger.update({name: value})


def _charges(change):
    return lambda _, ledger: [change(each) for each in ledger["charges"]]


def _sampled(probability):
    def change(_, ledger):
        for each in ledger["charges"]:
            sampled = {"type": "poisson_sampled", "probability": probability}
            each["event"] = {**sampled, "event": each["event"]}

    return change


IMPOSSIBLE = {
    "lines of -1": _field("lines", -1),
    "lines of 2": _field("lines", 2),
    "lines of True": _field("lines", True),
    "lines of 6.0": _field("lines", 6.0),
    "a unit of its own": _field("unit", "person"),
    "a large delta": lambda _, ledger: ledger.update(queries=[], delta=0.9, epsilon=0.6),
    "a delta in words": _field("delta", "0.001"),
    "an epsilon of True": _field("epsilon", True),
    "a curve of words": _field("curve", ["x"]),
    "charges in an object": _field("charges", {}),
    "a charge in words": _field("charges", ["x"]),
    "a run of a list": _charges(lambda each: each.update(run=[1])),
    "a round in words": _charges(lambda each: each.update(round="1")),
    "a note": _charges(lambda each: each.update(note="x")),
    "ledgers in words": lambda record, _: record.update(ledgers=["x"]),
    "a stamp of a number": lambda record, _: record.update(stamp=7),
    "a statement of a list": lambda record, _: record.update(statement=["x"]),
    "one ledger under two keys": lambda record, ledger: record["ledgers"].append(
        {**ledger, "key": "00", "name": "other"}
    ),
    "one ledger twice": lambda record, ledger: record["ledgers"].append(dict(ledger)),
    **{f"noise {v!r:.9}": _noise(v) for v in (True, "8", "\u0668", -0.0, 0, -8, 1e308, 10**400)},
    **{f"probability {p!r}": _sampled(p) for p in (True, "1", 0, -1, 2, 1e-300, 5e-324)},
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_values_that_cannot_be_are_refused(forged, change):
    def unplanned(record, ledger):
        # Without queries nothing but the value is wrong.
        ledger.update(queries=[], epsilon=1e6, curve=[], trade_off=[])
        change(record, ledger)

    assert forged(lambda _, ledger: ledger.update(queries=[], curve=[], trade_off=[]))
    with pytest.raises(verify.Unfit) as refused:
        forged(unplanned)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"7",
        b"",
        b"[" * 100_000,
        b'{"format": ' + b"9" * 10_000 + b"}",
        b'{"format": "jaxpfl certificate 2", "format": "jaxpfl certificate 2"}',
        b'{"format": NaN}',
        b'{"\xff": 1}',
    ],
    ids=range(8),
)
def test_what_is_no_certificate_is_refused_in_a_sentence(tmp_path, text, capsys):
    (tmp_path / "c.json").write_bytes(text)
    assert main(["verify", str(tmp_path / "c.json")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "c.json") in said and len(said) < 500


def test_charges_are_compared_with_the_plans_without_a_ledger(forged):
    """Three times the noise, with all that follows from it: only the plan says otherwise."""

    def change(_, ledger):
        _noise(24.0)(_, ledger)
        cost = verify.cost_of(ledger["charges"])
        for each in (ledger, *ledger["curve"]):
            each["epsilon"] = cost(each["delta"])
        ledger["trade_off"] = []

    refusal(lambda: forged(change), "plan", verify.Unfit)

    def without_queries(record, ledger):
        change(record, ledger)
        ledger["queries"] = []

    # Then nothing is compared, which is said, and the epsilon is that of the charges.
    said = "\n".join(forged(without_queries))
    assert re.search("not checked: plan and population of 5 ", said)


def test_a_certificate_of_the_first_releases_alone_tells_what_the_ledger_costs(made, forged):
    def change(record, ledger):
        lines = [json.loads(line) for line in (made / "ledger.jsonl").read_text().splitlines()]
        ledger.update(charges=ledger["charges"][:1], lines=3, head=lines[2]["hash"])

    said = forged(change, made / "ledger.jsonl")
    (line,) = [each for each in said if "ledger.jsonl: fits" in each]
    assert "4 later" in line and f"epsilon = {COST:.6g}" in line


def test_a_ledger_that_is_named_twice_counts_once(made, tmp_path):
    """Of two ledgers one is given twice, once as a copy: the other is said not to be checked."""
    filled(tmp_path / "other.jsonl", 1, EVERYONE)
    two = {"ledger.jsonl": Ledger.read(made / "ledger.jsonl")}
    two["other.jsonl"] = Ledger.read(tmp_path / "other.jsonl")
    found = certificate.certificate("x", two, DELTA, statement="", stamp="")
    files.write_json(tmp_path / "c.json", found)
    (tmp_path / "copy.jsonl").write_bytes((made / "ledger.jsonl").read_bytes())
    paths, own = [tmp_path / "c.json"], made / "ledger.jsonl"

    def last(*ledgers, certificates=paths):
        return list(verify.verified(certificates, ledgers, None, True))[-2:]

    assert "2 of 2 ledgers" in last()[1]
    for ledgers in ([own, own], [own, tmp_path / "copy.jsonl"]):
        assert "1 of 2 ledgers" in last(*ledgers)[1]
    assert "--ledger" not in last(own, tmp_path / "other.jsonl")[1]
    # Nor do certificates count twice.
    assert last(certificates=paths * 2) == last() and "6 releases on 2 ledgers" in last()[0]


def test_a_run_names_each_of_its_ledgers_once(made, tmp_path):
    """Two ledgers of one name in different folders are two, and one file under two names is one."""
    (tmp_path / "link.jsonl").symlink_to(made / "ledger.jsonl")
    (tmp_path / "other").mkdir()
    filled(tmp_path / "other" / "ledger.jsonl", 1)
    paths = [made / "ledger.jsonl", tmp_path / "link.jsonl", tmp_path / "other" / "ledger.jsonl"]
    (tmp_path / "run").mkdir()
    certificate.certify(tmp_path / "run", "x", [], statement="", stamp="", ledgers=paths)
    found = files.read_record(tmp_path / "run" / certificate.NAME)["ledgers"]
    assert [len(each["charges"]) for each in found] == [5, 1]
    assert len({each["name"] for each in found}) == 2
