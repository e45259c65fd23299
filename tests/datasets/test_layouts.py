"""Every published layout: its small version is read, and wrong or damaged folders are errors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sightline.data.layouts import LAYOUTS, layout_reader
from sightline.data.rows import TEST, Rows, read_rows
from sightline.datasets.cub import WATERBIRDS
from sightline.errors import UserError

from . import published
from .published import put

SMALL_VERSIONS = {  # layout, perhaps with a form in which it is distributed: the function that makes it
    "celeba": published.make_celeba,
    "cub": published.make_cub,
    "imagenet": published.make_imagenet,
    "imagenet-a": published.make_wnids,
    "imagenet-r": published.make_wnids,
    "imagenet-s": published.make_imagenet_s,
    "imagenet-segmentation": published.make_imagenet_segmentation,
    "imagenet-sketch": published.make_wnids,
    "imagenet-v2": published.make_imagenet_v2,
    "imagenet9": published.make_imagenet9,
    "metashift-animals": published.make_metashift_animals,
    "metashift-disc": published.make_metashift_disc,
    "metashift-indoor-outdoor": published.make_metashift_indoor_outdoor,
    "objectnet": published.make_objectnet,
    "si-score-location": published.make_si_score,
    "si-score-rotation": published.make_si_score,
    "si-score-size": published.make_si_score,
    "siim": published.make_siim_kaggle,
    "siim prepared": published.make_siim_prepared,
    "spawrious-m2m": published.make_spawrious,
    "spawrious-o2o": published.make_spawrious,
    "waterbird200": published.make_waterbirds_in_cub,
    "waterbirds": published.make_waterbirds,
    "waterbirds in cub": published.make_waterbirds_in_cub,
}
layouts = pytest.mark.parametrize("layout", SMALL_VERSIONS)


def reader_for(layout: str) -> Callable[[Path], Rows]:
    read = layout_reader(layout.split(" ")[0])
    return (lambda root: read(root / WATERBIRDS)) if layout == "waterbirds in cub" else read


def attempt(read, root: Path) -> tuple[Rows | None, str]:
    """The rows, or the message of a UserError; no other exception may occur."""
    try:
        return read(root), ""
    except UserError as error:
        return None, str(error)


@layouts
def test_every_listed_file_exists_and_the_columns_are_valid(layout, tmp_path):
    make, read = SMALL_VERSIONS[layout], reader_for(layout)
    make(tmp_path)
    rows = read(tmp_path)
    assert rows.name == layout.split(" ")[0]
    assert all(rows.image_path(i).is_file() for i in range(len(rows)))
    assert all((rows.root / mask).is_file() for mask in rows.masks or () if mask)
    assert (rows.labels.dtype, rows.splits.dtype) == (np.int64, np.int8)
    assert rows.labels.max() < len(rows.classes) == len(set(rows.classes))
    assert all(box.dtype == np.float32 and box.shape[1:] == (4,) for box in rows.boxes or ())
    if rows.groups is not None:
        assert rows.groups.dtype == np.int64
        assert rows.groups.max() < len(rows.group_names) == len(set(rows.group_names))
        for label, group in zip(rows.labels, rows.groups, strict=True):
            assert rows.group_names[group].startswith(f"{rows.classes[label]}/")


def test_every_layout_is_tested_here():
    assert {name.split(" ")[0] for name in SMALL_VERSIONS} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_by_name_and_validation_rows_never_come_from_test(layout, tmp_path):
    make, read = SMALL_VERSIONS[layout], reader_for(layout)
    make(tmp_path)
    rows, as_published = read_rows(tmp_path, layout=layout), read(tmp_path)
    assert rows.images == as_published.images
    assert np.array_equal(rows.splits == TEST, as_published.splits == TEST)


@layouts
def test_a_wrong_folder_is_an_error_with_what_was_expected_and_found(layout, tmp_path):
    read = reader_for(layout)
    put(tmp_path, "holiday/1.jpg")
    put(tmp_path / WATERBIRDS, "beach/1.jpg")
    with pytest.raises(UserError, match="expected") as raised:
        read(tmp_path)
    assert "holiday" in str(raised.value) or "beach" in str(raised.value)
    for wrong in (tmp_path / "nothing", tmp_path / "holiday/1.jpg"):
        with pytest.raises(UserError, match=wrong.name):
            read(wrong)


@layouts
def test_any_missing_file_gives_fewer_rows_or_a_user_error(layout, tmp_path):
    make, read = SMALL_VERSIONS[layout], reader_for(layout)
    make(tmp_path)
    whole = len(read(tmp_path))
    everything = sorted(tmp_path.rglob("*"))
    aside = tmp_path.with_name("aside")
    for path in everything[:: max(1, len(everything) // 40)]:
        path.rename(aside)
        rows, message = attempt(read, tmp_path)
        assert str(tmp_path) in message or 0 < len(rows) <= whole
        aside.rename(path)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"[1, 2]\n", b"1\n", b"{}", b"<a>"])
@layouts
def test_errors_about_damaged_tables_name_the_file(layout, damage, tmp_path):
    make, read = SMALL_VERSIONS[layout], reader_for(layout)
    make(tmp_path)
    texts = (".txt", ".csv", ".json", ".xml", "_v2")
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.name.endswith(texts)]:
        before = path.read_bytes()
        path.write_bytes(damage)
        rows, message = attempt(read, tmp_path)
        assert rows or path.name in message or path.parent.name in message
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("cub:3", "layout 'cub:3': cub has no variants; use cub"),
        ("cub:", "layout 'cub:': cub has no variants"),
        ("birds:3", "unknown layout 'birds'; known layouts: "),
        ("imagenet9:", "no variant after the colon; imagenet9 takes a variant, as in imagenet9:mixed_rand"),
        ("imagenet9:mixed_up", "mixed_up: not a variant of ImageNet-9; the variants are original, .* and mixed"),
        ("metashift-animals:-1", "-1: not a seed for MetaShift Animals"),
        ("metashift-animals:grass", "grass: not a seed .* as in metashift-animals:3"),
    ],
)
def test_an_unknown_layout_or_variant_is_an_error(layout, message, tmp_path):
    if layout.partition(":")[0] in LAYOUTS:
        SMALL_VERSIONS[layout.partition(":")[0]](tmp_path)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path, layout=layout)
