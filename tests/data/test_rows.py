"""Rows from folders, CSV files and published layouts: content, splits, notes and errors."""

import shutil
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from sightline.data import rows as module
from sightline.data.rows import LAYOUTS, Rows, fingerprint, group_table, name_groups, read_rows
from sightline.errors import UserError


def make_files(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def make_csv(root: Path, text: str | bytes) -> Path:
    file = root / "rows.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def sizes(rows: Rows) -> list[int]:
    return [len(rows.split_indices(split)) for split in ("train", "val", "test")]


def same(one: Rows, other: Rows) -> bool:
    def boxes(rows: Rows):
        return None if rows.boxes is None else [box.tolist() for box in rows.boxes]

    return (
        (one.images, one.classes, one.group_names, one.masks)
        == (other.images, other.classes, other.group_names, other.masks)
        and boxes(one) == boxes(other)
        and np.array_equal(one.labels, other.labels)
        and np.array_equal(one.splits, other.splits)
        and (one.groups is None) == (other.groups is None)
        and (one.groups is None or np.array_equal(one.groups, other.groups))
    )


# ---- class folders ---------------------------------------------------------------------------------------------------


def test_class_folders_are_sorted_and_split(tmp_path):
    make_files(tmp_path, *(f"{name}/{i}.JPG" for name in ("dog", "cat") for i in range(20)))
    make_files(tmp_path, "cat/notes.txt", "cat/._0.jpg", ".git/x.png", "__MACOSX/y.png", "readme.md")
    rows = read_rows(tmp_path)
    assert rows.classes == ("cat", "dog")
    assert rows.images == sorted(rows.images)
    assert len(rows) == 40
    assert rows.labels.tolist() == [0] * 20 + [1] * 20
    assert sizes(rows) == [28, 6, 6]
    assert group_table(rows).tolist() == [[14, 14], [3, 3], [3, 3]]
    assert rows.notes == ("no splits: divided 70 : 15 : 15 (28 train, 6 val, 6 test), stratified by label, seed 0",)
    assert rows.image_path(0) == tmp_path / "cat/0.JPG"
    assert same(rows, read_rows(str(tmp_path)))
    assert not np.array_equal(rows.splits, read_rows(tmp_path, seed=1).splits)


@pytest.mark.parametrize("name", ["val", "valid", "Validation"])
def test_split_folders(tmp_path, name):
    make_files(
        tmp_path, "train/cat/1.png", "train/dog/1.png", f"{name}/dog/2.png", "test/cat/3.webp", "test/dog/3.webp"
    )
    rows = read_rows(tmp_path)
    assert sizes(rows) == [2, 1, 2]
    assert rows.images[rows.split_indices("val")[0]] == f"{name}/dog/2.png"
    assert rows.notes == ()


def test_a_missing_val_split_is_taken_from_train_and_a_missing_test_split_is_not_replaced(tmp_path):
    make_files(tmp_path, *(f"train/{name}/{i}.png" for name in "ab" for i in range(40)))
    rows = read_rows(tmp_path)
    assert sizes(rows) == [68, 12, 0]
    assert "no val split: 12 of 80 train rows moved to val, stratified by label, seed 0" in rows.notes
    assert any(note.startswith("no test split") for note in rows.notes)


def test_a_test_split_alone_stays_a_test_split(tmp_path):
    rows = read_rows(make_files(tmp_path, "test/cat/1.png", "test/dog/1.png"))
    assert sizes(rows) == [0, 0, 2]
    assert rows.notes == ("no train split: evaluation only",)


def test_ignored_files_are_noted(tmp_path):
    make_files(tmp_path, *(f"{name}/{i}.png" for name in "ab" for i in range(3)), "a/old/9.png", "cover.png")
    (tmp_path / "c").mkdir()
    rows = read_rows(tmp_path)
    assert rows.classes == ("a", "b")
    notes = " | ".join(rows.notes)
    assert "images outside class folders, ignored: 1 (cover.png" in notes
    assert "a: folders inside a class folder, ignored (old)" in notes
    assert "c: no images, ignored" in notes


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "found no images .folders: –.; expected class folders"),
        (["a.png"], "found images, but no class folders .a.png.; expected"),
        (["cub.csv"], "to read cub.csv, give the file itself"),
        (["train/cat/1.png", "cat/1.png"], "has train beside cat; expected .* not both"),
        (["val/cat/1.png", "valid/cat/1.png"], "val, valid name the same split twice"),
        (["train/cat/1.png", "test/1.png"], "test: 1 images outside class folders .1.png ….; move"),
        (["images/cat/1.png", "images/dog/1.png"], r"images: contains folders .cat, dog., no images"),
        (["images/1.png", "masks/1.png"], "images and masks are not classes; list both in rows.csv"),
    ],
)
def test_other_folders_are_rejected_with_what_was_found(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        read_rows(make_files(tmp_path, *files))


def test_file_names_that_are_not_utf8_are_rejected(tmp_path):
    (tmp_path / "cat").mkdir()
    try:
        (tmp_path / "cat" / "caf\udce9.png").touch()
    except (OSError, UnicodeEncodeError):
        pytest.skip("this file system has only UTF-8 names")
    with pytest.raises(UserError, match=r"cat: the name .* is not UTF-8; rename it"):
        read_rows(tmp_path)


def test_missing_paths(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        read_rows(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"data.tar: neither a .csv file nor a folder"):
        read_rows(make_files(tmp_path, "data.tar") / "data.tar")


# ---- splits ----------------------------------------------------------------------------------------------------------


def test_splits_are_stratified_by_group(tmp_path):
    lines = [f"{i}.png,{'cat' if i % 3 else 'dog'},{'in' if i % 5 else 'out'}" for i in range(600)]
    rows = read_rows(make_csv(tmp_path, "image,label,group\n" + "\n".join(lines)))
    table = group_table(rows)
    assert np.abs(table - table.sum(axis=0) * [[0.7], [0.15], [0.15]]).max() <= 1
    assert "stratified by label and group" in rows.notes[-1]


def test_a_class_of_two_images_has_one_in_val_and_a_class_of_one_stays_in_train(tmp_path):
    text = (
        "image,label,split\n"
        + "".join(f"a{i}.png,a,train\n" for i in range(30))
        + "b1,b,train\nb2,b,train\nc1,c,train\n"
    )
    rows = read_rows(make_csv(tmp_path, text))
    assert group_table(rows)[:2].tolist() == [[25, 1, 1], [5, 1, 0]]


def test_val_gets_every_class_even_if_its_groups_are_small(tmp_path):
    text = (
        "image,label,group,split\n" + "".join(f"{i}.png,a,{i},train\n" for i in range(3)) + "x,b,0,train\ny,b,0,train\n"
    )
    rows = read_rows(make_csv(tmp_path, text))
    assert sorted(rows.labels[rows.split_indices("val")].tolist()) == [0, 1]


def test_rows_of_one_image_stay_together(tmp_path):
    lines = [f"{i // 3}.png,{'cat' if (i // 3) % 2 else 'dog'}" for i in range(300)]
    rows = read_rows(make_csv(tmp_path, "image,label\n" + "\n".join(lines)))
    assert min(sizes(rows)) >= 3
    assert len({(image, split) for image, split in zip(rows.images, rows.splits.tolist(), strict=True)}) == 100
    assert rows.notes[0] == "repeated images: 200 rows list an image again"


# ---- operations on rows ----------------------------------------------------------------------------------------------


def test_a_label_in_the_group_name_is_not_repeated():
    labels, attributes = np.array([0, 1, 1]), np.array([0, 1, 2])
    groups, names = name_groups(labels, ("cat", "dog"), attributes, ("cat/in", "dog/in", "dog/out"))
    assert names == ("cat/in", "dog/in", "dog/out")
    assert groups.tolist() == [0, 1, 2]
    assert name_groups(labels, ("cat", "dog"), attributes, ("cat/in", "in", "out"))[1] == (
        "cat/cat/in",
        "dog/in",
        "dog/out",
    )


def full_rows(root: Path) -> Rows:
    text = (
        "image,label,group,mask,box,split\n"
        'a.png,cat,in,ma.png,"0.1 0 3.3333333 4;1 1 2 2",train\n'
        "b.png,dog,in,,,val\n"
        'sub/c.png,"d,og\'s",out,mc.png,1 2 3 4,test\n'
        "d.png,cat,out,,,train\n"
    )
    return read_rows(make_csv(root, text))


def test_take_selects_all_columns(tmp_path):
    rows = full_rows(tmp_path)
    taken = rows.take([2, 0])
    assert taken.images == ["sub/c.png", "a.png"]
    assert [taken.classes[label] for label in taken.labels] == ["d,og's", "cat"]
    assert taken.groups is not None
    assert [taken.group_names[group] for group in taken.groups] == ["d,og's/out", "cat/in"]
    assert taken.masks == ["mc.png", "ma.png"]
    assert taken.boxes is not None
    assert [len(box) for box in taken.boxes] == [1, 2]
    assert taken.splits.tolist() == [2, 0]
    assert same(rows.take(rows.splits == 0), rows.take(rows.split_indices("train")))
    assert len(rows.take([])) == 0


def test_the_fingerprint_changes_with_the_data_but_not_with_the_folder(tmp_path):
    home = tmp_path / "home"
    make_files(home, "a.png", "b.png", "sub/c.png", "d.png", "ma.png")
    rows = full_rows(home)
    fingerprints = {fingerprint(rows)}
    assert fingerprint(read_rows(home)) in fingerprints
    shutil.copytree(home, tmp_path / "elsewhere")
    assert fingerprint(read_rows(tmp_path / "elsewhere")) in fingerprints
    for column in ("labels", "splits", "groups"):
        changed = rows.take(range(4))
        getattr(changed, column)[3] ^= 1
        fingerprints.add(fingerprint(changed))
    for change in ({"boxes": None}, {"masks": ["", "", "", ""]}, {"classes": ("cat", "d,og's", "fox")}):
        fingerprints.add(fingerprint(module.replace(rows, **change)))
    (home / "a.png").write_bytes(b"longer than before")
    fingerprints.add(fingerprint(rows))
    (home / "d.png").unlink()
    fingerprints.add(fingerprint(rows))
    assert len(fingerprints) == 9


def test_the_fingerprint_includes_the_checksums_of_archives(tmp_path):
    make_csv(tmp_path, "image,label,split\nx.zip/a.png,cat,train\nx.zip/b.png,dog,val\n")
    fingerprints = set()
    for content in (b"12", b"34"):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr("a.png", content)
        fingerprints.add(fingerprint(read_rows(tmp_path)))
    (tmp_path / "x.zip").write_bytes(b"no archive")
    fingerprints.add(fingerprint(read_rows(tmp_path)))
    assert len(fingerprints) == 3


# ---- published layouts -----------------------------------------------------------------------------------------------


def test_an_unknown_layout_lists_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"unknown layout .birds.; known layouts: .*waterbirds"):
        read_rows(tmp_path, layout="birds")
    with pytest.raises(UserError, match="no such file or folder"):
        read_rows(tmp_path / "none", layout="waterbirds")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_a_reader(layout):
    name, function = LAYOUTS[layout].split(":")
    assert callable(getattr(import_module(f"sightline.datasets.{name}"), function))


def test_a_layout_without_val_split_gets_one(tmp_path, monkeypatch):
    def read(root: Path) -> Rows:
        return Rows("x", root, list("abcd"), np.array([0, 0, 1, 1]), ("p", "q"), np.array([0, 0, 0, 0], np.int8))

    monkeypatch.setattr(import_module("sightline.datasets.waterbirds"), "read_waterbirds", read)
    rows = read_rows(tmp_path, layout="waterbirds")
    assert group_table(rows).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_a_null_character_is_an_error_with_its_line(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"image,label\na.png,x\nb\0.png,y\n")
    with pytest.raises(UserError, match=r"rows\.csv:3: (contains a null character|invalid CSV)"):
        read_rows(tmp_path)


def test_a_long_cell_does_not_make_a_long_message(tmp_path):
    (tmp_path / "rows.csv").write_text(f"image,label\n{'a' * 100_000}.png,x\n{'a' * 100_000}.png,y\n")
    with pytest.raises(UserError, match=r"rows\.csv:3: aaa.* … .*keep one of them") as refused:
        read_rows(tmp_path)
    assert len(str(refused.value)) < 2000
