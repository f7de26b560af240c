"""Tokeniser and small decoders learned from public corpora, kept by what they follow from.

    CACHE/tokeniser-HASH/tokenizer.json
    CACHE/NAME-HASH/config.json, model.safetensors, record.json, training/

HASH covers the texts of the corpora and every setting, so that another corpus, size or number of
epochs is another model, and the same is found again, by any study. Pretraining that was stopped
goes on where it was.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpfl import files
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.decoder_model import DecoderModelConfig
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.engine.public_check import PrivateContent
from jaxpfl.experiments.engine.tracking import jsonable
from jaxpfl.models.base import PAD
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers.base import packed
from jaxpfl.text.tokenisers.fast import FastTokeniser

END_OF_TEXT = "<|endoftext|>"
_VALID = 400


@dataclass(frozen=True)
class PublicModels:
    """Public corpora, and what is learned from them.

    Attributes:
      sources: name -> public source.
      limit: texts of a corpus that are used, of each document the same share, from its start.
      vocab_size: of the tokeniser.
      cache: folder.
      seed: of starts and orders.
      progress: show bars on stderr.
    """

    sources: Mapping[str, str]
    limit: int
    vocab_size: int
    cache: Path
    seed: int = 0
    progress: bool = field(default=False, compare=False)

    @cached_property
    def corpora(self) -> dict[str, Population]:
        """Raises InputError: a source cannot be read, or has no texts."""
        found = {}
        for name, source in self.sources.items():
            population = open_population(source)
            if "text" not in population.columns:
                raise InputError(f"corpora.{name} needs a column 'text': {source!r} has none")
            found[name] = population
        return found

    def refuse_private(self, clients: Population) -> None:
        """Refuses corpora that hold these private clients' data; see `public_check`."""
        private = PrivateContent(clients)
        for name, corpus in self.corpora.items():
            private.refuse(corpus, f"corpora.{name} = {self.sources[name]!r}")

    def documents(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """The texts of some corpora (default: all), by document, as a corpus's clients are."""
        documents = []
        for name in names or tuple(self.sources):
            population = self.corpora[name]
            column, offsets = population.columns["text"], population.offsets
            share = min(1.0, self.limit / max(1, int(offsets[-1])))
            # So many are taken by the end of each document: in the end the limit, to rounding.
            taken = np.round(offsets * share).astype(np.int64)
            for start, used in zip(offsets[:-1], np.diff(taken), strict=True):
                texts = column.slice(int(start), int(used)).to_pylist()
                document = [" ".join(text.split()) for text in texts]
                documents.append([text for text in document if text])
        return [document for document in documents if document]

    def texts(self, names: Sequence[str] | None = None) -> list[str]:
        return [text for document in self.documents(names) for text in document]

    @cached_property
    def tokeniser(self) -> FastTokeniser:
        """A byte-level BPE learned from all corpora, made once."""
        folder = self.cache / f"tokeniser-{self._hash(tuple(self.sources), {})}"
        path = folder / "tokenizer.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            files.write_atomically(path, _learned(self.texts(), self.vocab_size))
        library = pretrained.require("tokenizers", "text")
        tokenizer = library.Tokenizer.from_file(str(path))
        name = f"tokeniser {files.sha256_file(path)[:12]}"
        return FastTokeniser(tokenizer, name=name, end_of_text=0, ends=(0,))

    def decoder(self, name: str, settings: DecoderModelConfig, positions: int) -> LanguageModel:
        """The pretrained decoder of these settings: found in the cache, or made and put there.

        Args:
          name: part of the folder's name.
          positions: tokens of the longest sequence that it is to read.
        """
        names = settings.corpora or tuple(self.sources)
        described = {**asdict(settings), "positions": positions, "seed": self.seed}
        folder = self.cache / f"{name}-{self._hash(names, described)}"
        if not (folder / "record.json").exists():
            self._pretrain(folder, settings, names, positions)
        model, params = pretrained.load(folder)
        assert isinstance(model, Decoder)
        return LanguageModel(model, params, self.tokeniser, mesh=data_mesh())

    def _pretrain(
        self, folder: Path, settings: DecoderModelConfig, names: Sequence[str], positions: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = Decoder(settings.network(self.vocab_size, positions))
        documents = self.documents(names)
        rng = np.random.Generator(np.random.Philox(key=self.seed))
        joined = ["\n".join(documents[i]) for i in rng.permutation(len(documents))]
        rows = packed(self.tokeniser.encode(joined), settings.sequence_length, 0)
        rows = rows[rng.permutation(len(rows))]
        held_out = min(_VALID, len(rows) // 10)
        if not held_out:
            raise InputError(f"the corpora {', '.join(names)} are too small to pretrain on")
        found = fit(
            model,
            model.init(jax.random.key(self.seed)),
            {"tokens": rows[held_out:]},
            settings.pretraining,
            seed=self.seed,
            valid={"tokens": rows[:held_out]},
            mesh=data_mesh(settings.pretraining.batch_size),
            folder=folder / "training",
            progress=self.progress,
        )
        pretrained.save(folder, model, found.params)
        record = {**found.record, "corpora": list(names), "tokens": int(np.sum(rows != PAD))}
        files.write_atomically(folder / "record.json", json.dumps(jsonable(record)) + "\n")

    @cached_property
    def _texts_hashes(self) -> dict[str, str]:
        """SHA-256 of the texts that are used of each corpus, by document."""
        found = {}
        for name in self.sources:
            digest = hashlib.sha256()
            for document in self.documents([name]):
                # No text holds a newline.
                digest.update(("\n".join(document) + "\n\n").encode())
            found[name] = digest.hexdigest()
        return found

    def _hash(self, names: Sequence[str], settings: Mapping[str, Any]) -> str:
        """Of the named corpora and of those that the tokeniser is learned from, that is all."""
        described = [list(names), self._texts_hashes, self.vocab_size, dict(settings)]
        text = json.dumps(jsonable(described), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def data_mesh(batch: int | None = None) -> Mesh | None:
    """All devices along the axis "data"; None for one, or where they do not divide `batch`."""
    devices = jax.device_count()
    if devices == 1 or (batch is not None and batch % devices):
        return None
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def _learned(texts: Sequence[str], vocab_size: int) -> str:
    """A byte-level BPE with end-of-text as token 0, as the text of a tokenizer.json."""
    library = pretrained.require("tokenizers", "text")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise InputError(
            f"vocab_size must be at most {found}, what the corpora give, found {vocab_size}"
        )
    return tokenizer.to_str()
