"""FLAIR made small: images as tools/flair.py writes them, frozen weights, two rounds."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.export import export
from jaxpfl.models.checkpoints import folders
from tests.models.test_multi_label import safetensors_numpy, state_dict
from tools.flair import main as write_flair

ROOT = Path(__file__).parents[4]
SMALL = ["--training.rounds", "2", "--training.clients-per-round", "3", "--training.batch-size",
         "2", "--training.max-examples", "3", "--training.clients-per-bucket", "2",
         "--evaluation.every", "1", "--evaluation.max-examples", "8", "--model.image-shape",
         "[36, 36, 3]", "--model.crop", "34", "--model.stages", "[1, 1]", "--run.devices",
         "1"]  # fmt: skip
LABELS = ["animal", "food", "outdoor"]


@pytest.fixture
def flair(tmp_path, monkeypatch) -> Path:
    """Made-up images of eight users, as tools/flair.py writes FLAIR's."""
    datasets = pytest.importorskip("datasets", reason="needs jaxpfl[datasets]")
    image = pytest.importorskip("PIL.Image", reason="needs jaxpfl[datasets]")

    def load_dataset(name: str, split: str):
        assert name == "apple/flair"
        rng, users = np.random.default_rng(len(split)), 8
        of_user = np.tile(np.arange(users), 3)[: 3 * users - 2]
        pixels = rng.integers(0, 256, (len(of_user), 36, 36, 3), np.uint8)
        labels = [sorted(rng.choice(LABELS, rng.integers(1, 4), False)) for _ in of_user]
        rows = {
            "user_id": [f"{user}@{split}" for user in of_user],
            "image": list(map(image.fromarray, pixels)),
            "labels": labels,
        }
        features = datasets.Features(
            user_id=datasets.Value("string"),
            image=datasets.Image(),
            labels=datasets.Sequence(datasets.Value("string")),
        )
        return datasets.Dataset.from_dict(rows, features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXPFL_FLAIR", str(tmp_path))
    write_flair(tmp_path)
    return tmp_path


def test_the_program_keeps_users_images_and_labels(flair):
    clients = open_population("$JAXPFL_FLAIR/train")
    assert len(clients) == 8
    assert clients.sizes().tolist() == [3] * 6 + [2] * 2
    assert clients.columns["image"].shape == (22, 36, 36, 3)
    assert clients.columns["labels"].shape == (22, len(LABELS))
    # The second user's rows were the second, tenth and eighteenth.
    rng = np.random.default_rng(len("train"))
    pixels = rng.integers(0, 256, (22, 36, 36, 3), np.uint8)
    np.testing.assert_array_equal(clients.columns["image"][3:6], pixels[[1, 9, 17]])


def test_two_private_rounds_from_frozen_weights_and_the_export_of_both(flair):
    weights = flair / "resnet18"
    weights.mkdir()
    tensors = state_dict(4, (1, 1))
    safetensors_numpy.save_file(tensors, weights / "model.safetensors")
    given = [*SMALL, "--model.path", str(weights), "--model.width", "4", "--model.groups", "4",
             "--model.classes", "3", "--privacy.accountant", "rdp"]  # fmt: skip
    config = registry.load(ROOT / "configs" / "pfl" / "flair.yaml", given)
    record = carry_out.run(config, flair / "run", progress=False).record
    assert "epsilon = 2" in record["privacy"]
    rows = {row["model"]: row for row in record["table"]}
    assert list(rows) == ["the published model", "this run"]
    for row in rows.values():
        assert np.isfinite(row["loss"]) and 0 < row["average_precision"] <= 1
    assert rows["this run"]["loss"] != rows["the published model"]["loss"]
    page = (flair / "run" / "report.html").read_text("utf-8")
    assert "average_precision" in page

    export(flair / "run", flair / "exported", progress=False)
    assert "average_precision" in (flair / "exported" / "README.md").read_text()
    model, params = folders.load(flair / "exported")
    found = {path: (mean, variance) for path, mean, variance in model.statistics}
    for path, name in (("stem_norm", "bn1"), ("block_1.norm_2", "layer2.0.bn2")):
        for values, last in zip(found[path], ("mean", "var"), strict=True):
            np.testing.assert_array_equal(np.float32(values), tensors[f"{name}.running_{last}"])
    assert not np.array_equal(params["stem_norm"]["scale"], tensors["bn1.weight"])
    assert np.isfinite(jax.device_get(params["kernel"])).all()

    # Other weights in the folder would be another model.
    tensors["bn1.weight"] += 1
    safetensors_numpy.save_file(tensors, weights / "model.safetensors")
    with pytest.raises(InputError, match="published model must be the one that the run used"):
        export(flair / "run", flair / "again", progress=False)
    lines = (flair / "run" / "metrics.jsonl").read_text().splitlines()
    assert "average_precision" in json.loads(lines[-1])["evaluation"]
