"""The page of a run under way: the rounds so far, written nowhere, at one name alone."""

from http.client import HTTPConnection

import jax.numpy as jnp
import optax
import pytest

import jaxpfl as jp
from jaxpfl.experiments.report import live
from jaxpfl.privacy import ReproducibleSeed
from jaxpfl.progress import Progress

PLAN = jp.Plan(
    rounds=3, clip=jp.Clip(0.5), noise=jp.Noise(1.0), delta=1e-3,
    participation=jp.Poisson(30, 20),
)  # fmt: skip
MODEL = jp.models.from_functions(
    lambda key: jnp.zeros((64, 10)),
    lambda params, batch: optax.softmax_cross_entropy_with_integer_labels(
        batch["image"].reshape(-1, 64) @ params, batch["label"]
    ),
)


def asked(address, *, method="GET", host=None, path=None):
    where, _, secret = address.removeprefix("http://").partition("/")
    connection = HTTPConnection(where, timeout=30)
    connection.request(method, path or f"/{secret}", headers={"Host": host or where})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_run_under_way_is_seen_at_its_own_address_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_SECONDS", 1e-9)
    monkeypatch.setattr(Progress, "latest", "")
    out, pages = tmp_path / "run", {}

    def look(round):
        pages[round.number] = asked(address)
        assert not list(out.glob("*.html")) and not list(out.glob("plots"))

    with live.served(out) as address:
        assert "It begins." in asked(address)[1]
        assert asked(address, host="evil.example")[0] == 403
        assert asked(address, host="localhost:" + address.split(":")[2].partition("/")[0])[0] == 403
        assert asked(address, path="/")[0] == 403
        for method in ("POST", "PUT", "HEAD"):
            assert asked(address, method=method)[0] == 501
        algorithm = jp.algorithms.fed_avg(
            MODEL, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=PLAN
        )
        clients = jp.data.open("digits?clients=30")
        jp.run(
            algorithm, clients, ledger=tmp_path / "ledger.jsonl", out=out, on_round=look,
            seed=ReproducibleSeed(0),
        )  # fmt: skip
    assert {status for status, _ in pages.values()} == {200}
    # A round is asked about before it is on record.
    for round in (2, 3):
        assert f"<b>{round - 1} / 3</b>" in pages[round][1]
        assert f"fed_avg (NOT PRIVATE): round {round - 1}/3" in pages[round][1]
    with pytest.raises(OSError):
        asked(address)
    assert 'class="live"' not in (out / "report.html").read_text()
