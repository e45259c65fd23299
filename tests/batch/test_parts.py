"""`sightline predict` and `embed` to Parquet: each image once, restartable, the same files whoever computes them."""

import csv
import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import sightline
from sightline.batch import scoring
from sightline.batch.calibration import fit_temperature
from sightline.batch.embed import embed
from sightline.batch.parts import read_part, read_tables
from sightline.batch.scoring import unpack_sight
from sightline.config import Embed, Predict
from sightline.metrics.predictions import Predictions

from ..commands import copied, toy_pictures, typed
from ..small_runs import in_processes

QUICK = ("--device", "cpu", "--workers", 0, "--chunk", 10, "--batch", 4)


@pytest.fixture(scope="module")
def run(runs, tmp_path_factory) -> Path:
    """A run that may keep its reference."""
    return Path(shutil.copytree(runs / "erm-0", tmp_path_factory.mktemp("batch") / "run"))


@pytest.fixture(scope="module")
def images(toy, tmp_path_factory) -> Path:
    """25 images, one of them unreadable."""
    folder = toy_pictures(toy, tmp_path_factory.mktemp("pictures") / "birds", 24)
    (folder / "duck" / "broken.png").write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def whole(run, images, tmp_path_factory) -> Path:
    """The parts that one uninterrupted process writes."""
    out = tmp_path_factory.mktemp("whole") / "parts"
    code, printed, err = typed("predict", run, images, "--out", out, *QUICK)
    assert code == 1, err
    assert printed == f"Predictions: {out} (3 parts, 25 images)\n"
    assert "1 of 25 images could not be read" in err
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(folder: Path | str) -> list[dict]:
    return [row for table in read_tables(str(folder)) for row in table.to_pylist()]


def test_a_part_holds_what_is_predicted_of_every_image(run, images, whole):
    rows = rows_of(whole)
    assert [Path(row["image"]).name for row in rows] == [p.name for p in sorted(images.rglob("*.png"))]
    (broken,) = [row for row in rows if row["error"]]
    assert broken["image"].endswith("broken.png")
    assert "not a readable image" in broken["error"]
    assert {broken[name] for name in ("predicted", "probability", "coverage", "distance", "saw_nothing")} == {None}
    model = sightline.load(run)
    for row in rows:
        if row["error"] is None:
            prediction = model.predict(row["image"])
            assert row["predicted"] == prediction.name
            assert row["probabilities"] == pytest.approx(prediction.probabilities[0].tolist(), abs=1e-6)
            assert row["probability"] == max(row["probabilities"])
            assert (row["coverage"], row["saw_nothing"], row["intervention"]) == (1.0, False, None)
            assert 0 < row["distance"] < 100
            assert 0.5 <= row["calibrated"] <= 1
    _, facts = read_part(str(whole), "part-00000000.parquet")
    assert facts["classes"] == list(model.classes)
    assert rows[0]["weights"] == facts["weights"]


def test_any_number_of_shards_and_processes_writes_the_same_files(run, images, whole, tmp_path):
    for shard in ("1/2", "0/2"):
        typed("predict", run, images, "--out", tmp_path / "shards", "--shard", shard, *QUICK)
    assert contents(tmp_path / "shards") == contents(whole)
    codes, errors = in_processes(2, "predict", run, images, "--out", tmp_path / "two", *QUICK)
    assert set(codes) <= {0, 1}, errors
    assert contents(tmp_path / "two") == contents(whole)


