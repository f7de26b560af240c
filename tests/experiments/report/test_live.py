"""The page of a run under way: the rounds so far, written nowhere, at one name alone."""

from http.client import HTTPConnection

import jax.numpy as jnp
import optax
import pytest

import jaxpfl as jp
from jaxpfl.experiments.report import live
from jaxpfl.privacy import ReproducibleSeed
from jaxpfl.progress import Progress


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
    plan = jp.Plan(3, jp.Clip(0.5), jp.Noise(1.0), jp.Poisson(30, 20), delta=1e-3)
    model = jp.models.from_functions(
        lambda key: jnp.zeros(10), lambda params, batch: params[batch["label"]]
    )
    sgd = optax.sgd(0.1)
    algorithm = jp.algorithms.fed_avg(model, client=sgd, server=sgd, plan=plan)

    def look(round):
        pages[round.number] = asked(address)
        assert not list(out.glob("*.html")) and not list(out.glob("plots"))

    with live.served(out) as address:
        assert "It begins." in asked(address)[1]
        for wrong in ({"host": "evil.example"}, {"host": "localhost"}, {"path": "/"}):
            assert asked(address, **wrong)[0] == 403
        assert {asked(address, method=each)[0] for each in ("POST", "PUT", "HEAD")} == {501}
        more = {"ledger": tmp_path / "ledger.jsonl", "on_round": look, "seed": ReproducibleSeed(0)}
        jp.run(algorithm, jp.data.open("digits?clients=30"), out=out, **more)
    # A round is asked about before it is on record.
    for round in (2, 3):
        status, page = pages[round]
        assert status == 200 and f"<b>{round - 1} / 3</b>" in page
        assert f"fed_avg (NOT PRIVATE): round {round - 1}/3" in page
    with pytest.raises(OSError):
        asked(address)
    assert 'class="live"' not in (out / "report.html").read_text()
