"""Writes FLAIR (Song et al. 2022), whose images have several labels, as two populations.

    cd "$JAXPFL_FLAIR"; python .../tools/flair.py       # needs jaxpfl[datasets]

The folders `train` (68 GB) and `val` (8 GB) are mapped into memory when they are read. One user's
images are held at a time; what is downloaded stays in the cache of `datasets`.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.data.storage import write
from jaxpfl.data.stream import Batch, Stream


def main(folder: Path) -> None:
    """Writes `folder`/train and `folder`/val."""
    from datasets import load_dataset

    parts: dict[str, Any] = {
        part: load_dataset("apple/flair", split=part) for part in ("train", "val")
    }
    names = sorted({name for labels in parts["train"]["labels"] for name in labels})
    for part, rows in parts.items():
        stream = Stream(users(rows, names), len(rows), f"FLAIR {part}", "user of Flickr")
        write(folder / part, lambda _, stream=stream: nullcontext(stream))


def users(rows: Any, names: list[str]) -> Iterator[Batch]:
    """Yields each user's images, uint8 [examples, H, W, 3], and labels, bool [examples, names]."""
    held = defaultdict(list)
    for number, user in enumerate(rows["user_id"]):
        held[user].append(number)
    for user, numbers in held.items():
        own = rows[numbers]
        images = np.stack([np.asarray(image.convert("RGB")) for image in own["image"]])
        labels = np.array([[name in each for name in names] for each in own["labels"]])
        yield Batch({"image": images, "labels": labels}, [str(user)], [len(numbers)])


if __name__ == "__main__":
    main(Path())
