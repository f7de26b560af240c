"""The benchmark of what a round of POPri costs a client: floats and scores."""

from benchmarks.macro import popri_cost


def test_floats_at_the_papers_size_are_those_of_its_table():
    steps = popri_cost.at_papers_size(8)
    floats = {what: (step.down, step.up) for what, step in steps.items()}
    # PE's 0.7 million and 1,800, POPri's 7 million and 18,000 are the paper's own.
    assert floats == {
        "PE, paper's size": (691_200, 1_800),
        "POPri as published": (6_912_000, 18_000),
        "POPri, paper's size": (73_920, 384),
    }
    # DP-FedAvg's, of which the paper has 82 million.
    assert popri_cost.parameters() == 81_912_576
