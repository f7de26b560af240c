"""Images in folders: every kind of pixels, and what lies among them."""

import io
import struct
import zlib

import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import CorruptFile
from tests.refusals import refusal

image = pytest.importorskip("PIL.Image")

DRAW = np.random.default_rng(0)
DEEP = (np.arange(64) * 1000).astype(np.uint16).reshape(8, 8)
GREY, ALPHA = DRAW.integers(0, 256, (2, 6, 5)).astype(np.uint8)
COLOUR = DRAW.integers(0, 256, (6, 5, 3)).astype(np.uint8)


def opened(folder, options: str = "") -> np.ndarray:
    return jp.data.open(f"{folder}{options}").columns["image"]


@pytest.fixture
def client(tmp_path):
    (tmp_path / "images" / "ann").mkdir(parents=True)
    return tmp_path / "images" / "ann"


def on_white(values: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return values.reshape(*alpha.shape, -1) * share + 255 * (1 - share)


def deep_png(values_HxWxC: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write in colour."""
    height, width, channels = values_HxWxC.shape
    big = values_HxWxC.astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in big)
    head = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    parts = {b"IHDR": head, b"IDAT": zlib.compress(rows), b"IEND": b""}
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("options", ["", "?channels=1"])
@pytest.mark.parametrize(
    ("file", "values"), [("0.png", DEEP), ("0.tif", DEEP), ("0.tiff", DEEP.astype(">u2"))]
)
def test_of_16_bits_the_upper_ones_are_read(client, file, values, options):
    image.fromarray(values).save(client / file)
    found = opened(client.parent, options)
    np.testing.assert_array_equal(found, (DEEP >> 8).astype(np.uint8)[None, :, :, None])


@pytest.mark.parametrize("channels", [3, 4])
def test_so_they_are_in_colour(client, channels):
    values = DRAW.integers(0, 2**16, (6, 5, channels))
    values[..., 3:] = 2**16 - 1
    (client / "0.png").write_bytes(deep_png(values))
    np.testing.assert_array_equal(opened(client.parent), (values[None, ..., :3] >> 8))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_32_bits_have_no_range(client, kind):
    image.fromarray(DEEP.astype(kind)).save(client / "0.tif")
    for options in ("", "?channels=1"):
        refusal(lambda options=options: opened(client.parent, options), "8 or 16 bits")


def modes() -> dict[str, tuple]:
    """By mode: the file, the picture, what one sees of it, and how it is saved."""
    grey, colour, alpha = map(image.fromarray, (GREY, COLOUR, ALPHA))
    table = COLOUR.reshape(-1, 3)[:4]
    chosen = image.frombytes("P", (5, 6), (GREY % 4).tobytes())
    chosen.putpalette(table.ravel().tolist())
    ink = (255 - COLOUR.astype(int)) * (255 - ALPHA.astype(int))[..., None] / 255
    first, masked = int(GREY[0, 0]), image.merge("RGBA", (*colour.split(), alpha))
    return {
        "1": ("0.png", grey.point(lambda x: 255 * (x > 99), "1"), 255 * (GREY > 99), {}),
        "L": ("0.bmp", grey, GREY, {}),
        "LA": ("0.png", image.merge("LA", (grey, alpha)), on_white(GREY, ALPHA), {}),
        "RGB": ("0.tif", colour, COLOUR, {}),
        "webp": ("0.WEBP", colour, COLOUR, {"lossless": True}),
        "RGBA": ("0.png", masked, on_white(COLOUR, ALPHA), {}),
        "P": ("0.png", chosen, table[GREY % 4], {}),
        "a hole in P": (
            "0.png", chosen, on_white(table[GREY % 4], 255 * (GREY % 4 != 2)), {"transparency": 2}
        ),
        "a hole in L": (
            "0.png", grey, on_white(GREY, 255 * (GREY != first)), {"transparency": first}
        ),
        "CMYK": ("0.tif", image.merge("CMYK", (*colour.split(), alpha)), ink, {}),
    }  # fmt: skip


@pytest.mark.parametrize("mode", modes())
def test_every_mode_is_what_one_sees(client, mode):
    file, picture, expected, how = modes()[mode]
    picture.save(client / file, **how)
    (found,) = opened(client.parent)
    assert found.dtype == np.uint8
    assert np.abs(found - np.reshape(expected, found.shape).astype(float)).max() <= 1


def test_a_picture_is_turned_as_the_camera_was_held(client):
    turned = image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees clockwise
    for file in ("0.png", "1.webp", "2.tif"):
        image.fromarray(COLOUR).save(client / file, exif=turned, lossless=True)
    for found in opened(client.parent):
        np.testing.assert_array_equal(found, np.rot90(COLOUR, -1))


def test_what_tools_leave_among_pictures_is_no_picture(client):
    names = ("ann/Thumbs.db", "ann/desktop.ini", "ann/._0.png", "__MACOSX/ann/0.png")
    names += ("ann/.ipynb_checkpoints/0-checkpoint.png", ".cache/0.png", "ann/@eaDir/0.png")
    for name in names:
        (client.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (client.parent / name).write_bytes(b"no picture")
    image.fromarray(COLOUR).save(client / "0.png")
    found = jp.data.open(str(client.parent))
    assert found.client_ids.to_pylist() == ["ann"]
    np.testing.assert_array_equal(found.columns["image"], COLOUR[None])


@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "bmp", "tiff"])
@pytest.mark.parametrize("part", [0, 0.5, 0.9])
def test_a_cut_picture_is_named(client, format, part):
    whole = io.BytesIO()
    image.fromarray(DRAW.integers(0, 256, (40, 50, 3)).astype(np.uint8)).save(whole, format)
    image.fromarray(COLOUR).save(client / "0.png")
    content = whole.getvalue()
    (client / f"1.{format}").write_bytes(content[: int(part * len(content))])
    refusal(lambda: opened(client.parent), "image 2: truncated", CorruptFile)
