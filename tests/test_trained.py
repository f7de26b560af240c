"""A trained model in a folder: what it predicts, what it loads, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from jaxpfl import models
from jaxpfl.cli import main
from jaxpfl.models.recurrent import LSTMLanguageModel
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers import characters
from jaxpfl.trained import CHARACTERS, Trained
from tests.published_models import write_decoder, write_tokeniser
from tests.refusals import refusal
from tests.trees import drawn

FIELDS = {"features": ["a", "b"], "label": ["y"], "classes": ["cat", "dog", "owl"]}
ROWS = "b,name,a\n0.25,x,-1.5\n3,y,20000\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A classifier of two features, as an export has it."""
    model = models.MLP(features=2, classes=3, hidden=4)
    folder = tmp_path_factory.mktemp("trained") / "model"
    Trained(model, drawn(model, 1), fields=FIELDS).save(folder)
    return folder


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


def _by_hand(folder: Path, rows: list[list[float]]) -> np.ndarray:
    """Probabilities of the classes, in float64, from the file alone."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(folder / "model.safetensors")
    x = np.arcsinh(np.array(rows)) @ np.float64(tensors["layer_0.kernel"])
    x = np.maximum(x + tensors["layer_0.bias"], 0) @ np.float64(tensors["layer_1.kernel"])
    x = np.exp(x + tensors["layer_1.bias"])
    return x / x.sum(1, keepdims=True)


def test_labels_and_probabilities_are_those_of_the_weights(folder, table):
    """By their fields, in whatever order the table has them."""
    expected = _by_hand(folder, [[-1.5, 0.25], [20000, 3]])
    predicted = jp.load(folder).predict(table).to_pylist()
    assert [row["row"] for row in predicted] == [2, 3]
    for row, probabilities in zip(predicted, expected, strict=True):
        assert row["label"] == FIELDS["classes"][probabilities.argmax()]
        of_row = [row[f"probability_{name}"] for name in FIELDS["classes"]]
        np.testing.assert_allclose(of_row, probabilities, rtol=1e-5)
    many = jp.load(folder).log_probabilities(np.tile([[-1.5, 0.25]], (150, 1)))
    np.testing.assert_allclose(np.exp(many), np.tile(expected[:1], (150, 1)), rtol=1e-5)


def test_the_command_writes_each_format_and_loads_nothing_that_trained(folder, table, tmp_path):
    """TRUST: the process that predicts holds no code that asks clients."""
    code = (
        "import sys; from jaxpfl.cli import main;"
        "code = max(main([*sys.argv[1:4], '--out', out]) for out in sys.argv[4:]);"
        "parts = ('algorithms', 'federated', 'experiments');"
        "loaded = [name for name in sys.modules if name.split('.')[1:2] and "
        "name.startswith('jaxpfl.') and name.split('.')[1] in parts];"
        "sys.exit(str(loaded) if loaded else code)"
    )
    expected = jp.load(folder).predict(table)
    outs = [str(tmp_path / f"out.{ending}") for ending in ("csv", "jsonl", "parquet")]
    command = ["predict", str(folder), str(table), *outs]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert parquet.read_table(tmp_path / "out.parquet").equals(expected)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == expected["label"].to_pylist()
    assert (tmp_path / "out.csv").read_text().count("\n") == 3


def test_rows_that_do_not_fit_are_named(folder, tmp_path, capsys):
    def sentence(content: str, *more: str) -> str:
        path = tmp_path / "bad.csv"
        path.write_text(content)
        assert main(["predict", str(folder), str(path), *more]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        return error

    assert "bad.csv: there is no field 'b'" in sentence("a,c\n1,2\n")
    missing = sentence("a,b\n1,2\n1,nan\n")
    assert "bad.csv, row 3: field 'b' must be" in missing and "NaN" in missing
    assert "bad.csv, row 3: field 'a' must be" in sentence("a,b\n1,2\nsecret,2\n")
    assert "secret" not in sentence("a,b\n1,2\nsecret,2\n")
    assert "--out must be a new file" in sentence("a,b\n1,2\n", "--out", str(tmp_path / "x.txt"))
    model = jp.load(folder)
    refusal(lambda: model.predict([[1.0, 2.0], [np.inf, 2.0]]), "rows, row 2: features must be")
    refusal(lambda: model.predict([[1.0, 2.0, 3.0]]), "rows: 'features' of shape [2] has [3]")
    refusal(lambda: model.predict(["a text"]), "rows: the model reads features, found texts")


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_next_words_are_the_most_probable_ones(kind, tmp_path):
    """Each text alone, without padding, gives the same words."""
    if kind == "words":
        words = Vocabulary.from_texts(["a b c d e f g h"], 12, source="public")
        model = models.CIFGLanguageModel(12, embedding=4, hidden=5, projection=4)
        names, first, start = words.tokens, 4, 1
        texts, ids = ["a b", "h", "c d e f a"], [[4, 5], [11], [6, 7, 8, 9, 4]]
    else:
        words, model = CHARACTERS, LSTMLanguageModel(hidden=4, layers=1)
        names, first, start = ["", *characters.CHARACTERS], 1, characters.BOS
        texts = ["a", "lot of text", ""]
        ids = [[names.index(c) for c in text] for text in texts]
    params = drawn(model, 0)
    Trained(model, params, words).save(tmp_path / "model")
    predicted = jp.load(tmp_path / "model").predict(texts).to_pylist()
    logits_of = jax.jit(model.logits)
    for row, own in zip(predicted, ids, strict=True):
        logits = np.float64(logits_of(params, np.array([[start, *own]], np.int32))[0, -1])
        probabilities = np.exp(logits) / np.exp(logits).sum()
        best = first + np.argsort(-probabilities[first : len(names)])[:5]
        assert [row[f"word_{place}"] for place in range(1, 6)] == [names[i] for i in best]
        of_row = [row[f"probability_{place}"] for place in range(1, 6)]
        np.testing.assert_allclose(of_row, probabilities[best], rtol=1e-4)


def test_a_word_out_of_the_vocabulary_is_said(tmp_path):
    words = Vocabulary.from_texts(["a b c"], 8, source="public")
    model = models.CIFGLanguageModel(8, embedding=4, hidden=5, projection=4)
    fields = {"text": ["message"]}
    Trained(model, drawn(model, 0), words, fields).save(tmp_path / "model")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"message": "a b"}\n{"message": "a zebra"}\n')
    with pytest.warns(UserWarning, match=r"rows\.jsonl, row 2: field 'message'") as caught:
        assert len(jp.load(tmp_path / "model").predict(path)) == 2
    assert "zebra" not in str(caught[0].message)


def test_a_decoder_continues_texts(tmp_path):
    pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")
    write_decoder(tmp_path, "llama")
    write_tokeniser(tmp_path)
    model = jp.load(tmp_path)
    together = model.predict(["kab", "lad min"])["continuation"].to_pylist()
    alone = [model.predict([text])["continuation"][0].as_py() for text in ("kab", "lad min")]
    assert together == alone


def test_columns_with_names_are_refused_in_python(folder):
    """Their order need not be the features'."""
    rows = {"b": [0.25], "a": [-1.5]}
    refusal(lambda: jp.load(folder).predict(rows), "a, b, in this order")
    refusal(lambda: jp.load(folder).predict(np.zeros((0, 2), np.float32)), "no rows")


