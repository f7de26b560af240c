"""A trained model in a folder of `jaxpfl export`, and what it predicts for rows of a table.

    model = jaxpfl.load("exported")
    table = model.predict("new.csv")                      # a pyarrow.Table, a row for each row
    table = model.predict([[0.5, 1.2], [0.1, 3.0]])       # features
    logs = model.log_probabilities([[0.5, 1.2]])          # float32 [rows, classes]

Besides weights, settings (`models.checkpoints`) and words, a folder has fields.json: which fields
of a table are the model's "text" or "features", its "label", and its "classes", names of the labels
0, 1, ... where there are some; "tokens" where token ids are of no file: ["characters"].

Nothing of algorithms, federated or experiments is imported, and no file is executed.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from jaxpfl import data, files
from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.models.base import PAD, Classifier, Model, Params
from jaxpfl.models.checkpoints import folders
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.gan import GAN
from jaxpfl.models.recurrent import RecurrentModel
from jaxpfl.models.resnet import MultiLabelResNet
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers import characters, fast, vocabulary
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

FIELDS, VOCABULARY = "fields.json", "vocabulary.json"
CHARACTERS = "characters"
"""What "tokens" in fields.json says of a model of `text.tokenisers.characters`."""

_BLOCK = 64  # rows that are computed together
_READ = 256  # tokens at the end of a text that a recurrent model reads
_LOGITS = 2**24  # that are in memory at a time
_WORDS = 5
_CONTINUED = Decoding(max_new_tokens=32, temperature=0.0)


@dataclass(frozen=True)
class Trained:
    """A trained model, see `load`.

    Attributes:
      words: of its token ids: a `Vocabulary`, a tokeniser, `CHARACTERS`; None where there are none.
      fields: what fields.json holds.
    """

    model: Any
    params: Params = field(repr=False)
    words: Any = field(default=None, repr=False)
    fields: Mapping[str, list[str]] = field(default_factory=dict)

    def predict(self, rows: Any) -> pa.Table:
        """A row of predictions for each row, with its number in the table, from 1.

        Of a classifier the "label" and the "probability_..." of each; with several labels in an
        example, those above 0.5 are the "labels". Of a recurrent language model the five most
        probable next words, "word_1" and "probability_1" first; it reads the last 256 words of a
        text. Of any other decoder a "continuation" by at most 32 tokens, the most probable ones.

        Args:
          rows: a table, as `data.open` takes it, with options that name other fields than the
            model was trained on; or texts; or an array of features or images, [rows, ...].

        Raises:
          InputError: the model predicts no rows, or a row does not fit; it says which.
        """
        where, numbers, inputs = self._read(rows)
        if isinstance(self.model, Classifier):
            predicted = self._labels(np.exp(self.log_probabilities(inputs)))
        elif isinstance(self.model, Decoder):
            writer = LanguageModel(self.model, self.params, self.words).without_chat()
            with named(where):
                written = writer.write(inputs, jax.random.key(0), decoding=_CONTINUED).texts
            predicted = {"continuation": [texts[0] for texts in written]}
        else:
            predicted = self._next_words(where, numbers, inputs)
        return pa.table({"row": pa.array(numbers, pa.int64()), **predicted})

    def predict_by_client(self, table: str | Path, own: Callable[[str], Params]) -> pa.Table:
        """What `predict` says for each client's rows of a table, by its own parameters. PRIVATE.

        Rows have their "client", and as "row" their number among the rows read of it, from 1.

        Args:
          own: the parameters of the client with this id.
        """
        rows = data.open(table, rows=self.fields)
        name, parts = self._column(rows), []
        for index, client in enumerate(rows.client_ids.to_pylist()):
            if len(inputs := rows.examples(index)[name]):
                part = dataclasses.replace(self, params=own(client)).predict(inputs)
                clients = pa.array([client] * len(part), pa.string())
                parts.append(part.add_column(0, "client", clients))
        return pa.concat_tables(parts)

    def log_probabilities(self, inputs: Any) -> np.ndarray:
        """Natural logs, float32: of classes [rows, classes], of next token ids [texts, ids]."""
        if isinstance(self.model, Classifier):
            return self._computed(_of_classes, inputs, _BLOCK)
        if not isinstance(self.model, RecurrentModel) or self.words is None:
            raise InputError("log_probabilities is for classifiers and for models of known words")
        ids = self._ids(inputs)
        # A power of two, so that texts of other lengths seldom need another program.
        length = 2 ** int(np.ceil(np.log2(max(map(len, ids), default=1))))
        tokens_BxL = np.full((len(ids), length), PAD, np.int32)
        for row_L, row in zip(tokens_BxL, ids, strict=True):
            row_L[: len(row)] = row

        most = max(1, min(_BLOCK, _LOGITS // (length * self.model.vocab_size)))
        return self._computed(_of_next_tokens, tokens_BxL, most)

    def save(self, folder: Path, *, base: str | None = None) -> None:
        """Writes what `load` reads; of a model with adapters these, and the name of their base."""
        folder.mkdir(parents=True, exist_ok=True)
        folders.save(folder, self.model, self.params, base=base)
        fields = {name: names for name, names in self.fields.items() if names}
        if isinstance(self.words, Vocabulary):
            # Where its text lay concerns this machine only.
            source = self.words.source.rstrip("/").rsplit("/", 1)[-1]
            dataclasses.replace(self.words, source=source).save(folder / VOCABULARY)
        elif self.words == CHARACTERS:
            fields["tokens"] = [CHARACTERS]
        elif self.words is not None:
            self.words.save(folder)
        if fields:
            files.write_json(folder / FIELDS, fields)

    def _computed(self, function: Any, inputs: np.ndarray, block: int) -> np.ndarray:
        """`function(model, params, inputs)` of all rows, a block of one shape at a time."""
        inputs = np.asarray(inputs)
        if not len(inputs):
            raise InputError("there are no rows to predict for")
        parts = []
        padding = [(0, -len(inputs) % block), *[(0, 0)] * (inputs.ndim - 1)]
        for part in np.split(np.pad(inputs, padding), range(block, len(inputs), block)):
            parts.append(np.asarray(function(self.model, self.params, part)))
        return np.concatenate(parts)[: len(inputs)]

    def _read(self, rows: Any) -> tuple[str, list[int], Any]:
        """What names the rows in messages, their numbers, and what the model reads of them."""
        name = self._input_name()
        if isinstance(rows, str | Path):
            population = data.open(rows, rows={**self.fields, "client": "*"})
            where, inputs = population.name, population.columns[self._column(population)]
            numbers = list(range(1, population.num_examples + 1))
            if population.unit.endswith("row"):
                of_client = np.array(population.client_ids.to_pylist(), np.int64)
                numbers = np.repeat(of_client, population.sizes()).tolist()
        else:
            if isinstance(rows, Mapping) or hasattr(rows, "columns") or hasattr(rows, "schema"):
                # Their order need not be that of the features.
                named_columns = ", ".join(self.fields.get("features", [])) or name
                expected = "expected an array, texts or the path of a table, found named columns"
                raise InputError(f"rows: {expected}: give {named_columns}, in this order")
            where, inputs = "rows", data.columns.as_column("rows", rows)
            numbers = list(range(1, len(inputs) + 1))
        if name == "text":
            if not isinstance(inputs, pa.Array):
                raise InputError(f"{where}: the model reads texts, found {inputs.dtype}")
            return where, numbers, inputs.to_pylist()
        if isinstance(inputs, pa.Array):
            raise InputError(f"{where}: the model reads {name}, numbers, found texts")
        inputs = np.asarray(inputs)
        if name == "image" and inputs.dtype.kind in "iu":
            if ((inputs < 0) | (inputs > 255)).any():
                raise InputError(f"{where}: pixels must be whole numbers from 0 to 255")
            inputs = inputs.astype(np.uint8)  # Models scale this type alone.
        with named(where):
            self.model.check_inputs({name: inputs})
        if data.columns.not_finite(inputs):
            finite = np.isfinite(inputs.astype(np.float32).reshape(len(inputs), -1)).all(1)
            row = numbers[int(np.argmin(finite))]
            raise InputError(f"{where}, row {row}: {name} must be finite numbers, found others")
        return where, numbers, inputs

    def _column(self, table: data.Population) -> str:
        """The column of a table that the model reads."""
        if (name := self._input_name()) in table.columns:
            return name
        columns = ", ".join(table.columns)
        raise InputError(f"{table.name}: the model reads {name!r}, found {columns}")

    def _input_name(self) -> str:
        """The column that the model reads; refuses a model that predicts nothing for rows."""
        model, kind = self.model, type(self.model).__name__
        if isinstance(model, GAN):
            how = "jaxpfl.models.sample_images(model.model, model.params, KEY, NUMBER)"
            raise InputError(f"a GAN predicts nothing for rows: it draws images, by {how}")
        if isinstance(model, Classifier):
            return model.columns[0]
        if isinstance(model, Decoder | RecurrentModel):
            if self.words is not None:
                return "text"
            raise InputError("the folder does not say which words the model's token ids are of")
        raise InputError(f"a {kind} predicts nothing for rows: call its functions with its params")

    def _labels(self, probabilities_BxC: np.ndarray) -> dict[str, Any]:
        named_classes, classes = self.fields.get("classes", []), self.model.classes
        names = [*named_classes, *map(str, range(len(named_classes), classes))][:classes]
        if isinstance(self.model, MultiLabelResNet):
            chosen = [np.flatnonzero(row > 0.5) for row in probabilities_BxC]
            labels: Any = {"labels": [", ".join(names[index] for index in row) for row in chosen]}
        else:
            labels_B = np.argmax(probabilities_BxC, 1)
            # Labels without names are numbers, as in the table that the model was trained on.
            labels = {"label": [names[i] for i in labels_B] if named_classes else labels_B}
        columns = zip(names, probabilities_BxC.T, strict=True)
        return labels | {f"probability_{name}": column for name, column in columns}

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids that a recurrent model reads of texts: the beginning, and the end of each."""
        if isinstance(self.words, Vocabulary):
            words, start = self.words, vocabulary.BOS
            ids = [[words.ids.get(w, vocabulary.OOV) for w in words.split(text)] for text in texts]
        else:
            start, ids = characters.BOS, [characters.ids_of(text) for text in texts]
        return [np.array([start, *row[-_READ:]], np.int32) for row in ids]

    def _next_words(self, where: str, numbers: list[int], texts: Sequence[str]) -> dict[str, Any]:
        is_words = isinstance(self.words, Vocabulary)
        oov = vocabulary.OOV if is_words else characters.OOV
        rows = zip(numbers, self._ids(texts), strict=True)
        if unknown := [number for number, ids in rows if oov in ids]:
            fields = ",".join(self.fields.get("text", ["text"]))
            words = "words that the model does not know, and other rows may: it reads each as one"
            message = f"{where}, row {unknown[0]}: field {fields!r} has {words} unknown word"
            warnings.warn(message, stacklevel=3)
        names: Any = self.words.tokens if is_words else ["", *characters.CHARACTERS]
        first, predicted = oov + 1 if is_words else 1, dict[str, Any]()
        some_BxV = self.log_probabilities(texts)[:, first : len(names)]
        best_BxK = np.argsort(-some_BxV, axis=1, kind="stable")[:, :_WORDS]
        for place, best_B in enumerate(best_BxK.T, 1):
            predicted[f"word_{place}"] = [names[first + index] for index in best_B]
            predicted[f"probability_{place}"] = np.exp(some_BxV[np.arange(len(best_B)), best_B])
        return predicted