def test_finished_parts_are_kept_and_all_others_are_computed_again(run, images, whole, tmp_path, monkeypatch):
    out = tmp_path / "parts"
    shutil.copytree(whole, out)
    damaged = bytearray((out / "part-00000001.parquet").read_bytes())
    damaged[len(damaged) // 4] ^= 1  # the footer is intact, a page is not
    (out / "part-00000001.parquet").write_bytes(damaged)
    (out / "part-00000002.parquet").unlink()
    kept = (out / "part-00000000.parquet").stat().st_mtime_ns
    _, _, err = typed("predict", run, images, "--out", out, *QUICK)
    assert "1 part are finished" not in err
    assert "1 part is finished already" in err
    assert contents(out) == contents(whole)
    assert (out / "part-00000000.parquet").stat().st_mtime_ns == kept

    (out / "part-00000000.parquet").write_bytes((out / "part-00000001.parquet").read_bytes())
    typed("predict", run, images, "--out", out, *QUICK)
    assert contents(out) == contents(whole), "a part of other images is no finished part"


def test_results_of_something_else_are_never_mixed(run, runs, images, whole, toy, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    fewer = toy_pictures(toy, tmp_path / "fewer", 5)
    for arguments, message in (
        ((runs / "erm-1", images, "--out", whole), "other weights"),
        ((run, fewer, "--out", whole), "other images, or images that have changed"),
        ((run, images, "--out", whole, "--chunk", 9), "another --chunk"),
        ((run, images, "--out", tmp_path / "notes"), "is not empty (thesis.txt)"),
        ((run, images, "--out", "s3x://bucket/x"), "unknown scheme s3x://"),
        ((run, images, "--out", "memory://b/x.csv"), "a URL holds one Parquet file per chunk"),
        ((run, images, "--out", tmp_path / "p.xlsx"), "unknown extension .xlsx"),
        ((run, images, "--out", tmp_path / "p.csv", "--shard", "0/2"), "--shard: needs a folder"),
        ((run, images, "--out", whole, "--shard", "2/2"), "must be i/n with i from 0 to n - 1"),
        ((run, images, "--out", whole, "--overlay", tmp_path / "o"), "--overlay: not with Parquet"),
        ((run, images, "--engine", "ray"), "--engine: needs a folder"),
    ):
        code, _, err = typed("predict", *arguments[:2], *QUICK, *arguments[2:])
        assert (code, message in err, len(err.strip().splitlines())) == (2, True, 1), err
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "mine"


def test_one_parquet_file_has_the_same_rows(run, images, whole, tmp_path):
    for _ in range(2):  # predictions may be overwritten
        code, _, err = typed("predict", run, images, "--out", tmp_path / "p.parquet", *QUICK)
        assert code == 1, err
    assert pq.read_table(tmp_path / "p.parquet").to_pylist() == rows_of(whole)
    pq.write_table(pq.read_table(tmp_path / "p.parquet").select(["image"]), tmp_path / "p.parquet")
    assert "is not of this command" in typed("predict", run, images, "--out", tmp_path / "p.parquet", *QUICK)[2]


def test_images_with_an_empty_sight_are_counted_and_named(run, images, tmp_path, monkeypatch):
    """One of the images, in the second chunk, is black, and nothing is seen where an image is black."""
    shutil.copytree(images, tmp_path / "birds")
    Image.new("RGB", (64, 64)).save(tmp_path / "birds" / "stork" / "black.png")
    real = scoring.Scorer.__call__

    def blind_to_black(self, batch):
        values = real(self, batch)
        values["saw_nothing"] = [bool(one.max() == 0) for one in batch]
        return values

    monkeypatch.setattr(scoring.Scorer, "__call__", blind_to_black)
    for out in ("p.parquet", "parts"):
        err = typed("predict", run, tmp_path / "birds", "--out", tmp_path / out, *QUICK)[2]
        assert "empty sight for 1 image" in err
    assert (
        f"such as {tmp_path}/birds/stork/black.png"
        in typed("predict", run, tmp_path / "birds", "--out", tmp_path / "p.parquet", *QUICK)[2]
    )


def test_a_run_and_its_results_may_be_at_urls(run, images, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for path in run.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/bucket/run/{path.relative_to(run)}", path.read_bytes())
    for _ in range(2):
        settings = {"chunk": 10, "batch": 4, "workers": 0, "device": "cpu"}
        table = sightline.predict(Predict("memory://bucket/run", (images,), out="memory://bucket/out", **settings))
        assert (table.images, table.unreadable) == (25, 1)
    (copy,) = (tmp_path / "cache" / "runs").iterdir()
    assert rows_of("memory://bucket/out") == rows_of(whole)
    (copy / "best.safetensors").write_bytes(b"damaged")
    assert sightline.load("memory://bucket/run").classes == ("duck", "stork")
    with pytest.raises(sightline.errors.UserError, match="not a run folder"):
        sightline.load("memory://bucket/nothing")


def test_embed_writes_features_and_sights(run, images, tmp_path):
    summary = embed(Embed(run, (images,), out=tmp_path / "e", chunk=10, batch=4, workers=0, device="cpu"))
    assert (summary.images, summary.unreadable, summary.parts) == (25, 1, 3)
    model = sightline.load(run)
    _, facts = read_part(str(tmp_path / "e"), "part-00000000.parquet")
    for row in [row for row in rows_of(tmp_path / "e") if row["error"] is None][::7]:
        prediction = model.predict(row["image"])
        torch.testing.assert_close(torch.tensor(row["features"]), prediction.tokens[0, 0], rtol=1e-4, atol=1e-5)
        sight = unpack_sight(row["sight"], facts["sight_size"])
        assert np.array_equal(sight, prediction.sight.visible(model.expects.size)[0].numpy())
    code, _, err = typed("embed", run, images, *QUICK)
    assert (code, "--out: missing" in err) == (2, True)


def test_temperature_recovers_the_one_that_logits_were_multiplied_by():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(4000, 3))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([generator.choice(3, p=p) for p in chances])
    predictions = Predictions.from_logits([str(i) for i in range(4000)], labels, 2.5 * logits, ("a", "b", "c"))
    fitted = fit_temperature(predictions)
    assert fitted["temperature"] == pytest.approx(2.5, rel=0.1)
    assert fitted["nll_calibrated"] < fitted["nll"]


def test_what_cannot_be_known_is_null_with_a_note(run, images, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    other = copied(run, tmp_path / "run", data=facts["data"] | {"path": str(tmp_path / "gone")})
    shutil.rmtree(other / "reference", ignore_errors=True)
    (other / "predictions" / "val.csv").unlink()
    _, _, err = typed("predict", other, images, "--out", tmp_path / "p.parquet", *QUICK)
    assert "no validation predictions" in err
    assert "distances to the training images are not measured" in err
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert {(row["calibrated"], row["distance"]) for row in rows} == {(None, None)}


def test_distance_is_small_for_training_images_and_large_for_noise(run, toy, tmp_path):
    with (toy / "rows.csv").open(newline="") as file:
        train = [toy / row["image"] for row in csv.DictReader(file) if row["split"] == "train"][:16]
    generator = np.random.default_rng(0)
    noise = tmp_path / "noise.png"
    Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(noise)
    typed("predict", run, *train, noise, "--out", tmp_path / "p.parquet", *QUICK)
    *known, other = (row["distance"] for row in pq.read_table(tmp_path / "p.parquet").to_pylist())
    assert np.median(known) == pytest.approx(1, abs=0.35)
    assert other > np.median(known)
