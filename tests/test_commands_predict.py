"""`predict` and `compare` as a user types them."""

import csv
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from sightline.load import load_as_trained as load
from sightline.predict import overlay_names
from sightline.sight import Sight

from .commands import copied, toy_pictures, typed


def test_predict_without_labels(runs, toy, tmp_path):
    code, out, _ = typed("predict", runs / "probe", toy / "test", "--device", "cpu", "--batch", 7)
    lines = list(csv.DictReader(out.splitlines()))
    assert (code, len(lines)) == (0, 48)
    assert set(lines[0]) == {"image", "predicted", "p_duck", "p_stork"}
    assert float(lines[0]["p_duck"]) + float(lines[0]["p_stork"]) == pytest.approx(1, abs=1e-5)
    with (runs / "probe" / "predictions" / "test.csv").open(newline="") as file:
        known = {row["image"]: row["predicted"] for row in csv.DictReader(file)}
    assert all(known[f"test/{line['image'].rpartition('/')[2]}"] == line["predicted"] for line in lines)

    code, _, _ = typed("predict", runs / "probe", toy / "test", "--device", "cpu", "--out", tmp_path / "p.json")
    assert len(json.loads((tmp_path / "p.json").read_text())) == 48
    code, _, err = typed("predict", runs / "probe", toy / "test", "--device", "cpu", "--overlay", tmp_path / "o")
    assert (code, "sees the whole image" in err) == (2, True)


def test_predict_takes_the_images_listed_in_a_table(runs, toy, tmp_path):
    with (toy / "rows.csv").open(newline="") as file:
        listed = [row["image"] for row in csv.DictReader(file)]
    code, out, err = typed("predict", runs / "probe", toy, "--device", "cpu")
    assert code == 0, err
    assert [row["image"] for row in csv.DictReader(out.splitlines())] == [str(toy / image) for image in listed]

    with zipfile.ZipFile(tmp_path / "birds.zip", "w") as archive:
        archive.write(toy / listed[1], "one.png")
    shutil.copy(toy / listed[0], tmp_path / "zero.png")
    (tmp_path / "new.csv").write_text("image,taken\nzero.png,may\nbirds.zip/one.png,june\n")
    code, few, err = typed("predict", runs / "probe", tmp_path / "new.csv", "--device", "cpu")
    assert code == 0, err
    predictions = list(csv.DictReader(few.splitlines()))
    assert [row.pop("image") for row in predictions] == [f"{tmp_path}/zero.png", f"{tmp_path}/birds.zip/one.png"]
    for one, other in zip(predictions, csv.DictReader(out.splitlines()), strict=False):
        assert one["predicted"] == other["predicted"]
        assert float(one["p_duck"]) == pytest.approx(float(other["p_duck"]), abs=1e-5)

    named = overlay_names([tmp_path / "may/1.png", tmp_path / "june/1.png"], [tmp_path / "new.csv"])
    assert named == [Path("may/1.png"), Path("june/1.png")]

    for text, message in (("image\n", "has no rows"), ("picture\nzero.png\n", "new.csv:1: no column 'image'")):
        (tmp_path / "new.csv").write_text(text)
        code, _, err = typed("predict", runs / "probe", tmp_path / "new.csv", "--device", "cpu")
        assert (code, message in err) == (2, True), err


def test_predict_overwrites_only_earlier_predictions(runs, toy, tmp_path):
    images = toy_pictures(toy, tmp_path / "birds", 2)
    for name, other in (("p.csv", "image,label\na.png,duck\n"), ("p.json", '{"mine": 1}'), ("q.json", "[1")):
        out = tmp_path / name
        command = ("predict", runs / "probe", images, "--device", "cpu", "--out", out)
        for _ in range(2):
            code, printed, err = typed(*command)
            assert (code, printed) == (0, f"Predictions: {out}\n"), err
        out.write_text(other)
        code, _, err = typed(*command)
        assert (code, f"{name}: exists, and is not of this command" in err) == (2, True), err
        assert out.read_text() == other


def test_damaged_images_are_reported_and_skipped(runs, toy, tmp_path):
    photos = toy_pictures(toy, tmp_path / "birds", 6)
    (photos / "duck" / "broken.png").write_text("not an image")
    out = tmp_path / "new" / "p.csv"
    code, _, err = typed("predict", runs / "probe", photos, "--device", "cpu", "--batch", 2, "--out", out)
    assert code == 1
    assert "broken.png: not a readable image" in err
    assert "1 of 7 images could not be read" in err
    assert len(out.read_text().splitlines()) == 7


def test_a_class_may_be_called_like_a_column(runs, toy, tmp_path):
    facts = json.loads((runs / "probe" / "run.json").read_text())
    facts["data"]["classes"] = ["image", "predicted"]
    run = copied(runs / "probe", tmp_path / "run", data=facts["data"])
    _, out, _ = typed("predict", run, toy / "test", "--device", "cpu")
    line = next(csv.DictReader(out.splitlines()))
    assert line["image"].endswith(".png")
    assert line["predicted"] in ("image", "predicted")


