"""Test images that are also in train or val; files that changed and kept their size and time."""

import json
import os
import shutil
import zipfile

import numpy as np
import pytest

from sightline.data.cache import cache_fingerprint
from sightline.data.copies import find_copies
from sightline.data.fingerprints import content_marks
from sightline.data.images import Preprocess
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.train import train

from ..commands import QUICK, SMALL, typed
from ..small_runs import small


@pytest.fixture
def data(toy, tmp_path):
    return shutil.copytree(toy, tmp_path / "data")


def test_test_images_that_are_also_in_train_are_refused_before_training(data, tmp_path):
    shutil.copy(data / "train" / "00005.png", data / "test" / "00007.png")
    shutil.copy(data / "val" / "00001.png", data / "test" / "00009.png")
    shutil.copy(data / "train" / "00001.png", data / "train" / "00002.png")
    copies = find_copies(read_rows(data))
    assert copies.sentence == "2 of 48 test images are also in train or val"
    code, _, err = typed("train", "erm", data, *SMALL, "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "test/00007.png is the same file as train/00005.png (train); remove them from test, or train with" in err
    assert "rows.csv:" in err
    assert not (tmp_path / "run").exists()


def test_with_allow_copies_the_headline_says_so_wherever_it_is_shown(data, tmp_path):
    shutil.copy(data / "train" / "00005.png", data / "test" / "00007.png")
    arguments = ("train", "probe", data, *SMALL, "--out", tmp_path / "run", "--allow-copies")
    code, out, err = typed(*arguments)
    assert code == 0, err
    headline = next(line for line in out.splitlines() if line.startswith("Accuracy ") and "; worst" in line)
    assert "1 of 48 test images is also in train or val." in headline
    assert "1 of 48 test images is also in train or val." in typed("evaluate", tmp_path / "run", *QUICK)[1]
    assert "also in train" not in typed("evaluate", tmp_path / "run", "--split", "val", *QUICK)[1]
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["copies"]


def test_files_with_the_same_samples_and_other_content_are_no_copies(data):
    """The marks are hashes of samples; what they find is compared as a whole."""
    content = bytearray((data / "train" / "00005.png").read_bytes() + bytes(40_000))
    (data / "train" / "00005.png").write_bytes(content)
    content[10_000] ^= 1
    (data / "test" / "00007.png").write_bytes(content)
    first, second = content_marks(data, ["train/00005.png", "test/00007.png"])
    assert first == second
    assert find_copies(read_rows(data)).pairs == ()


def test_copies_in_an_archive_are_found(toy, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(3):
            archive.write(toy / "train" / f"{min(i, 1):05}.png", f"{i}.png")
    lines = [
        f"a.zip/{i}.png,{label},{split}" for i, label, split in ((0, "a", "train"), (1, "b", "val"), (2, "b", "test"))
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["image,label,split", *lines]))
    assert find_copies(read_rows(tmp_path)).pairs == ((2, 1),)


def test_a_file_that_changed_and_kept_its_size_and_time_is_noticed(data, tmp_path):
    folder = train(small(data, tmp_path / "run", epochs=1))
    rows, preprocess = read_rows(data), Preprocess((32, 32))
    cached = cache_fingerprint(rows, preprocess, np.arange(8))
    path = data / "train" / "00003.png"
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache_fingerprint(rows, preprocess, np.arange(8)) != cached
    with pytest.raises(UserError, match="images or masks have changed since this run began, though not in size"):
        train(small(data, folder, epochs=1, resume=True))
    assert "have changed since this run began" in typed("evaluate", folder, *QUICK)[2]
