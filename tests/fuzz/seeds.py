"""Small valid files of every kind that is read, and the hashes that make damaged ones fit again.

Each function writes its file, or all files of its kind, to an empty folder. What `sign_...` does,
whoever made a file can do, too: a hash shows that it is as it was written, not that it is sound.
"""

import contextlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl import files
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.engine.run_directory import saved_secret
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.models import MLP, LSTMLanguageModel
from jaxpfl.models.checkpoints import folders
from jaxpfl.privacy.chain import Chain
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from jaxpfl.trained import Trained
from tests.data import populations
from tests.data.populations import sign, small
from tests.data.tff_files import example, write_file
from tests.federated.cohorts import plan
from tests.published_models import in_shards, write_adapters, write_decoder, write_tokeniser
from tests.text.masked_models import TINY_BERT
from tests.trees import drawn

# Of a manifest that no hash makes fit again.
_ERRORS = (ValueError, TypeError, AttributeError, RecursionError, LookupError, OSError)


def population(folder: Path) -> None:
    small().save(folder / "saved")


def sign_files(folder: Path) -> None:
    """A manifest of artifacts or of a checkpoint, with its files as they are."""
    (path,) = [*folder.glob("artifacts/one/manifest.json"), *folder.glob("round_*/manifest.json")]
    with contextlib.suppress(*_ERRORS):
        manifest = json.loads(path.read_bytes())
        for name, described in manifest["files"].items():
            held = path.parent / name
            described |= {"bytes": held.stat().st_size, "sha256": files.sha256_file(held)}
        sign(path.parent, **manifest)


def sign_manifest(folder: Path) -> None:
    with contextlib.suppress(*_ERRORS):
        sign(folder / "saved")


def sign_buffers(folder: Path) -> None:
    with contextlib.suppress(*_ERRORS):
        populations.sign_buffers(folder / "saved")


def run(folder: Path) -> None:
    record = {"run": "a 1", "private": True, "stamp": "", "note": "", "statement": "", "config": {}}
    record |= {"plan": plan(rounds=2).to_dict(), "ledger_head": "0" * 64, "evaluation": None}
    record |= {"seed": 0, "label": "a", "origin": "0" * 64}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "result.json").write_text(json.dumps({"rounds": 2, "stopped": False, "epsilons": {}}))
    (folder / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1, "loss": 0.5}\n')


def secret(path: Path) -> None:
    saved_secret(path, reproducible_seed=3, purpose="a")


def ledger(folder: Path) -> None:
    with Ledger(folder / "ledger.jsonl", small()) as ledger:
        event = plan(rounds=2).event(1)
        ledger.charge(event, "a", run="r", round=1, identity="i")
        ledger.record("i", "hash")
        ledger.charge(event, "a", run="r", round=2, identity="j")


def fields(folder: Path) -> None:
    """The lines of a ledger without their hashes."""
    ledger(folder)
    lines = Chain.read(folder / "ledger.jsonl").lines
    (folder / "fields.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def sign_fields(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    path.unlink(missing_ok=True)
    with (
        contextlib.closing(Chain(path)) as chain,
        contextlib.suppress(ValueError, RecursionError, OSError),
    ):
        for line in (folder / "fields.jsonl").read_bytes().splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                chain.append(record)


def artifacts(folder: Path) -> Artifacts:
    return Artifacts(folder / "artifacts", run="r")


def artifact(folder: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "t": np.array(["x", "yz"])}
    artifacts(folder).save("one", Artifact({"b": [1, 2]}, arrays))


def moments(folder: Path) -> None:
    arrays = {"count": np.float64(5), "mean": np.ones(2), "covariance": np.eye(2)}
    (folder / "moments.npz").write_bytes(files.npz({**arrays, "noise": np.ones(5)}))


def quickstart(path: Path) -> None:
    path.write_bytes(shipped.find("quickstart").read_bytes())


def sweep(folder: Path) -> None:
    quickstart(folder / "base.yaml")
    (folder / "sweep.yaml").write_text(
        "base: base.yaml\nmetric: loss\ngrid:\n  training.rounds: [1, 2]\n  run.seed: [0, 1]\n"
    )


def word_pieces(folder: Path) -> None:
    shutil.copy(TINY_BERT / "tokenizer.json", folder)


def sentence_pieces(folder: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0), ("n", -2.5), ("\u2581a", -3.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))


def chat(folder: Path) -> None:
    write_tokeniser(folder, 280, start=True, chat=True)


def vocabulary(path: Path) -> None:
    Vocabulary.from_texts(["a b a", "c"], 6, source="x").save(path)


def own(folder: Path) -> None:
    model = LSTMLanguageModel(3, 2, 2, 1)
    folders.save(folder / "model", model, drawn(model, 0))


def adapters(folder: Path) -> None:
    write_adapters(folder / "adapters", write_decoder(folder / "base", "llama"))


def sharded(folder: Path) -> None:
    in_shards(write_decoder(folder / "model", "gpt2"))


def sentences(folder: Path) -> None:
    shutil.copytree(TINY_BERT, folder, dirs_exist_ok=True)


ROWS = [
    {"client": "a", "text": "one \u00e9", "label": 1, "score": 0.5},
    {"client": "b", "text": "two", "label": 2, "score": -1.5},
    {"client": "a", "text": "", "label": 3, "score": 2.0},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'client,text,label,score\na,"one, \u00e9",1,0.5\nb,two,2,-1.5\na,,3,2.0'


def packed(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), path)


def arrays(path: Path) -> None:
    columns = {"images": np.zeros((3, 2, 2), np.uint8), "labels": np.arange(3)}
    np.savez_compressed(path, **columns, client=np.array(["a", "b", "a"]))


def checkpoint(folder: Path) -> None:
    with Checkpoints(folder, run="r") as checkpoints:
        checkpoints.save(1, CHECKPOINT, ledger_head="0" * 64)


CHECKPOINT = {"w": jnp.ones((2, 3), jnp.float32), "round": jnp.int32(1)}


def archive(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"a.txt": b"one\n\ntwo", "b.txt": b"three"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def sqlite(path: Path) -> None:
    path.unlink(missing_ok=True)
    messages = {
        client: [example({"snippets": f"{client} {number}".encode()}) for number in range(2)]
        for client in ("a", "b")
    }
    write_file(path, messages)


def trained(folder: Path) -> None:
    """A classifier of two features, as an export has it."""
    model = MLP(features=2, classes=2, hidden=3)
    fields = {"features": ["a", "b"], "classes": ["cat", "dog"]}
    Trained(model, drawn(model, 0), fields=fields).save(folder)