def test_overlays_of_images_with_the_same_name_are_all_kept(runs, toy, tmp_path, monkeypatch):
    photos = toy_pictures(toy, tmp_path / "birds", 4)
    first = min((photos / "duck").iterdir())
    with Image.open(first) as photo:
        photo.save(first.with_suffix(".bmp"))
    shutil.copy(first, tmp_path / "birds" / "stork" / first.name)
    method = type(load(runs / "probe").method)
    monkeypatch.setattr(method, "sees_everything", False)

    def narrowed(method, images):
        """Sees half of every image, but all of one that is alone in its batch."""
        keep = torch.ones(len(images), 2, 1, dtype=torch.bool)
        keep[:, 0] = len(images) == 1
        return Sight(keep=keep)

    monkeypatch.setattr(method, "look", narrowed)
    arguments = ("predict", runs / "probe", photos, first, "--device", "cpu", "--out", tmp_path / "p.csv")
    code, _, err = typed(*arguments, "--batch", 6, "--overlay", tmp_path / "seen")
    assert code == 0, err
    count = len((tmp_path / "p.csv").read_text().splitlines()) - 1
    drawn = sorted(path.relative_to(tmp_path / "seen") for path in (tmp_path / "seen").rglob("*.png"))
    assert count == len(drawn) == 7
    assert {Path("duck", f"{first.stem}{end}.png") for end in ("", "-2", "-3")} < {*drawn}
    assert Path("stork", f"{first.stem}.png") in drawn


def test_overlays_never_replace_the_images_they_are_drawn_from(runs, toy, tmp_path, monkeypatch):
    """Not even where these are overlays of an earlier command, which may be replaced otherwise."""
    method, photos, seen = (
        type(load(runs / "probe").method),
        toy_pictures(toy, tmp_path / "birds", 2),
        tmp_path / "seen",
    )
    monkeypatch.setattr(method, "sees_everything", False)
    command = ("predict", runs / "probe", "--device", "cpu", "--overlay", seen)
    for _ in range(2):
        code, _, err = typed(*command, photos)
        assert code == 0, err
    before = {path: path.read_bytes() for path in seen.rglob("*.png")}
    assert len(before) == 2
    code, _, err = typed(*command, seen)
    assert (code, "is an image, which this command reads; choose another file" in err) == (2, True), err
    assert {path: path.read_bytes() for path in seen.rglob("*.png")} == before


def test_an_opened_image_is_predicted_like_its_file(runs, tmp_path):
    noise = torch.randint(0, 256, (64, 80, 4), generator=torch.Generator().manual_seed(0)).byte().numpy()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise).save(tmp_path / "turned.png", exif=exif)
    model = load(runs / "probe")
    with Image.open(tmp_path / "turned.png") as image:
        assert torch.equal(model.predict(image).logits, model.predict(tmp_path / "turned.png").logits)


def test_compare_groups_runs_by_their_settings(runs, tmp_path):
    facts = json.loads((runs / "erm-1" / "run.json").read_text())
    spelled = facts["config"] | {"data": "elsewhere", "save_minutes": 99, "tracker": "wandb", "out": "x"}
    copy = copied(runs / "erm-1", tmp_path / "a" / "run", config=spelled)
    probe = copied(runs / "probe", tmp_path / "b" / "run")
    other = copied(runs / "erm-0", tmp_path / "c" / "run", config=facts["config"] | {"seed": 0, "lr": 1.0})
    out = tmp_path / "c.json"
    assert typed("compare", probe, copy, runs / "erm-0", other, "--out", out)[0] == 0
    names = [entry["name"] for entry in json.loads(out.read_text())["entries"]]
    assert names == ["b/run", "a/run and 1 more seed", "c/run"]

    code, _, err = typed("compare", probe, runs / "erm-1", copy)
    assert (code, "would count as two seeds; leave one out" in err) == (2, True)
    code, _, err = typed("compare", runs / "erm-0", copy)
    assert (code, "differ only in their seed" in err) == (2, True)
    counts = {"train": dict.fromkeys(facts["data"]["counts"]["train"], 7)}
    data = facts["data"] | {"counts": counts, "fingerprint": "other"}
    fewer = copied(runs / "erm-0", tmp_path / "d", data=data)
    _, printed, _ = typed("compare", probe, fewer)
    assert "training group sizes differ between the runs" in printed


def test_compare_counts_seeds_as_one_and_pairs_images(runs, tmp_path):
    code, out, _ = typed(
        "compare", runs / "probe", runs / "erm-0", runs / "erm-1", "--details", "--out", tmp_path / "c.json"
    )  # fmt: skip
    assert code == 0
    entries = json.loads((tmp_path / "c.json").read_text())["entries"]
    assert [entry["name"] for entry in entries] == ["probe", "erm-0 and 1 more seed"]
    assert "paired bootstrap" in " ".join(out.split())
    assert "Split 'test'" in out
    assert "note  erm-0 and 1 more seed: 2 seeds are few" in out
    assert all(entry["metrics"]["adjusted"] and entry["metrics"]["minority_worst_group"] for entry in entries)
    code, _, err = typed("compare", runs / "probe")
    assert (code, "at least two" in err) == (2, True)
