"""Images from strangers: formats not on the list, headers that promise any size, values that are not numbers."""

import ast
import io
import resource
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data import images as images_module
from sightline.data.formats import FORMATS, MOST_PIXELS
from sightline.data.images import Preprocess, ResizeCrop, read_image, read_mask
from sightline.errors import UserError

from ..commands import typed

SOURCE = Path(images_module.__file__).parents[1]


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 100_000), r"1×100,000 pixels, one side more than 50 times the other; crop or remove it"),
        ((100_000, 1), r"100,000×1 pixels, one side more than 50"),
        ((60_000, 60_000), r"more than 100,000,000"),
        ((11_000, 11_000), r"11,000×11,000 pixels, more than 100,000,000; make it smaller"),
        ((2**31 - 1, 2**31 - 1), r"more than 100,000,000"),
    ],
)
@pytest.mark.parametrize("read", [read_image, read_mask])
def test_what_a_header_promises_is_refused_before_it_is_decoded(size, message, read, tmp_path):
    (tmp_path / "x.png").write_bytes(png_claiming(*size))
    before = peak()
    with pytest.raises(UserError, match=message):
        read(tmp_path / "x.png")
    assert peak() - before < 100 << 20


def test_a_thin_image_is_named_by_check(tmp_path):
    folder = tmp_path / "data"
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (i, 9, 9)).save(folder / label / f"{i}.png")
    (folder / "cat" / "thin.png").write_bytes(png_claiming(1, 100_000))
    code, out, err = typed("check", folder, "--workers", 0)
    assert code == 1, err
    assert "thin.png: 1×100,000 pixels, one side more than 50 times the other" in out


def test_only_the_window_of_an_elongated_image_is_resized(monkeypatch):
    sizes = []
    original = Image.Image.resize

    def watched(self, size, *rest, **named):
        sizes.append(size)
        return original(self, size, *rest, **named)

    monkeypatch.setattr(Image.Image, "resize", watched)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (2000, 50, 3), dtype=np.uint8))
    geometry = ResizeCrop.of(image.size, Preprocess((64, 64)))
    window = np.asarray(geometry.image(image).permute(1, 2, 0)).astype(int)
    assert sizes == [(64, 64)]
    whole = original(image, geometry.resized, Image.Resampling.BICUBIC)
    expected = np.asarray(whole.crop((geometry.left, geometry.top, geometry.left + 64, geometry.top + 64))).astype(int)
    assert np.abs(window - expected).mean() < 1, "the same window, up to rounding"


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
PDF = b"%PDF-1.4\n%%EOF\n"
FITS = b"SIMPLE  =                    T".ljust(80) + b"END".ljust(2800)


@pytest.mark.parametrize("content", [EPS, PDF, FITS, b"RIFF....ACONanih", b"#define x_width 9\n#define x_height 9\n"])
@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x"])
def test_formats_that_are_not_on_the_list_reach_no_decoder(content, name, tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    def ghostscript(*_, **__):
        raise AssertionError("Ghostscript was reached")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    (tmp_path / name).write_bytes(content)
    for read in (read_image, read_mask):
        with pytest.raises(UserError, match="not a readable image"):
            read(tmp_path / name)


def test_every_image_is_opened_with_a_list_of_formats():
    """In all of the source, so that no new command forgets it."""
    opened = 0
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.func if isinstance(node, ast.Call) else None
            if isinstance(call, ast.Attribute) and call.attr == "open" and getattr(call.value, "id", "") == "Image":
                opened += 1
                assert any(word.arg == "formats" for word in node.keywords), f"{path}:{node.lineno}"
    assert opened >= 5


@pytest.mark.parametrize("form", FORMATS)
def test_formats_on_the_list_are_read(form, tmp_path):
    Image.new("RGB", (9, 7), (10, 20, 30)).save(tmp_path / "x", form)
    assert read_image(tmp_path / "x").size == (9, 7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_not_numbers_are_refused(value, tmp_path):
    pixels = np.full((8, 8), 0.5, dtype=np.float32)
    pixels[3, 3] = value
    Image.fromarray(pixels).save(tmp_path / "x.tif")
    with pytest.raises(UserError, match=r"x\.tif: has pixels that are not numbers"):
        read_image(tmp_path / "x.tif")


def test_archive_members_that_grow_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(images_module, "MOST_UNPACKED", 1 << 20)
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", bytes(3 << 20))
    with pytest.raises(UserError, match=r"data\.zip/bomb\.png: unpacks to more than 1 MiB"):
        read_image(tmp_path / "data.zip" / "bomb.png")


def test_links_in_circles_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "data" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "cat" / "self").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "dog").symlink_to(tmp_path / "data")
    for path in ("loop", "loop/rows.csv", "data"):
        code, _, err = typed("check", tmp_path / path, "--workers", 0)
        assert (code, err.count("\n")) == (2, 1), err
        code, _, err = typed("train", "erm", tmp_path / path, "--out", tmp_path / "run")
        assert (code, err.count("\n")) == (2, 1), err


def test_damaged_files_of_every_format_are_one_line(tmp_path):
    rng = np.random.default_rng(0)
    for form in FORMATS:
        held = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(held, form)
        whole = held.getvalue()
        for kept in (1, 10, len(whole) // 2):
            (tmp_path / "x.png").write_bytes(whole[:kept])
            with pytest.raises(UserError) as refused:
                read_image(tmp_path / "x.png")
            assert "\n" not in str(refused.value)


def test_the_limit_is_larger_than_any_camera():
    assert MOST_PIXELS >= 100_000_000
