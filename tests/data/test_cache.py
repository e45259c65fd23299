"""The cache of decoded images: identical to decoding, built once, never incomplete."""

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
from sightline.data.cache import CHUNK, Cache, cache_fingerprint, unpack_masks
from sightline.data.images import Preprocess, decode
from sightline.errors import UserError

from .test_images import one_row, write_rows, zipped

PREPROCESS = Preprocess((15, 21))  # 315 pixels: the last byte of a mask is not full


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("noise"), 11)


def all_indices(rows) -> np.ndarray:
    return np.arange(len(rows))


def assert_holds(cache: Cache, rows) -> None:
    for k, i in enumerate(cache.indices.tolist()):
        sample = decode(rows, i, cache.preprocess)
        at = cache.positions(np.array([i]))
        assert at.tolist() == [k]
        assert torch.equal(cache.read_images(at)[0], sample.image)
        assert tuple(cache.sizes[k]) == sample.size
        if rows.masks is not None:
            expected = torch.zeros(cache.preprocess.size).bool() if sample.mask is None else sample.mask
            assert torch.equal(cache.read_masks(at)[0], expected)


@pytest.mark.parametrize("indices", [range(11), [7], [9, 2, 10, 4]])
def test_it_equals_decoding_bit_for_bit(rows, tmp_path, indices):
    cache = Cache.open(rows, PREPROCESS, tmp_path / "deep" / "folder", np.array(indices))
    assert cache.built
    assert_holds(cache, rows)
    at = cache.positions(cache.indices[::-1])
    assert torch.equal(cache.read_images(at), cache.images.flip(0))


def test_without_masks(tmp_path):
    rows = write_rows(tmp_path, 3, masks=False)
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert cache.masks is None
    assert cache.read_masks(np.array([0])) is None
    assert_holds(cache, rows)


def test_any_number_of_workers_builds_the_same_file(tmp_path):
    rows = write_rows(tmp_path, 4 * CHUNK + 5)
    files = []
    for workers in (1, 2):
        cache = Cache.open(rows, PREPROCESS, tmp_path / str(workers), all_indices(rows), workers=workers)
        files.append(cache.path.read_bytes())
        assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]
    assert files[0] == files[1]


def test_a_second_open_reuses_the_file(rows, tmp_path, monkeypatch):
    first = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    monkeypatch.setattr(module, "decode", None)
    second = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert (first.built, second.built) == (True, False)
    assert second.path == first.path
    assert torch.equal(second.images, first.images)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_fingerprint_depends_on_files_order_and_preprocessing(tmp_path):
    rows = write_rows(tmp_path, 4)
    zipped(tmp_path)
    known = cache_fingerprint(rows, PREPROCESS, all_indices(rows))
    assert cache_fingerprint(replace(rows, labels=rows.labels + 1), PREPROCESS, all_indices(rows)) == known
    assert cache_fingerprint(rows, replace(PREPROCESS, crop=0.9), all_indices(rows)) != known
    assert cache_fingerprint(rows, replace(PREPROCESS, fit="squash"), all_indices(rows)) != known
    assert cache_fingerprint(rows, PREPROCESS, all_indices(rows)[::-1]) != known
    assert cache_fingerprint(replace(rows, masks=None), PREPROCESS, all_indices(rows)) != known
    packed = replace(rows, images=[f"pack.zip/images/{path}" for path in rows.images])
    known = cache_fingerprint(packed, PREPROCESS, all_indices(rows))
    os.utime(tmp_path / "pack.zip", ns=(0, 0))
    assert cache_fingerprint(packed, PREPROCESS, all_indices(rows)) == known
    Image.new("RGB", (30, 30)).save(tmp_path / "2.png")
    zipped(tmp_path)
    assert cache_fingerprint(packed, PREPROCESS, all_indices(rows)) != known


@pytest.mark.parametrize("name", ["image.bmp", "mask.bmp"])
def test_a_changed_image_or_mask_is_noticed_even_at_the_same_size(tmp_path, name):
    for file in ("image.bmp", "mask.bmp"):
        Image.new("RGB", (30, 30), "black").save(tmp_path / file)
    rows = one_row(tmp_path, "image.bmp", masks=["mask.bmp"])
    Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    length = (tmp_path / name).stat().st_size
    Image.new("RGB", (30, 30), "white").save(tmp_path / name)
    assert (tmp_path / name).stat().st_size == length
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert cache.built
    assert_holds(cache, rows)


