"""`sightline check`: problems are found and reported, good data give no findings."""

import csv
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.check import CheckReport, check, cramers_v
from sightline.data.rows import Rows, name_groups, read_rows
from sightline.datasets.toy_images import make_toy
from sightline.metrics.intervals import wilson
from tests.conftest import shared


@pytest.fixture(scope="module")
def toy_images() -> list[Image.Image]:
    toy = make_toy(24, size=64, seed=3)
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in toy.images]


def texts(report: CheckReport, topic: str, severity: str | None = None) -> list[str]:
    return [f.text for f in report.findings if f.topic == topic and severity in (None, f.severity)]


def items(report: CheckReport, part: str) -> tuple[str, ...]:
    """Of the one finding whose text contains `part`."""
    (finding,) = [f for f in report.findings if part in f.text]
    return finding.items


def table_rows(*cells: tuple[str, str, str, int], root: Path = Path("none")) -> Rows:
    """Rows from (split, label, attribute, count)."""
    classes = tuple(sorted({label for _, label, _, _ in cells}))
    values = tuple(sorted({attribute for _, _, attribute, _ in cells}))
    counts = [n for *_, n in cells]
    labels, attributes, splits = (
        np.repeat(column, counts)
        for column in (
            [classes.index(label) for _, label, _, _ in cells],
            [values.index(attribute) for _, _, attribute, _ in cells],
            [("train", "val", "test").index(split) for split, _, _, _ in cells],
        )
    )
    groups, names = name_groups(labels, classes, attributes, values)
    images = [f"{i}.png" for i in range(len(labels))]
    return Rows("table", root, images, labels, classes, splits.astype(np.int8), groups, names)


def saved_rows(root: Path, images: list[Image.Image], splits: list[int], **columns) -> Rows:
    for i, image in enumerate(images):
        image.save(root / f"{i}.png")
    names = [f"{i}.png" for i in range(len(images))]
    labels = np.arange(len(images)) % 2
    return Rows("saved", root, names, labels, ("cat", "dog"), np.array(splits, np.int8), **columns)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_good_data_have_no_findings(tmp_path, toy_images):
    (tmp_path / "masks").mkdir()
    half = np.zeros((64, 64), bool)
    half[:, :32] = True
    for i in range(len(toy_images)):
        Image.fromarray(half).save(tmp_path / "masks" / f"{i}.png")
    box = np.array([[0, 0, 64, 64]], np.float32)
    rows = saved_rows(tmp_path, toy_images, [0, 0, 1, 1, 2, 2] * 4, boxes=[box] * 24)
    rows = replace(rows, masks=[f"masks/{i}.png" for i in range(24)])
    report = check(rows)
    assert report.ok
    assert {f.topic for f in report.findings} == {"groups"}  # 4 images per group are few
    assert report.lines()[-1] == "ok: 0 errors, 2 warnings"


def test_the_strength_of_the_shortcut_is_reported():
    cells = [("train", "land", "forest", 3525), ("train", "land", "sea", 186)]
    cells += [("train", "water", "forest", 54), ("train", "water", "sea", 1030)]
    (finding,) = [f for f in check(table_rows(*cells), open_images=False).findings if f.topic == "association"]
    assert finding.severity == "warning"
    assert "predicting the label from the group alone has accuracy 95.0% (94.3% to 95.6%, n = 4,795" in finding.text
    assert "majority class 77.4%" in finding.text
    assert "the largest group, land/forest, holds 73.5%" in finding.text
    assert finding.values["label_from_group"] == pytest.approx(4555 / 4795)
    assert finding.values["cramers_v"] == pytest.approx(0.8658, abs=1e-3)


def test_cramers_v_at_its_extremes_and_against_phi():
    assert cramers_v(np.array([[50, 0], [0, 50]])) == pytest.approx(1)
    assert cramers_v(np.array([[20, 30], [40, 60]])) == pytest.approx(0)
    assert cramers_v(np.array([[20, 30]])) == 0
    assert cramers_v(np.array([[9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 0, 0]])) == pytest.approx(1)
    a, b, c, d = 30, 10, 5, 55
    phi = (a * d - b * c) / np.sqrt((a + b) * (c + d) * (a + c) * (b + d))
    assert cramers_v(np.array([[a, b], [c, d]])) == pytest.approx(phi)


