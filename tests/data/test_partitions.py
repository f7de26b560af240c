"""Partitions: every example goes to one client, in the shares that the scheme promises."""

import dataclasses
import json

import numpy as np
import pytest

import jaxpfl.data as data
from jaxpfl.data.partitions import Dirichlet, Iid, Pathological, partition
from jaxpfl.errors import InputError
from jaxpfl.privacy import Ledger
from tests.refusals import refusal

LABELS = 5
EXAMPLES = 1_000
SCHEMES = [
    Iid(clients=7),
    Dirichlet(clients=7, alpha=0.3, min_examples=10),
    Pathological(clients=7, labels=2),
]


def columns():
    rng = np.random.default_rng(0)
    return {
        "x": np.arange(EXAMPLES, dtype=np.float32),
        "label": rng.integers(0, LABELS, EXAMPLES).astype(np.int32),
    }


def counts(population, classes=LABELS):
    """How many examples of each label each client has, int [clients, labels]."""
    return np.array(
        [
            np.bincount(population.examples(client)["label"], minlength=classes)
            for client in range(len(population))
        ]
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)
def test_every_example_is_at_one_client_with_its_own_label(scheme):
    held, found = columns(), partition(columns(), scheme)
    np.testing.assert_array_equal(np.sort(found.columns["x"]), held["x"])
    rows = found.columns["x"].astype(int)
    np.testing.assert_array_equal(found.columns["label"], held["label"][rows])
    again = partition(columns(), scheme)
    np.testing.assert_array_equal(found.columns["x"], again.columns["x"])
    np.testing.assert_array_equal(found.offsets, again.offsets)
    other = partition(columns(), dataclasses.replace(scheme, seed=1))
    assert not np.array_equal(found.columns["x"], other.columns["x"])


def test_iid_shares_are_equal_and_alike():
    found = partition(columns(), Iid(clients=7))
    assert set(found.sizes()) == {EXAMPLES // 7, EXAMPLES // 7 + 1}
    share_CxL = counts(found) / found.sizes()[:, None]
    overall_L = np.bincount(columns()["label"]) / EXAMPLES
    assert np.abs(share_CxL - overall_L).max() < 0.12


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_the_shares_of_a_label_have_the_variance_of_a_dirichlet(alpha):
    """Var = (1/C)(1 - 1/C) / (C alpha + 1), over many labels."""
    labels = np.repeat(np.arange(300, dtype=np.int32), 200)
    found = partition({"label": labels}, Dirichlet(clients=4, alpha=alpha, min_examples=0))
    share_CxL = counts(found, 300) / 200
    expected = 0.25 * 0.75 / (4 * alpha + 1)
    assert share_CxL.var() == pytest.approx(expected, rel=0.15)


def test_no_client_is_below_the_floor():
    sizes = partition(columns(), Dirichlet(clients=10, alpha=0.3, min_examples=20)).sizes()
    assert sizes.min() >= 20
    with pytest.raises(InputError, match="min_examples"):
        partition(columns(), Dirichlet(clients=10, alpha=0.001, min_examples=99))
    refusal(lambda: partition(columns(), Dirichlet(clients=600, min_examples=2)), "fewer")


@pytest.mark.parametrize(("clients", "labels"), [(7, 2), (5, 1), (3, 5), (40, 2)])
def test_a_client_has_few_labels_and_labels_are_at_as_many_clients(clients, labels):
    has = counts(partition(columns(), Pathological(clients=clients, labels=labels))) > 0
    assert (has.sum(axis=1) == labels).all()
    assert np.ptp(has.sum(axis=0)) <= 1


@pytest.mark.parametrize(
    ("examples", "clients", "labels"),
    [(500, 100, 10), (500, 100, 2), (200, 100, 2), (120, 100, 10)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_does_not_divide_is_dealt_so_that_no_client_is_empty(examples, clients, labels, seed):
    label = np.random.default_rng(seed).integers(0, 10, examples).astype(np.int32)
    scheme = Pathological(clients=clients, labels=labels, seed=seed)
    found = partition({"label": label}, scheme)
    sizes = found.sizes()
    assert sizes.min() >= 1 and (counts(found, 10) > 0).sum(axis=1).max() <= labels
    assert sizes.sum() == examples
    # None is last: the later half of the clients has about as much as the first.
    assert abs(sizes[: clients // 2].mean() - sizes[clients // 2 :].mean()) < 0.2 * sizes.mean()


def test_clients_that_no_deal_gives_an_example_are_refused():
    labels = np.array([0] + [1] * 99, np.int32)
    refusal(
        lambda: partition({"label": labels}, Pathological(clients=50, labels=1)), "lower clients"
    )
    for scheme in (Iid(clients=101), Dirichlet(clients=101), Pathological(clients=101)):
        refusal(lambda scheme=scheme: partition({"label": labels}, scheme), "need 101 fewer")


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.05])
def test_a_small_alpha_leaves_no_client_empty(alpha):
    try:
        sizes = partition(columns(), Dirichlet(clients=4, alpha=alpha)).sizes()
    except InputError as error:
        assert "raise alpha" in str(error)
    else:
        assert sizes.min() >= 1


def test_labels_that_cannot_be_shared_and_clients_that_would_be_torn_apart_are_refused():
    for clients, labels in ((2, 2), (9, 6)):
        with pytest.raises(InputError, match="labels"):
            partition(columns(), Pathological(clients=clients, labels=labels))
    own = data.from_clients({"a": {"label": [0, 1]}, "b": {"label": [1]}})
    with pytest.raises(InputError, match=r"client=\*"):
        partition(own, Iid(clients=2))


def test_a_source_names_its_partition(tmp_path):
    path = tmp_path / "reviews.jsonl"
    rows = ({"text": f"review {k}", "stars": k % 3, "shop": f"s{k % 4}"} for k in range(60))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{path}?client=*&columns=stars,shop"
    alone = data.open(source)
    dealt = data.open(f"{source}&partition=pathological&clients=6&by=stars&labels=1")
    assert all(len(set(dealt.examples(k)["stars"].tolist())) == 1 for k in range(6))
    # What protects one review does not protect six clients' worth of them: no common ledger.
    Ledger(tmp_path / "ledger.jsonl", alone).close()
    refusal(lambda: Ledger(tmp_path / "ledger.jsonl", dealt), "another population")


def test_images_of_an_archive_are_dealt(tmp_path):
    path = tmp_path / "images.npz"
    labels = np.arange(40) % 4
    np.savez(path, images=np.zeros((40, 2, 2), np.uint8), labels=labels)
    found = data.open(f"{path}?client=*&partition=dirichlet&clients=3&alpha=5")
    assert len(found) == 3
    assert np.bincount(found.columns["label"]).tolist() == [10] * 4
