"""A cache at a URL: other machines find there what one has computed."""

import fsspec
import numpy as np
import pytest

import sightline
import sightline.data.cache as module
from sightline.config import Erm, Probe
from sightline.data.cache import Cache
from sightline.data.images import Preprocess
from sightline.data.shared_cache import is_shared, on_disk, url_of
from sightline.errors import UserError

from ..commands import typed
from .test_images import write_rows

PREPROCESS = Preprocess((15, 21))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Called with a name, this is the machine of that name: it has a disk of its own."""
    return lambda name: monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path / "disks" / name))


def stored(url: str) -> dict[str, bytes]:
    fs = fsspec.filesystem("memory")
    return {name.rpartition("/")[2]: fs.cat_file(name) for name in fs.find(url.removeprefix("memory:/"))}


def test_images_that_one_machine_has_decoded_are_fetched_by_another(machine, tmp_path, monkeypatch):
    rows, url = write_rows(tmp_path, 5), "memory://images/cache"
    machine("one")
    one = Cache.open(rows, PREPROCESS, url, np.arange(5))
    assert one.built
    assert list(stored(url)) == [one.path.name]
    machine("two")
    two = Cache.open(rows, PREPROCESS, url, np.arange(5))
    assert not two.built
    assert two.path != one.path
    assert two.images.equal(one.images)
    monkeypatch.setattr(module, "publish", lambda _: pytest.fail("only what is new is published"))
    assert not Cache.open(rows, PREPROCESS, url, np.arange(5)).built


def test_a_damaged_copy_at_the_url_is_replaced(machine, tmp_path):
    rows, url = write_rows(tmp_path, 5), "memory://damaged/cache"
    machine("one")
    one = Cache.open(rows, PREPROCESS, url, np.arange(5))
    good = stored(url)
    fsspec.filesystem("memory").pipe_file(f"/damaged/cache/{one.path.name}", b"damaged")
    machine("two")
    assert Cache.open(rows, PREPROCESS, url, np.arange(5)).built
    assert stored(url) == good


def test_training_uses_a_cache_at_a_url_for_images_and_features(machine, toy, tmp_path):
    results = []
    for number, name in enumerate(("one", "two")):
        machine(name)
        settings = {"backbone": "random:nano", "size": 32, "workers": 0, "device": "cpu", "batch": 16}
        out = tmp_path / name
        run = sightline.train(Probe(data=toy, out=out, cache="memory://training/cache", **settings))
        results.append((run / "predictions" / "test.csv").read_bytes())
        files = stored("memory://training/cache")
        if number == 0:
            first = files
    assert files == first, "the second machine has computed nothing new"
    assert {name.partition("-")[0] for name in files} == {"decoded", "features"}
    assert results[0] == results[1]
    code, _, err = typed(
        "train", "erm", toy, "--backbone", "random:nano", "--size", 32, "--epochs", 1, "--batch", 32, "--workers", 0,
        "--device", "cpu", "--out", tmp_path / "erm", "--cache", "memory://training/cache",
    )  # fmt: skip
    assert code == 0, err
    assert len(stored("memory://training/cache")) > len(files)


def test_a_cache_on_the_disk_belongs_to_no_url(tmp_path):
    assert on_disk(tmp_path) == tmp_path
    assert url_of(tmp_path / "decoded.bin") is None
    assert not is_shared(tmp_path)
    assert not is_shared(None)


def test_an_unknown_scheme_is_one_line(toy, tmp_path):
    with pytest.raises(UserError, match="unknown scheme s3x://") as error:
        on_disk("s3x://bucket/cache")
    assert "\n" not in str(error.value)
    assert Erm(data=toy, cache="s3://bucket/cache").cache == "s3://bucket/cache"