def test_no_shortcut_gives_no_warning():
    balanced = table_rows(*(("train", label, background, 50) for label in "ab" for background in "xy"))
    (finding,) = [f for f in check(balanced, open_images=False).findings if f.topic == "association"]
    assert finding.severity == "info"
    assert finding.values["cramers_v"] == pytest.approx(0)
    one_background = table_rows(("train", "a", "x", 5), ("train", "b", "x", 5))
    assert texts(check(one_background, open_images=False), "association") == [
        "train has only one label or one kind of group: no shortcut to measure"
    ]


def test_groups_confounded_with_the_label_are_reported():
    rows = table_rows(
        ("train", "a", "0", 50), ("train", "a", "1", 50), ("train", "b", "2", 50), ("train", "b", "3", 50)
    )
    report = check(rows, open_images=False)
    assert "Every group has one label only" in texts(report, "association", "warning")[0]
    assert not any("in no split" in text for text in texts(report, "groups"))


def test_small_groups_are_reported_with_their_interval():
    cells = [(split, label, background, 200) for split in ("train", "val") for label in "ab" for background in "xy"]
    cells += [("test", "a", "x", 400), ("test", "a", "y", 36), ("test", "b", "x", 38)]
    report = check(table_rows(*cells), open_images=False)
    assert report.ok is False  # the files do not exist; small groups are warnings
    low, high = wilson(32, 36)
    item = f"a/y: n = 36; accuracy 32/36 would mean {low:.0%} to {high:.0%}"
    assert items(report, "test: 1 of 4 groups too small to conclude") == (item,)
    (finding,) = [f for f in report.findings if "too small" in f.text]
    assert finding.values["a/y"]["width"] == pytest.approx(high - low)
    assert items(report, "test: 1 group without rows: cannot be evaluated") == ("b/y",)
    assert not any(text.startswith(("train", "val")) for text in texts(report, "groups"))


def test_missing_combinations_are_listed():
    rows = table_rows(("train", "a", "x", 9), ("train", "a", "y", 9), ("train", "b", "x", 9))
    assert items(check(rows, open_images=False), "in no split") == ("b/y",)


def test_missing_classes():
    rows = table_rows(("train", "a", "x", 50), ("train", "b", "x", 50), ("test", "c", "x", 50), ("test", "a", "x", 50))
    rows = replace(rows, classes=("a", "b", "c", "d"), groups=None, group_names=())
    report = check(rows, open_images=False)
    assert items(report, "train: 1 class without rows cannot be learned") == ("c",)
    assert items(report, "test: 1 class without rows cannot be evaluated") == ("b",)
    assert texts(report, "classes", "error") == ["train: 1 class without rows cannot be learned"]
    assert "1 class without rows" in texts(report, "classes", "info")
    assert not any(text.startswith("val") for text in texts(report, "classes"))
    assert (
        "all rows have the same label" in texts(check(rows.take(range(50)), open_images=False), "classes", "error")[0]
    )


def test_missing_and_empty_files_are_listed_without_opening_any(tmp_path, toy_images, monkeypatch):
    monkeypatch.setattr("sightline.data.inspection.read_row_image", lambda *_: pytest.fail("opened"))
    rows = saved_rows(tmp_path, toy_images[:16], [0] * 16)
    for i in range(12):
        (tmp_path / f"{i}.png").unlink()
    (tmp_path / "13.png").write_bytes(b"")
    (tmp_path / "14.png").unlink()
    (tmp_path / "14.png").mkdir()
    report = check(rows, open_images=False)
    assert not report.ok
    assert items(report, "13 of 16 images are missing; paths are relative to") == (
        *(f"{i}.png" for i in range(12)),
        "14.png",
    )
    assert items(report, "1 of 16 images are empty files") == ("13.png",)
    lines = report.lines()
    assert "         - 9.png" in lines
    assert "         - 10.png" not in lines
    assert "         … and 3 more" in lines
    assert len(report.to_dict()["findings"][0]["items"]) == 13


