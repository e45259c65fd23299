"""A flipped bit in weights, predictions, metrics, intervention or ONNX file is refused; in a cache it is repaired."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sightline.config import Evaluate
from sightline.console import checksums
from sightline.console.checksums import check_checksum, replace_with_checksum
from sightline.data.cache import Cache
from sightline.data.images import Preprocess
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.export.push import files_to_publish
from sightline.load import load_as_trained
from sightline.training.checkpoint import load_cached, load_tensors, save_tensors
from sightline.vit.checksums import KEY, stored_checksum
from sightline.vit.weights import load_backbone, save_backbone

from ..commands import QUICK, SMALL, typed
from ..conftest import small_vit


def flip(path, at):
    """Flip one bit, and keep the time of the last change."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[at] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def save(path, text):
    replace_with_checksum(path, lambda partial: partial.write_text(text))


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "erm-0", tmp_path / "run")


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", ["best", "last"])
def test_a_flipped_bit_in_weights_is_refused(run, name, part):
    path = run / f"{name}.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, 8 + header + int(part * (path.stat().st_size - 8 - header)))
    with pytest.raises(UserError, match=r"damaged: its content does not match its checksum; restore it"):
        load_tensors(path)


def test_every_bit_of_a_weights_file_counts(tmp_path):
    """In the header, too: flipping any bit is refused, or leaves tensors and facts as they are."""
    path = tmp_path / "w.safetensors"
    tensors = {"a": torch.arange(3.0), "b": torch.arange(2, dtype=torch.bfloat16)}
    save_tensors(path, tensors, {"epoch": 3})
    whole, refused = path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found, facts = load_tensors(path)
        except UserError:
            refused += 1
        else:
            assert facts == {"epoch": 3}
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert refused > 0.9 * 8 * len(whole)


@pytest.mark.parametrize("name", ["predictions/test.csv", "metrics.json"])
def test_a_flipped_bit_in_results_is_refused_by_every_reader(run, runs, name):
    content = (run / name).read_bytes()
    flip(run / name, content.index(b"0.") + 3)
    code, _, err = typed("compare", run, runs / "probe")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{run / name}: damaged, or changed by hand (then remove" in err
    (run / "metrics.json").unlink()
    assert typed("evaluate", run, *QUICK)[0] == 0, "they are made again"
    assert typed("compare", run, runs / "probe")[0] == 0


def test_results_are_bound_to_the_weights(run, runs):
    shutil.copy(runs / "erm-1" / "best.safetensors", run / "best.safetensors")
    code, _, err = typed("compare", run, runs / "probe")
    assert (code, "is of other weights than best.safetensors; evaluate again" in err) == (2, True)
    model, command = load_as_trained(run), type("Push", (), {"images": (), "limit": 2})()
    with pytest.raises(UserError, match="is of other weights"):
        files_to_publish(model, command)
    typed("evaluate", run, *QUICK)
    content = json.loads((run / "metrics.json").read_text())
    assert set(content["splits"]) == {"test"}, "validation results of the other weights are gone"
    assert content["weights_sha256"] == stored_checksum(run / "best.safetensors")
    assert typed("compare", run, runs / "probe")[0] == 0


def test_results_of_one_split_are_not_taken_for_another_file(run, runs):
    shutil.copy(runs / "erm-1" / "predictions" / "test.csv", run / "predictions" / "test.csv")
    shutil.copy(runs / "erm-1" / "predictions" / "test.csv.sha256", run / "predictions" / "test.csv.sha256")
    assert "is not about the predictions in" in typed("compare", run, runs / "probe")[2]


def strip(path):
    """Write weights as other programs do: the same tensors and texts, without the checksum."""
    with safe_open(str(path), framework="pt") as file:
        texts = {name: text for name, text in file.metadata().items() if name != KEY}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, texts)
    assert stored_checksum(path) is None


