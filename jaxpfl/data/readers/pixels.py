"""The pixels of an encoded image, of a file or of a table's cell.

Policy: PNG, JPEG, WebP, BMP or TIFF, one page of it; of an animation, the first image. They are
turned as the camera was held. Pixels have 8 bits, of 16 the upper ones. What is transparent is seen
on white. Pixels of 32 bits have no range of their own, and are refused.
"""

from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl.errors import CorruptFile, InputError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
_GREY, _COLOUR = ("1", "L", "LA", "La"), ("P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def pixels_of(where: str, file: Path | IO[bytes], size: int = 0, channels: int = 0) -> np.ndarray:
    """The pixels of an image, uint8 [height, width, channels].

    Args:
      where: begins the errors, which do not have the name of a file.
      size: height and width that it is scaled to; 0: its own.
      channels: 1 for grey, 3 for colour; 0: its own.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=FORMATS) as opened:
            upright, kind = ImageOps.exif_transpose(opened), opened.format
            pages = getattr(opened, "n_frames", 1) if kind == "TIFF" else 1
    # Pillow raises errors of many kinds, which may quote what is in the file.
    except Exception:
        raise CorruptFile(
            f"{where}: truncated, damaged, too large or no image, expected one of "
            f"{', '.join(FORMATS)}"
        ) from None
    if pages > 1:
        raise InputError(
            f"{where}: expected a TIFF of one page, found {pages}: store each by itself"
        )
    # Pillow would set what is above 255 to 255. Old ones call 16 bits of a PNG file I.
    if upright.mode.startswith("I;16") or (upright.mode == "I" and kind == "PNG"):
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if upright.mode not in _GREY + _COLOUR + _ALPHA:
        mode = f"Pillow's mode {upright.mode}"
        raise InputError(f"{where}: expected pixels of 8 or 16 bits, found {mode}")
    grey = channels == 1 or (not channels and upright.mode in _GREY)
    made: Any = upright
    if upright.mode in _ALPHA or "transparency" in upright.info:
        white = Image.new("RGBA", upright.size, "white")
        made = Image.alpha_composite(white, upright.convert("RGBA"))
    made = made.convert("L" if grey else "RGB")
    pixels = np.asarray(made.resize((size, size)) if size else made, np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)
