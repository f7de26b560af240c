"""Small populations that several tests use."""

import hashlib
import json
from pathlib import Path

import numpy as np

from jaxpfl import files
from jaxpfl.data import Population, from_clients
from jaxpfl.data.mapped import BlockHashes

SECRET = "rosebud"


def small(clients: int = 4) -> Population:
    """Client k holds k examples, of every kind of column."""
    return from_clients(
        {
            f"{SECRET} {k}": {
                "image": np.full((k, 2, 3, 1), k, np.float32),
                "label": np.arange(k, dtype=np.int32),
                "flag": np.arange(k) % 2 == 0,
                "text": [f"{SECRET} {k}.{j}" for j in range(k)],
            }
            for k in range(1, clients + 1)
        },
        name="small",
        unit="person",
    )


def same(a: Population, b: Population) -> None:
    assert list(a.columns) == list(b.columns)
    for name, column in a.columns.items():
        if isinstance(column, np.ndarray):
            np.testing.assert_array_equal(column, b.columns[name], strict=True)
        else:
            assert column.equals(b.columns[name])
    np.testing.assert_array_equal(a.offsets, b.offsets, strict=True)
    assert a.client_ids.equals(b.client_ids)
    assert (a.name, a.unit) == (b.name, b.unit)
    assert (a.fingerprint, a.content) == (b.fingerprint, b.content)


def sign(folder: Path, **changed) -> None:
    """Writes a manifest with these fields, and with the hash that fits it, as anybody can."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes()) | changed
    manifest.pop("sha256", None)
    text = json.dumps(manifest, sort_keys=True)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(files.json_text({**manifest, "sha256": sha256}))


def sign_buffers(folder: Path) -> None:
    """Writes the manifest that fits the buffers as they are, with their sizes and hashes."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    held = {name: manifest[name] for name in ("offsets", "client_ids")}
    held |= {str(n): each["buffers"] for n, each in enumerate(manifest["columns"].values())}
    for stem, buffers in held.items():
        for path, each in zip(sorted(folder.glob(f"{stem}.*")), buffers, strict=True):
            hashes = BlockHashes()
            hashes.update(path.read_bytes())
            each |= {"bytes": hashes.size, "blocks": b"".join(hashes.sums).hex()}
    sign(folder, **manifest)
