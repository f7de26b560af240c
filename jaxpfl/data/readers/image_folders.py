"""Folders of images: FOLDER/CLIENT/IMAGE, or FOLDER/CLIENT/CLASS/IMAGE where classes are named.

Policy:
- A client is a folder, also one without images. Clients, and the images of each, come in the order
  of their names. What `table.is_hidden` names is left out; all other files must be images, see
  `readers.cells`.
- All images have the form of the first, unless the user names another: then each is scaled and made
  grey or coloured by itself. Errors name their numbers.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.readers import table
from jaxpfl.data.readers.cells import pixels_of
from jaxpfl.errors import InputError

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def holds_images(folder: Path) -> bool:
    """Whether folders in this folder, or in those, have images."""
    paths = (path for depth in ("*/*", "*/*/*") for path in folder.glob(depth))
    images = (path for path in paths if path.suffix.lower() in _ENDINGS)
    return not all(table.is_hidden(path, folder) for path in images)


def read_images(
    folder: Path, *, name: str, classes: Sequence[str] = (), size: int = 0, channels: int = 0
) -> Population:
    """A folder's "image", uint8 [examples, height, width, channels]; of classes "label", int32.

    Args:
      classes: the names of folders inside those of clients; the first becomes label 0.
      size: height and width in pixels that every image is scaled to; 0: as they are.
      channels: 1 for grey, 3 for colour; 0: as they are.
    """
    if channels not in (0, 1, 3):
        raise InputError(f"{folder}: channels must be 1 (grey) or 3 (colour), found {channels}")
    clients = [path for path in _inside(folder, "*") if path.is_dir()]
    paths = [[path for path in _inside(client, "**/*") if path.is_file()] for client in clients]
    offsets, labels = offsets_of(list(map(len, paths))), []
    images = np.empty((0, 0, 0, 0), np.uint8)
    for number, file in enumerate(itertools.chain(*paths)):
        where, inside = f"{folder}, image {number + 1}", file.relative_to(folder).parts[1:-1]
        if len(inside) != bool(classes) or not {*inside} <= {*classes}:
            hint = f"?classes=NAME,NAME names all of them, found {', '.join(classes) or 'none'}"
            raise InputError(f"{where}: expected CLIENT/IMAGE, or CLIENT/CLASS/IMAGE: {hint}")
        scaled = checks.non_negative_int("size", size)
        pixels = pixels_of(where, file, scaled, channels)
        if not number:
            checks.fits_memory(f"{folder}: its images", int(offsets[-1]) * pixels.nbytes)
            images = np.empty((offsets[-1], *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            what = f"is {list(pixels.shape)}, height, width and channels, but the first is "
            what += f"{list(images.shape[1:])}"
            raise InputError(f"{where}: {what}: give all one form, as in ?size=32&channels=3")
        images[number] = pixels
        labels += [classes.index(class_) for class_ in inside]
    columns = {"image": images} | ({"label": np.array(labels, np.int32)} if classes else {})
    ids = [client.name for client in clients]
    return Population(columns, offsets, ids, name, "folder of images")


def _inside(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not table.is_hidden(path, folder))
