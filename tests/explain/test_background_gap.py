"""The background gap from images to the table: on birds with mixed backgrounds, and on ImageNet-9."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from sightline.datasets.imagenet import IMAGENET9_CLASSES

from ..commands import QUICK, SMALL, typed
from ..conftest import shared
from ..datasets.published import put, released_map

CHIHUAHUA, TISSUE = "n02085620", "n15075141"  # a dog, and one that is none of the nine


def prediction_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions" / "test.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())["splits"]["test"]


def right(lines: list[dict[str, str]], background: str) -> float:
    """The fraction of correct predictions on these backgrounds."""
    those = [line for line in lines if line["group"].endswith(background)]
    return sum(line["label"] == line["predicted"] for line in those) / len(those)


# ---- birds on mixed backgrounds --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def birds(tmp_path_factory) -> Path:
    """Two runs on the real birds, cut out and put on scenes."""
    packs, folder = shared("data"), tmp_path_factory.mktemp("birds")
    built = typed(
        "data", "mixed", "--cub", packs, "--scenes", packs, "--out", folder / "set", "--limit", 80, "--workers", 1
    )
    assert built[0] == 0, built[2]
    for method, *more in (("erm", "--epochs", 1), ("probe",)):
        code, _, err = typed("train", method, folder / "set", *SMALL, *more, "--out", folder / method)
        assert code == 0, err
    return folder


def test_evaluate_shows_the_gap_on_mixed_birds_with_n_and_interval(birds):
    code, out, _ = typed("evaluate", birds / "erm", "--details", *QUICK)
    assert code == 0
    lines, gap = prediction_rows(birds / "erm"), metrics(birds / "erm")["background_gap"]
    assert gap["value"] == pytest.approx(right(lines, "/same") - right(lines, "/rand"), abs=1e-6)
    assert gap["n"] == sum(line["group"].endswith(("/same", "/rand")) for line in lines) == 62
    assert -1 <= gap["low"] < gap["value"] < gap["high"] <= 1
    (row,) = [line for line in out.splitlines() if line.startswith("Background gap (same − random)")]
    assert row.split("  ", 1)[1].split() == [
        f"{100 * gap['value']:+.1f}", "points", f"[{100 * gap['low']:.1f},", f"{100 * gap['high']:.1f}]", "62",
    ]  # fmt: skip


def test_compare_shows_the_gap_of_each_run(birds, tmp_path):
    code, out, err = typed("compare", birds / "erm", birds / "probe", "--out", tmp_path / "c.json")
    assert code == 0, err
    assert "background gap" in out
    for entry in json.loads((tmp_path / "c.json").read_text())["entries"]:
        gap = metrics(birds / entry["name"])["background_gap"]
        assert entry["metrics"]["background_gap"] == gap
        (row,) = [line for line in out.splitlines() if line.startswith(entry["name"])]
        assert f"{100 * gap['value']:+.1f} points" in row


# ---- ImageNet-9, answered by a model of 1,000 classes ----------------------------------------------------------------


def paint(file: Path, colour: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), colour).save(file, "PNG")


@pytest.fixture(scope="module")
def challenge(tmp_path_factory) -> Path:
    """Three images of each class. All are blue, but for two of the dogs on random backgrounds, which are red."""
    folder = tmp_path_factory.mktemp("challenge") / "bg_challenge"
    for variant in ("mixed_same", "mixed_rand"):
        for number, name in enumerate(IMAGENET9_CLASSES):
            for i in range(3):
                red = variant == "mixed_rand" and name == "dog" and i > 0
                paint(folder / variant / "val" / f"{number:02}_{name}" / f"{i}.JPEG", "red" if red else "blue")
    return folder


@pytest.fixture(scope="module")
def thousand(tmp_path_factory) -> Path:
    """Two runs with ImageNet's classes, which have learnt that what is blue is a dog, and what is red is tissue."""
    folder = tmp_path_factory.mktemp("thousand")
    for split, count in (("train", 6), ("val", 2)):
        for wnid, colour in ((CHIHUAHUA, "blue"), (TISSUE, "red")):
            for i in range(count):
                paint(folder / "data" / split / wnid / f"{split}{i}.JPEG", colour)
    for name, *more in (("tuned",), ("plain", "--untuned")):
        arguments = ("train", "probe", folder / "data", *SMALL, *more, "--layout", "imagenet", "--out", folder / name)
        code, _, err = typed(*arguments)
        assert code == 0, err
    return folder