def test_a_truncated_file_is_rebuilt(rows, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    path, length = cache.path, cache.path.stat().st_size
    del cache
    os.truncate(path, length - 1)
    again = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert again.built
    assert_holds(again, rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_image_leaves_no_partial_file(tmp_path, workers):
    rows = write_rows(tmp_path, 4 * CHUNK)
    (tmp_path / "90.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"^[^\n]*90.png: not a readable image[^\n]*$"):
        Cache.open(rows, PREPROCESS, tmp_path / "cache", all_indices(rows), workers=workers)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_killed_build_is_not_mistaken_for_a_cache(rows, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # as after kill -9
        patched.setattr(module, "_decode_all", lambda writer, workers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert len(list(tmp_path.glob("*.partial"))) == 1
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert cache.built
    assert_holds(cache, rows)
    assert list(tmp_path.iterdir()) == [cache.path]


def _open(rows, folder: Path, results) -> None:
    cache = Cache.open(rows, PREPROCESS, folder, all_indices(rows), workers=1)
    results.put((cache.built, cache.path.name, cache.images.numpy().tobytes()))


@pytest.mark.parametrize("locks", [True, False])
def test_concurrent_builders(tmp_path, monkeypatch, locks):
    rows = write_rows(tmp_path, 2 * CHUNK)
    folder = tmp_path / "cache"
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    builders = [fork.Process(target=_open, args=(rows, folder, results)) for _ in range(4)]
    for builder in builders:
        builder.start()
    opened = [results.get(timeout=60) for _ in builders]
    for builder in builders:
        builder.join(60)
    assert len({result[1:] for result in opened}) == 1
    assert [path.name for path in folder.iterdir()] == [opened[0][1]]
    if locks:
        assert sum(built for built, *_ in opened) == 1
    assert_holds(Cache.open(rows, PREPROCESS, folder, all_indices(rows)), rows)


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
import sightline.data.cache as module
from sightline.data.images import Preprocess
from sightline.errors import UserError
from tests.data.test_images import write_rows

folder = Path(sys.argv[1])
rows = write_rows(folder, 4 * module.CHUNK)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for when, workers in (("before", 1), ("during", 1), ("during", 2)):
    if when == "during":
        module._reserve = lambda path, needed: path.touch()
    try:
        module.Cache.open(rows, Preprocess((64, 64)), folder / "cache", np.arange(len(rows)), workers=workers)
    except UserError as error:
        print(error, [path.name for path in (folder / "cache").iterdir()])
"""


def test_a_full_disk_is_a_one_line_error_and_leaves_no_partial_file(tmp_path):
    """A limit on the file size simulates a full disk, before decoding or in the middle of it."""
    script = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 3
    for line in done.stdout.splitlines():
        assert "cache: no space for the cache of decoded images, 0.00164 GB (file too large)" in line
        assert line.endswith("free some, choose another folder, or run without --cache []")


def test_free_space_is_checked_first(rows, tmp_path, monkeypatch):
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="no space for the cache of decoded images"):
        Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read_only_folder():
    """A read-only folder, for a user other than root."""
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


def test_a_read_only_folder_is_named(read_only_folder):
    folder, close = read_only_folder
    rows = write_rows(folder, 3)
    close()
    with pytest.raises(UserError, match=r"closed: cannot write the cache of decoded images \(permission denied\)"):
        Cache.open(rows, PREPROCESS, folder, all_indices(rows))
    with pytest.raises(UserError, match=r"new: cannot write the cache of decoded images \(permission denied\)"):
        Cache.open(rows, PREPROCESS, folder / "new", all_indices(rows))


def test_a_cache_in_a_read_only_folder_can_be_used(read_only_folder):
    folder, close = read_only_folder
    rows = write_rows(folder, 3)
    Cache.open(rows, PREPROCESS, folder, all_indices(rows))
    close()
    cache = Cache.open(rows, PREPROCESS, folder, all_indices(rows))
    assert not cache.built
    assert_holds(cache, rows)


def test_a_file_where_the_folder_should_be_is_named(rows, tmp_path):
    (tmp_path / "file").write_text("hello")
    with pytest.raises(UserError, match=r"file: cannot write the cache of decoded images \(file exists\)"):
        Cache.open(rows, PREPROCESS, tmp_path / "file", all_indices(rows))


def test_it_moves_to_a_device_with_enough_memory(rows, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert cache.nbytes == 11 * (3 * 15 * 21 + 40)
    assert cache.to("cpu", max_bytes=cache.nbytes - 1) is cache
    resident = cache.to("cpu", max_bytes=cache.nbytes)
    assert resident is not cache
    cache.path.unlink()
    assert_holds(resident, rows)


def test_masks_are_unpacked_alike_on_device_and_cpu(rows, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    assert torch.equal(unpack_masks(cache.masks, PREPROCESS.size), cache.read_masks(all_indices(rows)))


def test_the_file_cannot_be_modified_through_its_tensors(rows, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, all_indices(rows))
    before = cache.path.read_bytes()
    cache.read_images(np.array([0])).fill_(0)
    cache.read_masks(np.array([0])).fill_(True)
    assert cache.path.read_bytes() == before


def test_rows_outside_the_cache_are_a_programming_error(rows, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, np.array([1, 5]))
    with pytest.raises(AssertionError, match="not in this cache"):
        cache.positions(np.array([2]))
