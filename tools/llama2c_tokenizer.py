"""Converts a tokeniser of llama2.c's models to files that `tokenisers.fast.hugging_face` reads.

    python tools/llama2c_tokenizer.py tok512.bin FOLDER

The binary file holds, little-endian, the length of the longest piece (int32), then for each piece
its score (float32), its length (int32) and its bytes. Ids 0, 1 and 2 are unknown, start and end;
3 .. 258 are the single bytes, spelt "<0x0A>". A text, with a space put before it, is divided into
characters; of all neighbours whose concatenation is a piece, those with the highest score are
joined, until there are none. These are merges of a BPE in the order of their scores.
"""

import struct
import sys
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers

from jaxpfl.text.tokenisers.fast import FastTokeniser

_UNKNOWN, _START, _END = "<unk>", "<s>", "</s>"
_SPACE = "\u2581"


def read(path: Path) -> list[tuple[str, float]]:
    """The pieces, in which U+2581 stands for a space, and their scores."""
    content, place, found = path.read_bytes(), 4, []
    while place < len(content):
        score, length = struct.unpack_from("<fi", content, place)
        place += 8 + length
        found.append((content[place - length : place].decode().replace(" ", _SPACE), score))
    found[:3] = [(token, 0.0) for token in (_UNKNOWN, _START, _END)]
    return found


def converted(path: Path) -> FastTokeniser:
    """The tokeniser of a file; its start token, which begins the next text, ends one, too."""
    pieces = read(path)
    ids = {piece: i for i, (piece, _) in reversed([*enumerate(pieces)])}
    ranked = sorted(range(259, len(pieces)), key=lambda i: -pieces[i][1])
    words = (pieces[i][0] for i in ranked)
    splits = [(word[:cut], word[cut:]) for word in words for cut in range(1, len(word))]
    merges = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token=_UNKNOWN, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([_UNKNOWN, _START, _END])
    return FastTokeniser(tokenizer, name=path.stem, end_of_text=1, ends=(2,), start=1)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    converted(Path(sys.argv[1])).save(folder)