def test_weights_that_lost_their_checksum_are_refused(run, runs):
    """Because run.json says that they were written with one; results know them by it, too."""
    strip(run / "best.safetensors")
    for command in (("predict", run, "x.png"), ("evaluate", run, *QUICK), ("export", run)):
        code, _, err = typed(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert "damaged: it was written with a checksum, and has none; restore it, or train again" in err
    assert "is of other weights than best.safetensors" in typed("compare", run, runs / "probe")[2]


def test_a_training_is_not_resumed_from_a_checkpoint_that_lost_its_checksum(run, toy):
    strip(run / "last.safetensors")
    code, _, err = typed("train", "erm", toy, *SMALL, "--epochs", 1, "--out", run, "--resume")
    assert (code, f"{run / 'last.safetensors'}: damaged: it was written with a checksum" in err) == (2, True), err


def test_a_cache_without_checksum_is_computed_again(tmp_path, capsys):
    path = tmp_path / "cached.safetensors"
    save_tensors(path, {"features": torch.rand(3, 4)}, {})
    assert load_cached(path) is not None
    strip(path)
    assert load_cached(path) is None
    assert "damaged; it is computed again" in capsys.readouterr().err


def test_backbones_need_no_checksum(tmp_path):
    """Those of other programs have none."""
    save_backbone(small_vit(), tmp_path / "tiny.safetensors")
    strip(tmp_path / "tiny.safetensors")
    assert load_backbone(tmp_path / "tiny.safetensors").config == small_vit().config


def test_runs_without_checksums_are_still_read(run, runs, toy):
    """As of earlier versions."""
    for mark in run.rglob("*.sha256"):
        mark.unlink()
    strip(run / "best.safetensors")
    facts = json.loads((run / "run.json").read_text())
    assert facts.pop("checksums") is True
    (run / "run.json").write_text(json.dumps(facts))
    content = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({"selected_by": "balanced", "splits": content["splits"]}))
    assert typed("compare", run, runs / "probe")[0] == 0
    assert load_as_trained(run).classes
    assert Evaluate(run).run == run


# ---- the checksum file -----------------------------------------------------------------------------------------------


def test_the_checksum_file_is_that_of_sha256sum(tmp_path):
    save(tmp_path / "a.csv", "x")
    done = subprocess.run(["sha256sum", "--check", "a.csv.sha256"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "a.csv: OK\n"


@pytest.mark.parametrize("earlier", ["with", "without"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_between_file_and_checksum_leaves_a_file_that_matches(tmp_path, monkeypatch, after, earlier):
    """Killed at each of the three renames."""
    path, renames, real = tmp_path / "a.csv", [], type(tmp_path).replace
    if earlier == "with":
        save(path, "old")
    else:
        path.write_text("old")

    class Killed(BaseException):
        pass

    def replace(self, target):
        if len(renames) == after:
            raise Killed
        renames.append(target)
        return real(self, target)

    monkeypatch.setattr(type(tmp_path), "replace", replace)
    with pytest.raises(Killed):
        save(path, "new")
    check_checksum(path, "")
    assert path.read_text() == ("new" if after == 2 else "old")


def test_a_large_file_is_not_read_into_memory(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(type(tmp_path), "read_bytes", lambda _: pytest.fail("read at once"))
    assert checksums.file_sha256(tmp_path / "a").startswith("30e14955")


# ---- caches ----------------------------------------------------------------------------------------------------------


def cache_of(toy, folder) -> Cache:
    rows = read_rows(toy)
    return Cache.open(rows, Preprocess((32, 32)), folder, rows.split_indices("val")[:8], workers=1)


@pytest.mark.parametrize("where", ["image", "mask"])
def test_a_damaged_record_of_a_cache_is_decoded_again(toy, tmp_path, capsys, where):
    first = cache_of(toy, tmp_path)
    at = np.arange(8)
    images, masks, whole = first.read_images(at).clone(), first.read_masks(at), first.path.read_bytes()
    flip(first.path, 3 * 32 * 32 * 5 + 100 if where == "image" else 3 * 32 * 32 * 8 + 5 * 128 + 3)
    again = cache_of(toy, tmp_path)
    assert not again.built
    assert torch.equal(again.read_masks(at), masks)
    assert torch.equal(again.read_images(at), images)
    assert capsys.readouterr().err.count("was damaged; decoded again") == 1
    assert first.path.read_bytes() == whole


def test_a_cache_with_damaged_sizes_is_built_again(toy, tmp_path, capsys):
    first = cache_of(toy, tmp_path)
    whole = first.path.read_bytes()
    flip(first.path, len(whole) - 4 - 8 * 12 + 2)
    assert cache_of(toy, tmp_path).built
    assert "damaged; the images are decoded again" in capsys.readouterr().err
    assert first.path.read_bytes() == whole


def test_damaged_features_are_computed_again(tmp_path, capsys):
    save_tensors(tmp_path / "f.safetensors", {"features": torch.zeros(100)}, {})
    assert load_cached(tmp_path / "f.safetensors")["features"].shape == (100,)
    flip(tmp_path / "f.safetensors", -9)
    assert load_cached(tmp_path / "f.safetensors") is None
    assert load_cached(tmp_path / "none.safetensors") is None
    assert capsys.readouterr().err.count("damaged; it is computed again") == 1


def test_the_same_content_is_always_the_same_bytes(tmp_path):
    """safetensors alone orders its metadata at random."""
    for i in range(8):
        save_tensors(
            tmp_path / f"{i}.safetensors", {"a": torch.arange(3.0), "é": torch.ones(2, 2)}, {"grün": '\x1f"\\'}
        )
    assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(8)}) == 1
    tensors, facts = load_tensors(tmp_path / "0.safetensors")
    assert torch.equal(tensors["é"], torch.ones(2, 2))
    assert facts == {"grün": '\x1f"\\'}
