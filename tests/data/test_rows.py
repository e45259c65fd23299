"""Rows from folders, CSV files and published layouts: what is read, what is decided, what is refused."""

import shutil
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sightline.data import rows as module
from sightline.data.rows import LAYOUTS, Rows, fingerprint, group_table, name_groups, read_rows, write_csv
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
    return [len(rows.where(split)) for split in ("train", "val", "test")]


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


def test_class_folders_are_sorted_and_divided(tmp_path):
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


@pytest.mark.parametrize("word", ["val", "valid", "Validation"])
def test_split_folders(tmp_path, word):
    make_files(
        tmp_path, "train/cat/1.png", "train/dog/1.png", f"{word}/dog/2.png", "test/cat/3.webp", "test/dog/3.webp"
    )
    rows = read_rows(tmp_path)
    assert sizes(rows) == [2, 1, 2]
    assert rows.images[rows.where("val")[0]] == f"{word}/dog/2.png"
    assert rows.notes == ()


def test_a_missing_val_is_taken_from_train_and_a_missing_test_is_not_invented(tmp_path):
    make_files(tmp_path, *(f"train/{name}/{i}.png" for name in "ab" for i in range(40)))
    rows = read_rows(tmp_path)
    assert sizes(rows) == [68, 12, 0]
    assert "no val split: 12 of the 80 rows of train became val, stratified by label, seed 0" in rows.notes
    assert any(note.startswith("no test split") for note in rows.notes)


def test_test_rows_alone_stay_test_rows(tmp_path):
    rows = read_rows(make_files(tmp_path, "test/cat/1.png", "test/dog/1.png"))
    assert sizes(rows) == [0, 0, 2]
    assert rows.notes == ("no train split: for evaluation only",)


def test_what_is_left_out_is_said(tmp_path):
    make_files(tmp_path, *(f"{name}/{i}.png" for name in "ab" for i in range(3)), "a/old/9.png", "cover.png")
    (tmp_path / "c").mkdir()
    rows = read_rows(tmp_path)
    assert rows.classes == ("a", "b")
    told = " | ".join(rows.notes)
    assert "pictures beside the folders, left out: 1 (cover.png" in told
    assert "a: folders inside a class folder are left out (old)" in told
    assert "c: no pictures, left out" in told


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "found no pictures .folders: –.; expected class folders"),
        (["a.png"], "found pictures, but no folders .a.png.; expected"),
        (["cub.csv"], "to read cub.csv, give the file itself"),
        (["train/cat/1.png", "cat/1.png"], "has train beside cat; expected .* not both"),
        (["val/cat/1.png", "valid/cat/1.png"], "val, valid name the same split twice"),
        (["train/cat/1.png", "test/1.png"], "test: pictures beside the class folders .1.; put"),
        (["images/cat/1.png", "images/dog/1.png"], r"images: holds folders .cat, dog., not pictures"),
        (["images/1.png", "masks/1.png"], "images and masks are no classes; list both in rows.csv"),
    ],
)
def test_other_folders_are_refused_with_what_was_found(tmp_path, files, told):
    with pytest.raises(UserError, match=told):
        read_rows(make_files(tmp_path, *files))


def test_names_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    try:
        (tmp_path / "cat" / "caf\udce9.png").touch()
    except (OSError, UnicodeEncodeError):
        pytest.skip("this file system has only UTF-8 names")
    with pytest.raises(UserError, match=r"cat: the name .* is not UTF-8; rename it"):
        read_rows(tmp_path)