def evaluated(run: Path, challenge: Path, variant: str) -> tuple[Path, str]:
    code, out, err = typed("evaluate", run, challenge, "--layout", f"imagenet9:{variant}", *QUICK)
    assert code == 0, err
    (folder,) = run.glob(f"on-bg_challenge-{variant}-*")
    return folder, out


def test_without_the_released_map_predictions_of_1000_classes_are_refused(thousand, challenge):
    (challenge / "in_to_in9.json").unlink(missing_ok=True)
    code, _, err = typed("evaluate", thousand / "tuned", challenge, "--layout", "imagenet9:mixed_same", *QUICK)
    assert (code, "no in_to_in9.json here or above" in err) == (2, True)


def test_1000_classes_are_mapped_to_nine_by_the_released_map(thousand, challenge):
    put(challenge, "in_to_in9.json", content=json.dumps(released_map()))
    for variant, dogs in (("mixed_same", 3), ("mixed_rand", 1)):
        folder, out = evaluated(thousand / "tuned", challenge, variant)
        lines = prediction_rows(folder)
        assert {line["label"] for line in lines} == set(IMAGENET9_CLASSES)
        assert [name for name in lines[0] if name.startswith("p_")] == [f"p_{name}" for name in IMAGENET9_CLASSES]
        predicted = {line["image"]: line["predicted"] for line in lines if line["label"] == "dog"}
        assert [*predicted.values()] == ["dog"] * dogs + [""] * (3 - dogs)
        assert metrics(folder)["accuracy"]["value"] == pytest.approx(dogs / 27)
        assert metrics(folder)["classes"]["dog"]["value"] == pytest.approx(dogs / 3)
        assert f"variant {variant}" in out
        assert "for the background gap, evaluate with --layout imagenet9:mixed" in out


def test_the_gap_of_imagenet9_is_that_of_its_two_evaluations(thousand, challenge, tmp_path):
    put(challenge, "in_to_in9.json", content=json.dumps(released_map()))
    parts = {name: metrics(evaluated(thousand / "tuned", challenge, f"mixed_{name}")[0]) for name in ("same", "rand")}
    folders = {name: evaluated(thousand / name, challenge, "mixed")[0] for name in ("tuned", "plain")}
    gap = metrics(folders["tuned"])["background_gap"]
    assert gap["value"] == pytest.approx(parts["same"]["accuracy"]["value"] - parts["rand"]["accuracy"]["value"])
    assert gap["value"] == pytest.approx(2 / 27)
    assert (gap["n"], gap["difference"]) == (54, True)
    assert gap["low"] < gap["value"] < gap["high"]

    code, out, err = typed("compare", *folders.values(), "--out", tmp_path / "c.json")
    assert code == 0, err
    assert out.count("+7.4 points") == 2
    names = [entry["name"] for entry in json.loads((tmp_path / "c.json").read_text())["entries"]]
    assert [Path(name).parent.name for name in names] == ["tuned", "plain"]


def test_a_gap_needs_both_backgrounds(thousand, challenge, tmp_path):
    (challenge / "mixed_rand").rename(tmp_path / "aside")
    code, _, err = typed("evaluate", thousand / "tuned", challenge, "--layout", "imagenet9:mixed", *QUICK)
    (tmp_path / "aside").rename(challenge / "mixed_rand")
    assert (code, "expected mixed_rand/val/00_dog" in err) == (2, True)
