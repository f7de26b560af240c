"""The tokeniser and the small decoders that are learned from public corpora, in a cache.

    CACHE/tokeniser-HASH/    the tokeniser
    CACHE/NAME-HASH/         a pretrained decoder, and the losses of its pretraining
    CACHE/training/          checkpoints of the pretraining
    CACHE/*.lock             held by the process that makes a model; others wait for it

HASH covers the texts of the corpora and every setting: all studies with the same ones share a
model. Cached files are verified whenever they are read, see `records.artifacts`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl import files
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.adamw import DecoderModelConfig
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.federated.mesh import grid
from jaxpfl.models.base import PAD, initialised
from jaxpfl.models.checkpoints.model_files import require
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.columns import text_column
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers.base import packed
from jaxpfl.text.tokenisers.fast import FastTokeniser

_END_OF_TEXT = "<|endoftext|>"
# Rows of a corpus that no decoder is trained on, by which the best step of its training is chosen.
_VALID_ROWS = 400


@dataclass(frozen=True)
class PublicModels:
    """Public corpora, and the tokeniser and decoders that are learned from them.

    `sources` are by name. Of each corpus `limit` texts are used: the beginning of every document,
    with the same share of each. `seed` is of initial parameters and the order of examples.
    """

    sources: Mapping[str, str]
    limit: int
    vocab_size: int
    cache: Path
    seed: int = 0
    progress: bool = field(default=False, compare=False)

    @cached_property
    def corpora(self) -> dict[str, Population]:
        corpora = {name: open_population(source) for name, source in self.sources.items()}
        for corpus in corpora.values():
            text_column(corpus)
        return corpora

    def documents(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """The texts of the named corpora, or of all, grouped by document: a client of a corpus."""
        documents = []
        for name in names or self.sources:
            population = self.corpora[name]
            column, offsets = population.columns["text"], population.offsets
            share = min(1.0, self.limit / max(1, int(offsets[-1])))
            # The number of texts taken up to each document's end; at the last, about the limit.
            taken = np.round(offsets * share).astype(np.int64)
            for start, used in zip(offsets[:-1], np.diff(taken), strict=True):
                texts = column.slice(int(start), int(used)).to_pylist()
                documents.append(list(filter(None, (" ".join(text.split()) for text in texts))))
        return [document for document in documents if document]

    @cached_property
    def tokeniser(self) -> FastTokeniser:
        """The byte-level BPE that is learned from all corpora."""
        name = f"tokeniser-{self._hash(tuple(self.sources), {})}"
        text = self._cached(name, self._learned).record["tokenizer"]
        tokenizer = require("tokenizers", "text").Tokenizer.from_str(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return FastTokeniser(tokenizer, name=f"tokeniser {digest[:12]}", end_of_text=0, ends=(0,))

    def _learned(self) -> Artifact:
        """The tokenizer.json of a byte-level BPE of all texts, whose token 0 is end-of-text."""
        tokenizer = require("tokenizers", "text").ByteLevelBPETokenizer()
        texts, shown = chain.from_iterable(self.documents()), {"show_progress": False}
        special = [_END_OF_TEXT]
        tokenizer.train_from_iterator(texts, self.vocab_size, 0, special_tokens=special, **shown)
        learned = tokenizer.get_vocab_size()
        if learned != self.vocab_size:
            most = f"{learned}, as many as can be learned from the corpora"
            raise InputError(f"vocab_size must be at most {most}, found {self.vocab_size}")
        return Artifact({"tokenizer": tokenizer.to_str()})

    def decoder(self, name: str, settings: DecoderModelConfig, positions: int) -> LanguageModel:
        """The decoder of these settings for `positions` tokens; pretrained if it is not cached."""
        names = settings.corpora or tuple(self.sources)
        identity = {**asdict(settings), "positions": positions, "seed": self.seed}
        stored_as = f"{name}-{self._hash(names, identity)}"
        model = Decoder(settings.network(self.vocab_size, positions))
        folder = self.cache / "training" / stored_as
        stored = self._cached(stored_as, partial(self._pretrained, model, settings, names, folder))
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
        params = jax.device_put(tree_of(stored.arrays, shapes, f"{self.cache / stored_as}"))
        return LanguageModel(model, params, self.tokeniser, mesh=data_mesh())

    def _pretrained(
        self, model: Decoder, settings: DecoderModelConfig, names: Sequence[str], folder: Path
    ) -> Artifact:
        documents = self.documents(names)
        rng = np.random.Generator(np.random.Philox(key=self.seed))
        joined = ["\n".join(documents[i]) for i in rng.permutation(len(documents))]
        rows = packed(self.tokeniser.encode(joined), settings.sequence_length, 0)
        rows = rows[rng.permutation(len(rows))]
        held_out = min(_VALID_ROWS, len(rows) // 10)
        if not held_out:
            least = f"{len(rows)} rows of {settings.sequence_length} tokens, expected at least 10"
            few = f"the corpora {', '.join(names)} are too small to pretrain on"
            raise InputError(f"{few}: they fill {least}")
        start, train = initialised(model, jax.random.key(self.seed)), {"tokens": rows[held_out:]}
        how: Any = {"mesh": data_mesh(settings.pretraining.batch_size), "folder": folder}
        how |= {"seed": self.seed, "progress": self.progress, "valid": {"tokens": rows[:held_out]}}
        fitted = fit(model, start, train, settings.pretraining, **how)
        record = {**fitted.record, "corpora": list(names), "tokens": int(np.sum(rows != PAD))}
        return Artifact(record, tree_arrays(fitted.params))

    def _cached(self, name: str, compute: Callable[[], Artifact]) -> Artifact:
        """The artifact of this name, which one process makes while others wait for it."""
        # A name says what a model follows from, so that all studies share the model.
        store = Artifacts(self.cache, run="public models")
        if (stored := store.find(name)) is not None:
            return stored
        self.cache.mkdir(parents=True, exist_ok=True)
        with files.lock(self.cache / f"{name}.lock", wait=True):
            return store.load_or_compute(name, compute)

    @cached_property
    def _texts_hashes(self) -> dict[str, str]:
        hashes = {}
        for name in self.sources:
            # No text holds a newline.
            ended = ("\n".join(document) + "\n\n" for document in self.documents([name]))
            hashes[name] = hashlib.sha256("".join(ended).encode()).hexdigest()
        return hashes

    def _hash(self, names: Sequence[str], settings: Mapping[str, Any]) -> str:
        """A hash of the settings, the names, and all corpora: the tokeniser reads every one."""
        identity = [list(names), self._texts_hashes, self.vocab_size, dict(settings)]
        text = json.dumps(files.jsonable(identity), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def data_mesh(batch: int | None = None, model: int = 1) -> Mesh | None:
    """A mesh of this process's devices with the axis "data".

    Where `model` devices share a copy of the model, they are its second axis; otherwise it is None
    for one device, and where the number of devices does not divide `batch`.
    """
    devices = jax.local_devices()
    if model == 1 and (len(devices) == 1 or (batch is not None and batch % len(devices))):
        return None
    return grid(devices, "data", model)