def test_no_such_place(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        read_rows(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"data.tar: neither a .csv file nor a folder"):
        read_rows(make_files(tmp_path, "data.tar") / "data.tar")


# ---- splits ----------------------------------------------------------------------------------------------------------


def test_carving_keeps_the_share_of_every_group(tmp_path):
    lines = [f"{i}.png,{'cat' if i % 3 else 'dog'},{'in' if i % 5 else 'out'}" for i in range(600)]
    rows = read_rows(make_csv(tmp_path, "image,label,group\n" + "\n".join(lines)))
    table = group_table(rows)
    assert np.abs(table - table.sum(axis=0) * [[0.7], [0.15], [0.15]]).max() <= 1
    assert "stratified by label and group" in rows.notes[-1]


def test_a_class_of_two_has_one_in_val_and_a_class_of_one_stays_in_train(tmp_path):
    text = (
        "image,label,split\n"
        + "".join(f"a{i}.png,a,train\n" for i in range(30))
        + "b1,b,train\nb2,b,train\nc1,c,train\n"
    )
    rows = read_rows(make_csv(tmp_path, text))
    assert group_table(rows)[:2].tolist() == [[25, 1, 1], [5, 1, 0]]


def test_small_groups_of_one_class_still_give_val_that_class(tmp_path):
    text = (
        "image,label,group,split\n" + "".join(f"{i}.png,a,{i},train\n" for i in range(3)) + "x,b,0,train\ny,b,0,train\n"
    )
    rows = read_rows(make_csv(tmp_path, text))
    assert sorted(rows.labels[rows.where("val")].tolist()) == [0, 1]


def test_rows_of_one_image_stay_together(tmp_path):
    lines = [f"{i // 3}.png,{'cat' if (i // 3) % 2 else 'dog'}" for i in range(300)]
    rows = read_rows(make_csv(tmp_path, "image,label\n" + "\n".join(lines)))
    assert min(sizes(rows)) >= 3
    assert len({(image, split) for image, split in zip(rows.images, rows.splits.tolist(), strict=True)}) == 100
    assert rows.notes[0] == "rows that repeat an image of an earlier row: 200"


# ---- what rows can do ------------------------------------------------------------------------------------------------


def test_a_group_that_names_its_label_is_not_told_twice():
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


def test_take_takes_every_column(tmp_path):
    rows = full_rows(tmp_path)
    some = rows.take([2, 0])
    assert some.images == ["sub/c.png", "a.png"]
    assert [some.classes[label] for label in some.labels] == ["d,og's", "cat"]
    assert some.groups is not None
    assert [some.group_names[group] for group in some.groups] == ["d,og's/out", "cat/in"]
    assert some.masks == ["mc.png", "ma.png"]
    assert some.boxes is not None
    assert [len(box) for box in some.boxes] == [1, 2]
    assert some.splits.tolist() == [2, 0]
    assert same(rows.take(rows.splits == 0), rows.take(rows.where("train")))
    assert len(rows.take([])) == 0


def test_written_rows_are_read_back(tmp_path):
    rows = full_rows(tmp_path)
    (tmp_path / "copy").mkdir()
    write_csv(rows, tmp_path / "again.csv")
    assert same(read_rows(tmp_path / "again.csv"), rows)
    write_csv(rows, tmp_path / "copy" / "rows.csv")
    moved = read_rows(tmp_path / "copy")
    assert moved.images[2] == "../sub/c.png"
    assert moved.masks is not None
    assert moved.masks[:2] == ["../ma.png", ""]
    assert [moved.image_path(i).resolve() for i in range(4)] == [rows.image_path(i).resolve() for i in range(4)]
    with pytest.raises(UserError, match="cannot be written"):
        write_csv(rows, tmp_path / "no" / "rows.csv")


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6).filter(
    lambda w: w == w.strip() and w
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(st.tuples(words, words, st.sampled_from([0, 1, 2])), min_size=1, max_size=8),
    grouped=st.booleans(),
)
def test_any_words_survive_a_file(tmp_path, cells, grouped):
    labels, attributes = ([cell[k] for cell in cells] for k in (0, 1))
    classes, values = module.Words(), module.Words()
    for label, attribute in zip(labels, attributes, strict=True):
        classes.append(label)
        values.append(attribute)
    names, numbers = classes.sorted()
    groups, group_names = name_groups(numbers, names, *values.sorted()[::-1]) if grouped else (None, ())
    splits = np.array([0, 1, *(cell[2] for cell in cells)], np.int8)[2:]
    images = [f"{i},{label}" for i, label in enumerate(labels)]
    rows = Rows("any", tmp_path, images, numbers, names, splits, groups, group_names)
    write_csv(rows, tmp_path / "any.csv")
    again = read_rows(tmp_path / "any.csv")
    assert again.images == images
    assert [again.classes[label] for label in again.labels] == labels
    if groups is not None:
        assert again.groups is not None
        assert [again.group_names[g] for g in again.groups] == [group_names[g] for g in groups]
    if 0 not in splits or 1 in splits:  # else val is carved from train
        assert np.array_equal(again.splits, splits)


def test_a_fingerprint_tells_every_change_but_not_the_place(tmp_path):
    home = tmp_path / "home"
    make_files(home, "a.png", "b.png", "sub/c.png", "d.png", "ma.png")
    rows = full_rows(home)
    seen = {fingerprint(rows)}
    assert fingerprint(read_rows(home)) in seen
    shutil.copytree(home, tmp_path / "elsewhere")
    assert fingerprint(read_rows(tmp_path / "elsewhere")) in seen
    for column in ("labels", "splits", "groups"):
        changed = rows.take(range(4))
        getattr(changed, column)[3] ^= 1
        seen.add(fingerprint(changed))
    for change in ({"boxes": None}, {"masks": ["", "", "", ""]}, {"classes": ("cat", "d,og's", "fox")}):
        seen.add(fingerprint(module.replace(rows, **change)))
    (home / "a.png").write_bytes(b"longer than before")
    seen.add(fingerprint(rows))
    (home / "d.png").unlink()
    seen.add(fingerprint(rows))
    assert len(seen) == 9


def test_a_fingerprint_reads_an_archive_s_checksums(tmp_path):
    make_csv(tmp_path, "image,label,split\nx.zip/a.png,cat,train\nx.zip/b.png,dog,val\n")
    seen = set()
    for content in (b"12", b"34"):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr("a.png", content)
        seen.add(fingerprint(read_rows(tmp_path)))
    (tmp_path / "x.zip").write_bytes(b"no archive")
    seen.add(fingerprint(read_rows(tmp_path)))
    assert len(seen) == 3


# ---- published layouts -----------------------------------------------------------------------------------------------


def test_an_unknown_layout_is_answered_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"birds: no such layout. Known layouts: .*waterbirds"):
        read_rows(tmp_path, layout="birds")
    with pytest.raises(UserError, match="no such file or folder"):
        read_rows(tmp_path / "none", layout="waterbirds")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_its_reader(layout):
    name, function = LAYOUTS[layout].split(":")
    assert callable(getattr(import_module(f"sightline.datasets.{name}"), function))


def test_a_layout_without_val_gets_one(tmp_path, monkeypatch):
    def read(root: Path) -> Rows:
        return Rows("x", root, list("abcd"), np.array([0, 0, 1, 1]), ("p", "q"), np.array([0, 0, 0, 0], np.int8))

    monkeypatch.setattr(import_module("sightline.datasets.waterbirds"), "read_waterbirds", read)
    rows = read_rows(tmp_path, layout="waterbirds")
    assert group_table(rows).tolist() == [[1, 1], [1, 1], [0, 0]]
