"""The GPU's list of measurements: what one part does, no other part suffers from."""

import json
import textwrap

import jax
import pytest

from benchmarks import harness
from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import llama
from benchmarks.gpu.parts import Part, parts
from benchmarks.shapes import llama3_8b
from jaxpfl.models import count_parameters
from jaxpfl.models.decoder.network import Decoder

SCRIPTS = {
    "good": """
        file = pathlib.Path(os.environ[KEY]) / "good.jsonl"
        file.write_text(json.dumps({"what": sys.argv[1]}) + "\\n")
    """,
    "late": """
        file = pathlib.Path(os.environ[KEY]) / "late.jsonl"
        file.write_text('{"what": "first"}\\n')
        time.sleep(60)
    """,
    "bad": "raise SystemExit('no such device')",
    "silent": "pass",
}
HEAD = f"import json, os, pathlib, sys, time\nKEY = {harness.ELSEWHERE!r}\n"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Parts that are scripts of their own, and the folder OUT."""
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    found = [Part(name, name, ("whole",), ("tiny", name)) for name in ("bad", "silent", "good")]
    monkeypatch.setattr(driver, "parts", lambda: found)
    return tmp_path


def test_a_part_that_fails_does_not_stop_the_next_and_tiny_rows_are_no_results(scripts, capsys):
    assert driver.main(driver.Config(only=("good",), tiny=True)) == 0
    assert json.loads((scripts / "out" / "good.jsonl").read_text()) == {"what": "tiny"}
    assert not (scripts / "results").exists()
    capsys.readouterr()
    assert driver.main(driver.Config()) == 2
    bad, silent, good = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["part"] for line in (bad, silent, good)] == ["bad", "silent", "good"]
    assert "no such device" in bad["error"] and silent["error"] == "it recorded no row"
    assert good["error"] is None and good["rows"] == [{"what": "whole"}]
    assert json.loads((scripts / "results" / "good.jsonl").read_text()) == {"what": "whole"}


def test_a_part_that_takes_too_long_keeps_the_rows_that_it_stored(scripts):
    found = driver.run(Part("late", "late", (), ()), driver.Config(limit=3))
    assert found["error"] == "stopped after 3 s"
    assert found["rows"] == [{"what": "first"}]


def test_parts_have_names_of_their_own_and_chunks_that_divide_their_buckets():
    """A bucket has 64 clients, or a chunk for each device."""
    found = {part.name: part.arguments for part in parts()}
    assert len(found) == len(parts())
    with pytest.raises(SystemExit, match="found 'dinner'"):
        driver.main(driver.Config(only=("dinner",)))
    rounds = [arguments for name, arguments in found.items() if name.startswith("round-")]
    assert rounds
    for arguments in rounds:
        chunks = map(int, arguments[arguments.index("--chunks") + 1 :])
        assert all(max(64, chunk) % chunk == 0 for chunk in chunks)


# One of each kind: some differ in their sizes alone.
DIFFERENT = {(part.module, part.tiny): part for part in parts()}.values()


@pytest.mark.long
@pytest.mark.parametrize("part", DIFFERENT, ids=lambda part: part.name)
def test_each_part_ends_with_a_row(part, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    found = driver.run(part, driver.Config(tiny=True))
    assert found["error"] is None, found["error"]
    assert found["rows"]


def test_operations_are_those_of_the_published_shape():
    """Twice the parameters that multiply, 8.03 billion less the embedding, for a token alone."""
    model = Decoder(llama3_8b())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    norms = 65 * 4096
    multiply = count_parameters(shapes) - count_parameters(shapes["embed"]) - norms
    assert llama.products_per_token(model, 0) + llama.head_per_token(model) == 2 * multiply
