"""Where the buffers of stored columns lie in an Arrow file, and how they are verified.

The manifest states these places and the SHA-256 of every block, so that a column is mapped without
reading anything of Arrow's own. What lies outside of the buffers (its header, schema, footer and
padding: a few kilobytes) has a hash of its own.
"""

import hashlib
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpfl.data.blocks import BLOCK, Blocks, block_hashes, root_of
from jaxpfl.data.columns import Column
from jaxpfl.data.mapped import Mapped, MappedText
from jaxpfl.data.sequences import Sequences
from jaxpfl.errors import CorruptFile, InputError

_PIECE = 2**22
_HEX = 64


def located(path: Path, types: Mapping[str, Any], examples: int) -> dict[str, list[dict]]:
    """For each column of an Arrow file of one batch, its buffers: place, size, and block hashes.

    Args:
      types: of the columns, as in the manifest.
    """
    if not examples:
        return {name: [] for name in types}
    places = {}
    with pa.memory_map(str(path)) as source:
        start = source.read_buffer().address
        source.seek(0)
        batch = pa.ipc.open_file(source).get_batch(0)
        for name in types:
            found = [each for each in batch[name].buffers() if each is not None]
            places[name] = [(each.address - start, each) for each in found]
        sizes = {name: _sizes(type_, examples, places[name][0][1]) for name, type_ in types.items()}
        firsts = {name: [first for first, _ in found] for name, found in places.items()}
        del places, batch
    buffers: dict[str, list[dict]] = {}
    for name, found in firsts.items():
        buffers[name] = []
        # Arrow has no buffer for the content of texts that are all empty.
        for first, size in zip([*found, 0], sizes[name], strict=False):
            # An empty buffer of Arrow lies anywhere.
            sums, _ = block_hashes(_pieces(path, [(first, first + size)]) if size else ())
            blocks = "".join(each.hex() for each in sums)
            buffers[name].append({"first": first if size else 0, "bytes": size, "blocks": blocks})
    return buffers


def roots(buffers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The roots of a column's buffers, which `located` found."""
    return [root_of(_sums(each["blocks"]), each["bytes"]) for each in buffers]


def outside_sha256(path: Path, buffers: Mapping[str, list[dict]]) -> str:
    """SHA-256 (hex) of what is in the file beside the buffers."""
    spans = sorted(
        (each["first"], each["first"] + each["bytes"])
        for held in buffers.values()
        for each in held
        if each["bytes"]
    )
    gaps, end = [], 0
    for first, behind in spans:
        gaps.append((end, first))
        end = max(end, behind)
    digest = hashlib.sha256()
    for piece in _pieces(path, [*gaps, (end, path.stat().st_size)]):
        digest.update(piece)
    return digest.hexdigest()


def map_columns(path: Path, manifest: Mapping[str, Any]) -> dict[str, Column]:
    """The columns of an Arrow file, mapped; nothing of them is read but the ends of sequences."""
    if not path.stat().st_size:
        raise CorruptFile(f"{path} is empty")
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    columns = {}
    for name, type_ in manifest["columns"].items():
        found = manifest["buffers"][name]
        blocks = []
        for what, each in zip(_names(type_), found, strict=False):
            first, size = each["first"], each["bytes"]
            try:
                sums = _sums(each["blocks"])
            except ValueError:
                raise _unfit(path, name) from None
            inside = 0 <= first <= first + size <= len(content) and not first % 8
            if not inside or len(sums) != -(-size // BLOCK):
                raise _unfit(path, name)
            held = content[first : first + size]
            blocks.append(Blocks(path, f"{what} of column {name!r}", held, first, sums))
        try:
            column = _column(path, name, type_, blocks, manifest["examples"])
        except CorruptFile:
            raise
        except InputError:
            raise _unfit(path, name) from None
        if len(column) != manifest["examples"]:
            raise _unfit(path, name)
        columns[name] = column
    return columns


def _column(
    path: Path, name: str, type_: Mapping[str, Any], blocks: list[Blocks], examples: int
) -> Column:
    texts, ids = type_["dtype"] == "text", type_["shape"] == [None]
    if len(blocks) != (len(_names(type_)) if examples else 0):
        raise _unfit(path, name)
    if not examples:
        blocks = [_empty(path), _empty(path)]
    if not texts and not ids:
        return _mapped(path, name, blocks[0], type_["dtype"], tuple(type_["shape"]))
    values = _mapped(path, name, blocks[1], "uint8" if texts else type_["dtype"])
    if not examples:
        edges: Any = np.zeros(1, np.int64)
        if texts:
            return pa.array([], pa.large_string())
        return Sequences(np.zeros(0, type_["dtype"]), edges, type_["encoding"])
    edges = _mapped(path, name, blocks[0], "int64")
    return MappedText(edges, values) if texts else Sequences(values, edges, type_["encoding"])


def _mapped(
    path: Path, name: str, blocks: Blocks, dtype: str, example: tuple[int, ...] = ()
) -> Mapped:
    each = np.dtype(dtype).itemsize * math.prod(example)
    size = len(blocks.unverified)
    if size % each:
        raise _unfit(path, name)
    return Mapped(blocks, np.dtype(dtype), example, 0, size // each)


def _empty(path: Path) -> Blocks:
    return Blocks(path, "nothing", np.zeros(0, np.uint8), 0, [])


def _unfit(path: Path, name: str) -> CorruptFile:
    return CorruptFile(f"{path}: the buffers that its manifest states do not fit column {name!r}")


def _names(type_: Mapping[str, Any]) -> tuple[str, ...]:
    if type_["dtype"] == "text":
        return "edges", "texts"
    return ("edges", "ids") if type_["shape"] == [None] else ("values",)


def _sizes(type_: Mapping[str, Any], examples: int, first: pa.Buffer) -> list[int]:
    """The bytes of a column's buffers, without Arrow's padding."""
    texts, ids = type_["dtype"] == "text", type_["shape"] == [None]
    if not texts and not ids:
        example = int(np.prod(type_["shape"]))
        return [examples * example * np.dtype(type_["dtype"]).itemsize]
    last = int(np.frombuffer(first, np.int64)[examples])
    return [8 * (examples + 1), last * (1 if texts else np.dtype(type_["dtype"]).itemsize)]


def _sums(blocks: str) -> list[bytes]:
    return [bytes.fromhex(blocks[at : at + _HEX]) for at in range(0, len(blocks), _HEX)]


def _pieces(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    with path.open("rb") as file:
        for first, end in spans:
            file.seek(first)
            left = end - first
            while left > 0 and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                yield piece
