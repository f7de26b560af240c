"""Folders of images: FOLDER/CLIENT/IMAGE, or FOLDER/CLIENT/CLASS/IMAGE where classes are named.

Policy:
- A client is a folder, also one without images. Clients, and the images of each, come in the order
  of their names. Hidden files are left out; all others must be PNG or JPEG images.
- All images have the form of the first, unless the user names another: then each is scaled and made
  grey or coloured by itself. They are turned as the camera was held. Errors name their numbers.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.errors import CorruptFile, InputError

_ENDINGS = (".png", ".jpg", ".jpeg")


def holds_images(folder: Path) -> bool:
    """Whether folders in this folder, or in those, have images."""
    depths = ("*/*", "*/*/*")
    return any(path.suffix.lower() in _ENDINGS for at in depths for path in folder.glob(at))


def read_images(
    folder: Path, *, name: str, classes: Sequence[str] = (), size: int = 0, channels: int = 0
) -> Population:
    """The population of a folder, with the column "image", uint8 [examples, height, width,
    channels], and where there are classes with "label", int32.

    Args:
      classes: the names of folders inside those of clients; the first becomes label 0.
      size: height and width in pixels that every image is scaled to; 0: as they are.
      channels: 1 for grey, 3 for colour; 0: as they are.
    """
    if channels not in (0, 1, 3):
        raise InputError(f"{folder}: channels must be 1 (grey) or 3 (colour), found {channels}")
    clients = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    paths = [sorted(path for path in client.rglob("[!.]*") if path.is_file()) for client in clients]
    offsets, labels = offsets_of(list(map(len, paths))), []
    images = np.empty((0, 0, 0, 0), np.uint8)
    for number, file in enumerate(itertools.chain(*paths)):
        where, inside = f"{folder}, image {number + 1}", file.relative_to(folder).parts[1:-1]
        if len(inside) != bool(classes) or not {*inside} <= {*classes}:
            hint = f"?classes=NAME,NAME names all of them, found {', '.join(classes) or 'none'}"
            raise InputError(f"{where}: expected CLIENT/IMAGE, or CLIENT/CLASS/IMAGE: {hint}")
        pixels = _pixels(where, file, checks.non_negative_int("size", size), channels)
        if not number:
            checks.fits_memory(f"{folder}: its images", int(offsets[-1]) * pixels.nbytes)
            images = np.empty((offsets[-1], *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            raise InputError(
                f"{where}: is {list(pixels.shape)}, height, width and channels, but the first is "
                f"{list(images.shape[1:])}: give all one form, as in ?size=32&channels=3"
            )
        images[number] = pixels
        labels += [classes.index(class_) for class_ in inside]
    columns = {"image": images} | ({"label": np.array(labels, np.int32)} if classes else {})
    return Population(
        columns, offsets, [client.name for client in clients], name, "folder of images"
    )


def _pixels(where: str, file: Path, size: int, channels: int) -> np.ndarray:
    """The pixels of an image, uint8 [height, width, channels]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=("PNG", "JPEG")) as opened:
            upright = ImageOps.exif_transpose(opened)
            grey = channels == 1 or (not channels and upright.mode in ("1", "L"))
            made = upright.convert("L" if grey else "RGB")
            pixels = np.asarray(made.resize((size, size)) if size else made, np.uint8)
    # Pillow raises errors of many kinds, which may quote what is in the file.
    except Exception:
        raise CorruptFile(f"{where}: truncated, damaged, too large or no image") from None
    return pixels.reshape(*pixels.shape[:2], -1)
