"""`jaxpfl calibrate --as-published`: the paper's figure, labelled, beside the valid ones."""

import json

import pytest

from jaxpfl.cli import main

GAN = [
    "calibrate", "--as-published", "augenstein", "--noise-multiplier", "1", "--rounds", "1000",
    "--clients-per-round", "1000",
]  # fmt: skip
RNN = [
    "calibrate", "--as-published", "augenstein", "--noise-multiplier", "1", "--rounds", "2000",
    "--clients-per-round", "5000", "--population", "342477", "--delta", "2.92e-6",
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (RNN, 9.22),
        ([*GAN, "--population", "250000", "--delta", "4e-8"], 2.38),
        ([*GAN, "--population", "500000", "--delta", "2e-8"], 1.79),
        ([*GAN, "--population", "1250000", "--delta", "8e-9"], 1.48),
    ],
)
def test_calibrate_prints_augensteins_figures_with_a_warning_and_the_valid_ones(
    capsys, arguments, printed
):
    """SPEC D.1"""
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert round(record["as_published"]["epsilon"], 2) == printed
    assert record["as_published"]["valid"] is False
    assert record["fixed"]["adjacency"] == "replace_one"
    assert record["fixed"]["accountant"] == "rdp"
    assert record["poisson"]["adjacency"] == "add_or_remove_one"
    assert record["poisson"]["accountant"] == "pld"
    assert record["poisson"]["epsilon"] < printed < record["fixed"]["epsilon"] / 2.4
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"paper's form (augenstein): (epsilon = {printed:.2f}")
    assert "NOT VALID for fixed-size rounds" in lines[0]
    assert lines[1].startswith("valid, fixed-size rounds") and "replace one client" in lines[1]
    assert lines[2].startswith("valid, Poisson rounds") and "add or remove one client" in lines[2]
    assert ("delta is 1 / N" in lines[-1]) == (arguments is RNN)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sampling", "poisson"], "no --sampling"),
        (["--accountant", "rdp"], "no --accountant"),
        (["--delta", "5e-6"], "not below 1 / population"),
        (["--noise-multiplier", "nan"], "noise_multiplier must"),
        (["--as-published", "augustin"], "invalid choice: 'augustin'"),
    ],
)
def test_what_contradicts_the_papers_form_is_refused(capsys, more, message):
    """TRUST 9"""
    # Of an option given twice, the last one counts.
    assert main([*GAN, "--population", "250000", "--delta", "4e-8", *more]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_it_needs_a_noise_and_not_an_epsilon(capsys):
    arguments = [argument for argument in RNN if argument not in ("--noise-multiplier", "1")]
    assert main([*arguments, "--epsilon", "9.22"]) == 2
    assert "--as-published needs --noise-multiplier" in capsys.readouterr().err