def test_a_class_of_ones_own_with_a_name_of_ours_is_not_ours(tmp_path):
    class MLP(models.MLP):
        def logits(self, params, x):
            return -super().logits(params, x)

    model = MLP(features=2, classes=3, hidden=4)
    Trained(model, drawn(model, 1)).save(tmp_path / "model")
    refusal(lambda: jp.load(tmp_path / "model"), "own")
    rows = np.ones((2, 2), np.float32)
    loaded = jp.load(tmp_path / "model", own=model)
    assert np.array_equal(
        loaded.log_probabilities(rows), Trained(model, loaded.params).log_probabilities(rows)
    )


def test_pixels_of_any_whole_numbers_are_the_same(tmp_path):
    model = models.CNN("cnn", (8, 8, 1), 2, ((4, True),), 4)
    trained = Trained(model, drawn(model, 0))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1))
    expected = trained.predict(pixels.astype(np.uint8))
    assert trained.predict(pixels).equals(expected)
    refusal(lambda: trained.predict(pixels + 1000), "255")


def test_images_and_several_labels(tmp_path):
    model = models.MultiLabelResNet((9, 9, 3), 2, crop=8, width=2, stages=(1,), groups=1)
    params = drawn(model, 0)
    Trained(model, params, fields={"classes": ["car", "tree"]}).save(tmp_path / "model")
    images = np.random.default_rng(0).integers(0, 256, (3, 9, 9, 3), np.uint8)
    np.savez(tmp_path / "rows.npz", images=images)
    predicted = jp.load(tmp_path / "model").predict(tmp_path / "rows.npz").to_pylist()
    expected = 1 / (1 + np.exp(-np.float64(jax.jit(model.logits)(params, images))))
    for row, scores in zip(predicted, expected, strict=True):
        np.testing.assert_allclose([row["probability_car"], row["probability_tree"]], scores, 1e-4)
        chosen = [name for name, score in zip(("car", "tree"), scores, strict=True) if score > 0.5]
        assert row["labels"] == ", ".join(chosen)


def test_a_damaged_or_a_foreign_folder_is_refused(folder, tmp_path):
    refusal(lambda: jp.load(tmp_path), "there is no file config.json")
    (tmp_path / "run.json").write_text("{}")
    refusal(lambda: jp.load(tmp_path), "holds a run: `jaxpfl export")
    for name, content in (
        ("fields.json", b'{"features": "a"}'),
        ("fields.json", b'{"classes": ["cat", "cat"]}'),
        ("model.safetensors", (folder / "model.safetensors").read_bytes()[:-8]),
        ("config.json", b"[" * 100_000),
    ):
        copy = tmp_path / f"{name} {len(content)}"
        copy.mkdir()
        for path in folder.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        (copy / name).write_bytes(content)
        refusal(lambda copy=copy: jp.load(copy), name)


def test_pytorch_computes_the_same_from_the_exported_weights(folder):
    """The example of docs/own_data.md."""
    torch = pytest.importorskip("torch", reason="needs PyTorch, which no extra of jaxpfl brings")
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    x = torch.tensor([[-1.5, 0.25], [20000.0, 3.0]]).asinh()
    for place in range(len(weights) // 2):
        x = x.relu() if place else x
        x = x @ weights[f"layer_{place}.kernel"] + weights[f"layer_{place}.bias"]
    ours = jp.load(folder).log_probabilities([[-1.5, 0.25], [20000, 3]])
    np.testing.assert_allclose(x.log_softmax(1).numpy(), ours, rtol=1e-5, atol=1e-6)
