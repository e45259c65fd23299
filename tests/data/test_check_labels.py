"""Labels that look like mistakes."""

from PIL import Image

from sightline.data.check import check
from sightline.data.rows import read_rows


def test_labels_that_differ_in_case_or_spaces_only_are_listed_with_their_lines(tmp_path):
    labels = ["duck", "Duck", "grey stork", "duck", "grey  Stork", "heron"]
    (tmp_path / "rows.csv").write_text(
        "image,label\n" + "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels))
    )
    (finding,) = [f for f in check(read_rows(tmp_path), open_images=False).findings if "case or spaces" in f.text]
    assert finding.severity == "warning"
    assert finding.text.startswith("4 labels differ in case or spaces only")
    assert finding.items == (
        "'Duck': 1 row, rows.csv:3",
        "'duck': 2 rows, rows.csv:2, 5",
        "'grey  Stork': 1 row, rows.csv:6",
        "'grey stork': 1 row, rows.csv:4",
    )


def test_labels_that_look_like_empty_cells_are_listed_with_their_lines(tmp_path):
    labels = ["duck", "nan", "stork", "None", *["null"] * 12]
    (tmp_path / "rows.csv").write_text(
        "image,label\n" + "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels))
    )
    (finding,) = [f for f in check(read_rows(tmp_path), open_images=False).findings if "empty cell" in f.text]
    assert (finding.severity, finding.items[:2]) == (
        "warning",
        ("'nan': 1 row, rows.csv:3", "'None': 1 row, rows.csv:5"),
    )
    assert finding.items[2] == "'null': 12 rows, rows.csv:6, 7, 8, 9, 10, 11, 12, 13, 14, 15 …"


def test_class_folders_are_listed_without_lines(tmp_path):
    for name in ("Duck", "du ck", "stork"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "a.png")
    findings = check(read_rows(tmp_path), open_images=False).findings
    assert [f.items for f in findings if "case or spaces" in f.text] == [("'Duck': 1 row", "'du ck': 1 row")]