# The models of one architecture share a program, such as clients' own.
@partial(jax.jit, static_argnums=0)
def _of_classes(model: Any, params: Params, inputs: jax.Array) -> jax.Array:
    of = jax.nn.log_sigmoid if isinstance(model, MultiLabelResNet) else jax.nn.log_softmax
    return of(model.logits(params, inputs))


@partial(jax.jit, static_argnums=0)
def _of_next_tokens(model: Any, params: Params, tokens_BxL: jax.Array) -> jax.Array:
    logits_BxLxV = model.logits(params, tokens_BxL)
    places_B = jnp.maximum(jnp.sum(tokens_BxL != PAD, 1, dtype=jnp.int32) - 1, 0)
    logits_BxV = jnp.take_along_axis(logits_BxLxV, places_B[:, None, None], 1)[:, 0]
    return jax.nn.log_softmax(logits_BxV)


def load(folder: str | Path, own: Model | None = None) -> Trained:
    """The trained model in a folder that `jaxpfl export` wrote.

    Args:
      own: the model of `models.from_functions` or `from_flax` whose parameters these are: its
        functions are in no file. None for any other.

    Raises:
      InputError: a file is missing, or the files do not fit each other.
      CorruptFile: a file is damaged.
    """
    folder = files.user_path(folder)
    if (folder / "run.json").exists() or (folder / "config.yaml").exists():
        raise InputError(f"{folder}: holds a run: `jaxpfl export {folder} FOLDER` writes its model")
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if inner and not any(folder.glob("*config.json")):
        names = ", ".join(str(folder / name) for name in inner)
        raise InputError(f"{folder}: holds several models, name one of them: {names}")
    model, params = folders.load(folder, own)
    path = folder / FIELDS
    fields = files.read_record(path) if path.exists() else {}
    for names in fields.values():
        texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not texts or len(set(names)) != len(names):
            raise CorruptFile(f"{path}: expected lists of different names")
    words: Any = CHARACTERS if fields.get("tokens") == [CHARACTERS] else None
    if (folder / VOCABULARY).exists():
        words = Vocabulary.load(folder / VOCABULARY)
        if len(words) > model.vocab_size:
            size = f"{len(words)} words, more than the model's {model.vocab_size}"
            raise InputError(f"{folder / VOCABULARY}: has {size}")
    elif isinstance(model, Decoder) and (folder / "tokenizer.json").exists():
        words = fast.hugging_face(folder)
    return Trained(model, params, words, fields)
