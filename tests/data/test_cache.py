"""A cache holds what decoding gives, is built once, and never half."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sightline.data.cache as module
from sightline.data.cache import CHUNK, Cache, fingerprint, unpacked
from sightline.data.images import Canvas, decode
from sightline.errors import UserError

from .test_images import one_row, write_rows, zipped

CANVAS = Canvas((15, 21))  # 315 pixels: the last byte of a mask is not full


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("noise"), 11)


def everything(rows) -> np.ndarray:
    return np.arange(len(rows))


def assert_holds(cache: Cache, rows) -> None:
    for k, i in enumerate(cache.indices.tolist()):
        sample = decode(rows, i, cache.canvas)
        at = cache.positions(np.array([i]))
        assert at.tolist() == [k]
        assert torch.equal(cache.pictures(at)[0], sample.image)
        assert tuple(cache.sizes[k]) == sample.size
        if rows.masks is not None:
            expected = torch.zeros(cache.canvas.size).bool() if sample.mask is None else sample.mask
            assert torch.equal(cache.outlines(at)[0], expected)


@pytest.mark.parametrize("indices", [range(11), [7], [9, 2, 10, 4]])
def test_it_holds_what_decoding_gives_bit_for_bit(rows, tmp_path, indices):
    cache = Cache.open(rows, CANVAS, tmp_path / "deep" / "folder", np.array(indices))
    assert cache.built
    assert_holds(cache, rows)
    at = cache.positions(cache.indices[::-1])
    assert torch.equal(cache.pictures(at), cache.images.flip(0))


def test_without_masks(tmp_path):
    rows = write_rows(tmp_path, 3, masks=False)
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert cache.masks is None
    assert cache.outlines(np.array([0])) is None
    assert_holds(cache, rows)


def test_processes_build_the_same_file(tmp_path):
    rows = write_rows(tmp_path, 4 * CHUNK + 5)
    files = []
    for workers in (1, 2):
        cache = Cache.open(rows, CANVAS, tmp_path / str(workers), everything(rows), workers=workers)
        files.append(cache.path.read_bytes())
        assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]
    assert files[0] == files[1]


def test_a_second_opening_reads_the_same_file(rows, tmp_path, monkeypatch):
    first = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    monkeypatch.setattr(module, "decode", None)
    second = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert (first.built, second.built) == (True, False)
    assert second.path == first.path
    assert torch.equal(second.images, first.images)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_fingerprint_follows_files_order_and_canvas(tmp_path):
    rows = write_rows(tmp_path, 4)
    zipped(tmp_path)
    known = fingerprint(rows, CANVAS, everything(rows))
    assert fingerprint(replace(rows, labels=rows.labels + 1), CANVAS, everything(rows)) == known
    assert fingerprint(rows, replace(CANVAS, crop=0.9), everything(rows)) != known
    assert fingerprint(rows, replace(CANVAS, fit="squash"), everything(rows)) != known
    assert fingerprint(rows, CANVAS, everything(rows)[::-1]) != known
    assert fingerprint(replace(rows, masks=None), CANVAS, everything(rows)) != known
    packed = replace(rows, images=[f"pack.zip/pictures/{path}" for path in rows.images])
    known = fingerprint(packed, CANVAS, everything(rows))
    os.utime(tmp_path / "pack.zip", ns=(0, 0))
    assert fingerprint(packed, CANVAS, everything(rows)) == known
    Image.new("RGB", (30, 30)).save(tmp_path / "2.png")
    zipped(tmp_path)
    assert fingerprint(packed, CANVAS, everything(rows)) != known


@pytest.mark.parametrize("what", ["picture.bmp", "mask.bmp"])
def test_a_changed_picture_or_mask_is_noticed_even_at_the_same_size(tmp_path, what):
    for name in ("picture.bmp", "mask.bmp"):
        Image.new("RGB", (30, 30), "black").save(tmp_path / name)
    rows = one_row(tmp_path, "picture.bmp", masks=["mask.bmp"])
    Cache.open(rows, CANVAS, tmp_path, everything(rows))
    length = (tmp_path / what).stat().st_size
    Image.new("RGB", (30, 30), "white").save(tmp_path / what)
    assert (tmp_path / what).stat().st_size == length
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert cache.built
    assert_holds(cache, rows)


def test_a_file_cut_short_is_built_anew(rows, tmp_path):
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    path, length = cache.path, cache.path.stat().st_size
    del cache
    os.truncate(path, length - 1)
    again = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert again.built
    assert_holds(again, rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_picture_leaves_nothing_behind(tmp_path, workers):
    rows = write_rows(tmp_path, 4 * CHUNK)
    (tmp_path / "90.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"^[^\n]*90.png: not an image[^\n]*$"):
        Cache.open(rows, CANVAS, tmp_path / "cache", everything(rows), workers=workers)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_killed_build_leaves_nothing_that_is_taken_for_a_cache(rows, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # kill -9 would not tidy up either
        patched.setattr(module, "_fill", lambda writer, workers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert len(list(tmp_path.glob("*.partial"))) == 1
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert cache.built
    assert_holds(cache, rows)
    assert list(tmp_path.iterdir()) == [cache.path]


def _open(rows, folder: Path, answers) -> None:
    cache = Cache.open(rows, CANVAS, folder, everything(rows), workers=1)
    answers.put((cache.built, cache.path.name, cache.images.numpy().tobytes()))


@pytest.mark.parametrize("locks", [True, False])
def test_many_builders_at_once_do_not_disturb_each_other(tmp_path, monkeypatch, locks):
    rows = write_rows(tmp_path, 2 * CHUNK)
    folder = tmp_path / "cache"
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    builders = [fork.Process(target=_open, args=(rows, folder, answers)) for _ in range(4)]
    for builder in builders:
        builder.start()
    told = [answers.get(timeout=60) for _ in builders]
    for builder in builders:
        builder.join(60)
    assert len({answer[1:] for answer in told}) == 1
    assert [path.name for path in folder.iterdir()] == [told[0][1]]
    if locks:
        assert sum(built for built, *_ in told) == 1
    assert_holds(Cache.open(rows, CANVAS, folder, everything(rows)), rows)


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
import sightline.data.cache as module
from sightline.data.images import Canvas
from sightline.errors import UserError
from tests.data.test_images import write_rows

folder = Path(sys.argv[1])
rows = write_rows(folder, 4 * module.CHUNK)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for when, workers in (("at once", 1), ("later", 1), ("later", 2)):
    if when == "later":
        module._reserve = lambda path, needed: path.touch()
    try:
        module.Cache.open(rows, Canvas((64, 64)), folder / "cache", np.arange(len(rows)), workers=workers)
    except UserError as error:
        print(error, [path.name for path in (folder / "cache").iterdir()])
"""


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing_behind(tmp_path):
    """A limit on the size of files stands for a disk that is full, before the work or in the middle of it."""
    script = [sys.executable, "-c", FULL, str(tmp_path)]
    said = subprocess.run(script, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert said.stderr == ""
    assert len(said.stdout.splitlines()) == 3
    for line in said.stdout.splitlines():
        assert "cache: no room for the decoded pictures, which take 0.00164 GB (file too large)" in line
        assert line.endswith("make room, choose another folder, or go without a cache []")


def test_too_small_a_disk_is_not_filled_first(rows, tmp_path, monkeypatch):
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="no room for the decoded pictures"):
        Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed_folder():
    """A folder that may be read but not written, by someone who is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "closed"
        folder.mkdir()
        Path(name).chmod(0o755)
        me = os.geteuid()

        def close() -> Path:
            folder.chmod(0o555)
            if me == 0:
                os.seteuid(65534)
            return folder

        try:
            yield folder, close
        finally:
            os.seteuid(me)
            folder.chmod(0o755)


def test_a_folder_that_may_not_be_written_is_named(closed_folder):
    folder, close = closed_folder
    rows = write_rows(folder, 3)
    close()
    with pytest.raises(UserError, match=r"closed: decoded pictures cannot be kept here \(permission denied\)"):
        Cache.open(rows, CANVAS, folder, everything(rows))
    with pytest.raises(UserError, match=r"new: decoded pictures cannot be kept here \(permission denied\)"):
        Cache.open(rows, CANVAS, folder / "new", everything(rows))


def test_a_cache_in_such_a_folder_can_be_used(closed_folder):
    folder, close = closed_folder
    rows = write_rows(folder, 3)
    Cache.open(rows, CANVAS, folder, everything(rows))
    close()
    cache = Cache.open(rows, CANVAS, folder, everything(rows))
    assert not cache.built
    assert_holds(cache, rows)


def test_a_file_where_the_folder_should_be_is_named(rows, tmp_path):
    (tmp_path / "file").write_text("hello")
    with pytest.raises(UserError, match=r"file: decoded pictures cannot be kept here \(file exists\)"):
        Cache.open(rows, CANVAS, tmp_path / "file", everything(rows))


def test_it_moves_to_a_device_where_there_is_room(rows, tmp_path):
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert cache.nbytes == 11 * (3 * 15 * 21 + 40)
    assert cache.to("cpu", at_most=cache.nbytes - 1) is cache
    resident = cache.to("cpu", at_most=cache.nbytes)
    assert resident is not cache
    cache.path.unlink()
    assert_holds(resident, rows)


def test_a_device_unpacks_masks_as_the_processor_does(rows, tmp_path):
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    assert torch.equal(unpacked(cache.masks, CANVAS.size), cache.outlines(everything(rows)))


def test_pictures_cannot_be_changed_by_accident(rows, tmp_path):
    cache = Cache.open(rows, CANVAS, tmp_path, everything(rows))
    before = cache.path.read_bytes()
    cache.pictures(np.array([0])).fill_(0)
    cache.outlines(np.array([0])).fill_(True)
    assert cache.path.read_bytes() == before


def test_rows_that_are_not_there_are_our_mistake(rows, tmp_path):
    cache = Cache.open(rows, CANVAS, tmp_path, np.array([1, 5]))
    with pytest.raises(AssertionError, match="not in this cache"):
        cache.positions(np.array([2]))