def test_backslashes_are_recognised(tmp_path):
    rows = Rows("w", tmp_path, ["a\\1.png", "a\\2.png"], np.array([0, 1]), ("a", "b"), np.zeros(2, np.int8))
    assert "separate folders by /" in texts(check(rows), "files")[0]


def test_an_image_in_two_splits_is_an_error():
    rows = table_rows(("train", "a", "x", 3), ("test", "b", "y", 3))
    rows.images[5] = rows.images[0]
    assert items(check(rows, open_images=False), "1 row with an image that is also in another split") == (
        "0.png: train and test",
    )


def test_notes_are_reported_and_the_json_is_complete(tmp_path):
    rows = replace(table_rows(("train", "a", "x", 3), ("test", "b", "y", 3)), notes=("val was taken from train",))
    report = check(rows, open_images=False)
    content = json.loads(json.dumps(report.to_dict()))
    assert content["counts"] == {
        "train": {"a/x": 3, "b/y": 0},
        "val": {"a/x": 0, "b/y": 0},
        "test": {"a/x": 0, "b/y": 3},
    }
    assert (content["ok"], content["classes"], content["groups"], content["name"]) == (False, 2, 2, "table")
    assert [f["text"] for f in content["findings"]] == [f.text for f in report.findings]
    assert "info     val was taken from train" in report.lines()
    order = [f.severity for f in report.findings]
    assert order == sorted(order, key=["error", "warning", "info"].index)


def test_without_opening_images_torch_is_not_imported(tmp_path):
    """The memory target for a million rows is without it."""
    (tmp_path / "rows.csv").write_text("image,label\n1.png,a\n2.png,b\n")
    code = (
        "import sys; from sightline.data.check import check; from sightline.data.rows import read_rows, fingerprint;"
        f"rows = read_rows({str(tmp_path)!r}); check(rows, open_images=False).lines(); fingerprint(rows);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- images ----------------------------------------------------------------------------------------------------------


def test_damaged_files_are_reported_with_the_reason(tmp_path, toy_images):
    rows = saved_rows(tmp_path, toy_images[:8], [0, 1, 2, 0, 1, 2, 0, 1])
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "2.png").write_text("<html>not found</html>")
    (tmp_path / "3.png").unlink()
    report = check(rows)
    damaged = items(report, "2 of 7 images cannot be read")
    assert damaged[0].startswith("1.png: damaged image (")
    assert damaged[1].startswith("2.png: not a readable image")
    assert items(report, "1 of 8 images are missing") == ("3.png",)
    assert not report.ok


def test_an_unexpected_decoder_error_does_not_stop_the_check(tmp_path, toy_images, monkeypatch):
    rows = saved_rows(tmp_path, toy_images[:3], [0, 0, 0])
    read = sys.modules["sightline.data.images"].read_row_image

    def failing_decoder(rows: Rows, i: int) -> Image.Image:
        if i == 1:
            raise ZeroDivisionError("tile of no width")
        return read(rows, i)

    monkeypatch.setattr("sightline.data.inspection.read_row_image", failing_decoder)
    assert items(check(rows), "cannot be read") == ("1.png: cannot be decoded (ZeroDivisionError: tile of no width)",)


