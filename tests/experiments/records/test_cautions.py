"""Warnings: each is said where it is so, and not where it is not."""

import math

import pytest

from jaxpfl.experiments.records.cautions import number, of_points, of_rounds, of_table, percent

UNTRAINED = {"model": "untrained", "perplexity": 900.0, "accuracy": 0.0}
UNIGRAM = {"model": "unigram", "perplexity": 130.0, "accuracy": 0.05}


def ours(perplexity):
    return {"model": "this run", "perplexity": perplexity, "accuracy": 0.1}


@pytest.mark.parametrize(
    ("perplexity", "worse_than"),
    [
        (100.0, []),
        (130.0, []),
        (131.0, ["unigram"]),
        (9168.0, ["unigram", "untrained"]),
        (None, ["unigram", "untrained"]),  # JSON has no infinity
        (math.nan, ["unigram", "untrained"]),
    ],
)
def test_a_run_that_is_worse_than_a_baseline_says_than_which(perplexity, worse_than):
    table = [UNTRAINED, UNIGRAM, ours(perplexity)]
    found = " ".join(of_table(table, "perplexity", "the test clients"))
    assert [name for name in ("unigram", "untrained") if name in found] == worse_than
    assert ("the test clients" in found) == bool(worse_than)


def test_models_without_perplexity_are_compared_by_loss():
    table = [{"model": "untrained", "loss": 2.3}, {"model": "this run", "loss": 2.4}]
    assert "untrained" in of_table(table, "loss", "test")[0]
    assert not of_table([table[0], {"model": "this run", "loss": 0.3}], "loss", "test")
    assert not of_table([], "loss", "")


def rounds(losses, norm=0.5):
    row = {"clip_norm": 1.0, "update_norm": norm}
    return [row | {"round": k, "evaluation": {"loss": loss}} for k, loss in enumerate(losses)]


def test_a_loss_that_rises_is_named_with_its_data():
    (found,) = of_rounds(rounds([2.0, 1.5, 3.25]), "validation clients")
    assert "3.25" in found and "validation clients" in found
    assert of_rounds(rounds([2.0, 1.5, None]), "")
    for losses in ([2.0, 2.5, 1.0], [2.0]):
        assert not of_rounds(rounds(losses), "")


@pytest.mark.parametrize(
    ("losses", "update_norm", "warned"),
    [
        ([2.0, 2.0], 3.0, True),
        ([2.0, 1.0], 3.0, False),
        ([2.0, 1.0, 1.2], 3.0, True),
        ([2.0, 2.0], 0.9, False),
    ],
)
def test_noise_from_which_nothing_is_learned_or_which_unlearns(losses, update_norm, warned):
    assert bool(of_rounds(rounds(losses, update_norm), "test")) == warned


def test_a_sweep_says_how_many_points_are_worse():
    good = {"language": True, "table": [UNIGRAM, ours(90.0)]}
    bad = {"language": True, "table": [UNIGRAM, ours(200.0)]}
    assert of_points([bad, bad]) == ["All of 2 points end worse than unigram in perplexity."]
    assert of_points([bad, good, {}]) == ["1 of 3 points end worse than unigram in perplexity."]
    assert not of_points([good, {}])


def test_numbers_have_four_digits_and_what_is_not_finite_is_said_to_be():
    given = (0.0, 3.14159, 12345.6, 1.5e7, None, math.nan, math.inf, -math.inf)
    said = ["0", "3.142", "12346", "1.5e+07", *["not finite"] * 4]
    assert [number(each) for each in given] == said
    assert percent(0.12345) == "12.35 %"
    assert percent(None) == ""
