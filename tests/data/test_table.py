"""CSV files: all columns, errors with file and line, and low memory for many rows."""

import tracemalloc

import numpy as np
import pytest

from sightline.data.rows import read_rows
from sightline.data.table import first_occurrence
from sightline.errors import UserError
from tests.data.test_rows import make_csv, same


def test_every_column(tmp_path):
    file = make_csv(
        tmp_path,
        "\ufeffSplit,image, label ,group,mask,box,comment\n"
        'train,a.png,cat,indoor,m/a.png,"1 2 3.5 4; 5 6 7 8",x\n'
        "\n"
        "valid, b.png ,dog,outdoor,,,\n"
        "TEST,c.png,cat,outdoor,,,\n",
    )
    rows = read_rows(file)
    assert same(rows, read_rows(tmp_path))
    assert (rows.name, rows.root) == (tmp_path.name, tmp_path)
    assert rows.images == ["a.png", "b.png", "c.png"]
    assert rows.classes == ("cat", "dog")
    assert rows.labels.tolist() == [0, 1, 0]
    assert rows.splits.tolist() == [0, 1, 2]
    assert rows.group_names == ("cat/indoor", "cat/outdoor", "dog/outdoor")
    assert rows.groups is not None
    assert rows.groups.tolist() == [0, 2, 1]
    assert rows.masks == ["m/a.png", "", ""]
    assert rows.boxes is not None
    assert [box.tolist() for box in rows.boxes] == [[[1, 2, 3.5, 4], [5, 6, 7, 8]], [], []]
    assert all(box.dtype == np.float32 and box.shape[1] == 4 for box in rows.boxes)
    assert rows.notes == ("unused columns: comment",)


def test_several_group_columns_are_combined(tmp_path):
    text = "image,label,group_place,group_light\n1,cat,in,day\n2,cat,in,night\n3,dog,out,day\n4,cat,in,day\n"
    rows = read_rows(make_csv(tmp_path, text))
    assert rows.group_names == ("cat/in/day", "cat/in/night", "dog/out/day")
    assert rows.groups is not None
    assert rows.groups.tolist() == [0, 1, 2, 0]


def test_numeric_classes_are_sorted_by_value(tmp_path):
    rows = read_rows(make_csv(tmp_path, "image,label\n" + "".join(f"{i}.png,{i}\n" for i in (10, 9, 2))))
    assert rows.classes == ("2", "9", "10")
    assert rows.labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows.csv:1: no column 'image' among nothing; expected a header such as"),
        ("a.png,cat\nb.png,dog\n", "rows.csv:1: no column 'image' among a.png, cat"),
        ("image,class\na.png,cat\n", "rows.csv:1: no column 'label' among image, class"),
        ("image;label\na.png;cat\n", "rows.csv:1: the cells are separated by ;; save the file with commas"),
        ("image\tlabel\n", "rows.csv:1: the cells are separated by tabs"),
        ("image,label,label\n", "rows.csv:1: two columns are named 'label'"),
        ("image,label,group,group_x\n", "rows.csv:1: both group and group_"),
        ("image,label\n", "rows.csv: no rows"),
        ("image,label\na.png,cat\n,dog\n", "rows.csv:3: no image; give its path"),
        (
            "image,label\na.png,cat\n\n\nb.png,\n",
            "rows.csv:5: no label; give the class; `sightline predict` needs",
        ),
        ("image,label,group\na.png,cat,\n", "rows.csv:2: no group; where it is not known"),
        ("image,label,split\na.png,cat,train\nb.png,cat,\n", "rows.csv:3: no split; write train, val or test"),
        (
            "image,label,split\na.png,cat,train\nb.png,cat,dev\n",
            "rows.csv:3: unknown split 'dev'; write train, val or test",
        ),
        ("image,label\na,b.png,cat\n", "rows.csv:2: 3 cells under 2 columns; quote cells that contain a comma"),
        ("image,label\na.png,cat\nb.png\n", "rows.csv:3: 1 cells under 2 columns"),
        ("image,label,box\na.png,cat,1 2 3\n", "rows.csv:2: invalid box '1 2 3'; expected \"left top right bottom\""),
        ("image,label,box\na.png,cat,1 2 3 x\n", "rows.csv:2: invalid box '1 2 3 x'"),
        ("image,label,box\na.png,cat,5 2 3 9\n", "rows.csv:2: invalid box '5 2 3 9'"),
        ("image,label,box\na.png,cat,1 9 3 2\n", "rows.csv:2: invalid box '1 9 3 2'"),
        ("image,label,box\na.png,cat,1 2 nan 9\n", "rows.csv:2: invalid box '1 2 nan 9'"),
        ("image,label,box\na.png,cat,1 2 3 4;\n", "rows.csv:2: invalid box '1 2 3 4;'"),
        ('image,label\n"a\nb.png",cat\nc.png,dog,x\n', "rows.csv:4: 3 cells under 2 columns"),
        ('image,label\na.png,cat\n"b.png,cat\nc.png,dog\n', "rows.csv:3: invalid CSV"),
        (
            "image,label\na.png,cat\nb.png,caf\xe9\n".encode("latin-1"),
            "rows.csv:3: not UTF-8 text; save the file as CSV UTF-8",
        ),
        ("image,label\na.png,cat\n".encode("utf-16"), "rows.csv:1: not UTF-8 text"),
        (
            "image,label\na.png,cat\nb.png,cat\na.png,dog\n",
            "rows.csv:4: a.png is 'dog' here and 'cat' on line 2; keep one",
        ),
        ("image,label,group\na.png,cat,x\na.png,cat,y\n", "rows.csv:3: a.png is 'cat/y' here and 'cat/x' on line 2"),
    ],
)
def test_errors_name_file_and_line(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        read_rows(make_csv(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_utf8_far_down_is_located(tmp_path):
    text = b"image,label\n" + b"".join(b"%d.png,cat\n" % i for i in range(30000)) + b"caf\xe9.png,cat\n"
    with pytest.raises(UserError, match=r"rows.csv:30002: not UTF-8"):
        read_rows(make_csv(tmp_path, text))


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "rows.csv").mkdir()
    with pytest.raises(UserError, match=r"rows.csv: cannot be read"):
        read_rows(tmp_path / "rows.csv")


def test_memory_of_fifty_thousand_rows(tmp_path):
    """The target is a million rows in 1 GB, half of it for the check; `benchmarks/speed.py rows` measures the time."""
    count = 50_000
    body = "".join(
        f"images/n{i % 1000:08d}/n{i % 1000:08d}_{i:07d}.JPEG,n{i % 1000:08d},{i % 7},"
        f"masks/n{i % 1000:08d}/n{i % 1000:08d}_{i:07d}.png,1 2 {i % 300 + 2} 4,train\n"
        for i in range(count)
    )
    file = make_csv(tmp_path, "image,label,group,mask,box,split\n" + body)
    del body
    read_rows(file)  # what is allocated only once is not counted
    tracemalloc.start()
    try:
        rows = read_rows(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(rows) == count
    assert peak / count < 550


def test_hash_collisions_are_resolved(monkeypatch):
    monkeypatch.setattr("sightline.data.table.hash", lambda _: 0, raising=False)
    assert first_occurrence(["a", "b", "a", "c", "b"]).tolist() == [0, 1, 0, 3, 1]