def test_unusual_formats_are_counted_and_no_problem(tmp_path, toy_images):
    colour = toy_images[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    colour.convert("L").save(tmp_path / "grey.png")
    Image.fromarray(np.asarray(colour.convert("L")).astype(np.uint16) * 257).save(tmp_path / "deep.png")
    colour.save(tmp_path / "turned.jpg", exif=exif)
    colour.save(tmp_path / "turned.png", exif=exif)
    colour.convert("RGBA").save(tmp_path / "clear.png")
    colour.convert("CMYK").save(tmp_path / "print.jpg")
    colour.save(tmp_path / "moving.gif", save_all=True, append_images=toy_images[1:3])
    colour.save(tmp_path / "plain.jpg")
    images = sorted(path.name for path in tmp_path.iterdir())
    labels = np.arange(8) % 2
    report = check(Rows("kinds", tmp_path, images, labels, ("a", "b"), np.zeros(8, np.int8)))
    (finding,) = [f for f in report.findings if f.topic == "images"]
    assert finding.severity == "info"
    counts = {"grey": 1, "16-bit": 1, "turned by EXIF": 2, "transparent": 1, "CMYK": 1, "animated": 1}
    assert finding.values == counts
    assert report.ok


def test_12_bit_values_in_16_bit_files_are_reported(tmp_path, toy_images):
    rows = saved_rows(tmp_path, toy_images[:4], [0] * 4)
    shades = np.asarray(toy_images[0].convert("L")).astype(np.uint16)
    Image.fromarray(shades * 16).save(tmp_path / "1.png")
    Image.fromarray(shades * 257).save(tmp_path / "2.png")
    (finding,) = [f for f in check(rows).findings if "nearly black" in f.text]
    assert finding.severity == "warning"
    assert finding.text.startswith("1 of 4 images are 16-bit files with no value above 4095")
    assert finding.items == (f"1.png: at most {16 * shades.max()}",)


def test_mask_problems(tmp_path, toy_images):
    def mask(name: str, size: tuple[int, int], until: int) -> str:
        values = np.zeros(size[::-1], bool)
        values[:until] = True
        Image.fromarray(values).save(tmp_path / name)
        return name

    names = [mask("m0.png", (64, 64), 9), mask("m1.png", (64, 48), 9), mask("m2.png", (32, 32), 9)]
    names += [mask("m3.png", (64, 64), 0), mask("m4.png", (64, 64), 64), "", "absent.png", "m7.png"]
    (tmp_path / "m7.png").write_text("no mask")
    rows = saved_rows(tmp_path, toy_images[:8], [0] * 8, masks=names)
    report = check(rows)
    assert items(report, "mask of another aspect ratio") == ("1.png: 64×64, mask 64×48",)
    assert items(report, "mask of another resolution") == ("2.png: 64×64, mask 32×32",)
    assert items(report, "empty mask") == ("3.png",)
    assert items(report, "covers the whole image") == ("4.png",)
    assert items(report, "1 of 8 masks are missing") == ("absent.png",)
    (damaged,) = items(report, "a mask that cannot be read")
    assert damaged.startswith("7.png: ")
    assert "m7.png: not a readable image" in damaged
    assert len(texts(report, "masks", "error")) == 1


def test_box_problems(tmp_path, toy_images):
    given = [
        [[0, 0, 64, 64]],
        [[-1, 0, 65, 64]],
        [[10, 10, 70, 20]],
        [[64, 0, 80, 9]],
        [[1, 1, 2, 2], [0, -9, 5, -1]],
        [],
    ]
    boxes = [np.array(boxes, np.float32).reshape(-1, 4) for boxes in given]
    report = check(saved_rows(tmp_path, toy_images[:6], [0] * 6, boxes=boxes))
    assert items(report, "exceeds the image") == ("2.png: 10 10 70 20 in 64×64",)
    assert items(report, "box outside the image") == ("3.png: 64 0 80 9 in 64×64", "4.png: 0 -9 5 -1 in 64×64")


def test_boxes_refer_to_the_upright_image(tmp_path, toy_images):
    exif = Image.Exif()
    exif[0x0112] = 6
    toy_images[0].resize((60, 40)).save(tmp_path / "0.jpg", exif=exif)
    boxes = [np.array([[0, 0, 40, 60]], np.float32)]
    rows = Rows("turned", tmp_path, ["0.jpg"], np.array([0]), ("a",), np.zeros(1, np.int8), boxes=boxes)
    assert not texts(check(rows), "boxes")


def test_near_duplicates_are_reported_across_splits_only(tmp_path, toy_images):
    copy = toy_images[0].resize((48, 48), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    toy_images[1].save(buffer, "JPEG", quality=60)
    shown = [*toy_images[:6], copy, Image.open(buffer), toy_images[2].copy()]
    rows = saved_rows(tmp_path, shown, [0, 0, 0, 1, 2, 2, 2, 1, 0])
    report = check(rows)
    assert items(report, "1 of 3 test images are near-duplicates of one in train") == ("6.png like 0.png",)
    assert items(report, "1 of 2 val images are near-duplicates of one in train") == ("7.png like 1.png",)
    assert len(texts(report, "duplicates", "warning")) == 2
    rows.labels[6] = 1
    assert items(check(rows), "test images are near-duplicates") == ("6.png like 0.png, labelled dog and cat",)


def test_one_file_in_two_splits_is_reported_once(tmp_path, toy_images):
    rows = saved_rows(tmp_path, toy_images[:4], [0, 0, 2, 2])
    rows.images[2] = "0.png"
    assert len(texts(check(rows), "duplicates")) == 1


def test_images_of_one_colour_are_not_duplicates(tmp_path):
    shown = [Image.new("RGB", (20, 20), colour) for colour in ("black", "white", "red")]
    report = check(saved_rows(tmp_path, shown, [0, 1, 2]))
    assert texts(report, "duplicates") == ["3 of 3 images are of one colour and not checked for near-duplicates"]


def test_archives_are_checked_like_folders(tmp_path, toy_images):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for i, image in enumerate(toy_images[:2]):
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            archive.writestr(f"in/{i}.png", buffer.getvalue())
        archive.writestr("in/2.png", b"")
        archive.writestr("in/3.png", b"no image")
    images = [f"x.zip/in/{i}.png" for i in range(5)]
    report = check(Rows("zip", tmp_path, images, np.arange(5) % 2, ("a", "b"), np.zeros(5, np.int8)))
    assert items(report, "missing") == ("x.zip/in/4.png",)
    assert items(report, "empty files") == ("x.zip/in/2.png",)
    assert items(report, "1 of 3 images cannot be read")[0].startswith("x.zip/in/3.png: not a readable image")


def test_the_number_of_workers_does_not_matter_and_progress_is_reported(tmp_path, toy_images):
    rows = saved_rows(tmp_path, [*toy_images, toy_images[0]], [0] * 24 + [2])
    (tmp_path / "5.png").write_text("no image")
    progress = []
    one, three = check(rows, workers=1), check(rows, workers=3, progress=progress.append)
    assert one.to_dict() == three.to_dict()
    assert progress == [25]


def test_real_birds(tmp_path):
    """Two CUB photographs are near-duplicates; one is in train, the other in test."""
    archive = shared("data", "cub224.zip")
    with zipfile.ZipFile(archive) as file:
        birds = list(csv.DictReader(io.TextIOWrapper(file.open("cub.csv"), "utf-8")))
    pair = ("Bronzed_Cowbird_0025_796213", "Bronzed_Cowbird_0074_24045")
    birds = [bird for i, bird in enumerate(birds) if i % 150 == 0 or Path(bird["path"]).stem in pair]
    columns = ["image", "label", "group_place", "mask", "box", "split"]
    with (tmp_path / "rows.csv").open("w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(columns)
        for bird in birds:
            x, y, w, h = (float(bird[side]) for side in "xywh")
            mask = bird["path"].replace("images", "masks").replace(".webp", ".png")
            split = ("train", "val", "test")[int(bird["wb_split"])]
            box = f"{x} {y} {x + w} {y + h}"
            writer.writerow(
                [archive / bird["path"], bird["waterbird"], bird["wb_place"], archive / mask, box, split],
            )
    report = check(read_rows(tmp_path))
    assert report.ok
    (item,) = items(report, "test images are near-duplicates of one in train")
    assert all(name in item for name in pair)
    assert not texts(report, "masks")
    assert not texts(report, "boxes")
