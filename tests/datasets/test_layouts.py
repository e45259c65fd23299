"""What holds for every published layout: read in miniature, and refused where it is not what it should be."""

from pathlib import Path

import numpy as np
import pytest

from sightline.data.rows import LAYOUTS, TEST, Rows, read_rows
from sightline.datasets.celeba import read_celeba
from sightline.datasets.cub import WATERBIRDS, read_cub, read_waterbird200
from sightline.datasets.imagenet import (
    read_imagenet,
    read_imagenet9,
    read_imagenet_a,
    read_imagenet_r,
    read_imagenet_s,
    read_imagenet_segmentation,
    read_imagenet_sketch,
    read_imagenet_v2,
    read_objectnet,
    read_si_score_location,
    read_si_score_rotation,
    read_si_score_size,
)
from sightline.datasets.metashift import (
    read_metashift_animals,
    read_metashift_disc,
    read_metashift_indoor_outdoor,
)
from sightline.datasets.siim import read_siim
from sightline.datasets.spawrious import read_spawrious_m2m, read_spawrious_o2o
from sightline.datasets.waterbirds import read_waterbirds
from sightline.errors import UserError

from .published import (
    make_celeba,
    make_cub,
    make_imagenet,
    make_imagenet9,
    make_imagenet_s,
    make_imagenet_segmentation,
    make_imagenet_v2,
    make_metashift_animals,
    make_metashift_disc,
    make_metashift_indoor_outdoor,
    make_objectnet,
    make_si_score,
    make_siim_kaggle,
    make_siim_prepared,
    make_spawrious,
    make_waterbirds,
    make_waterbirds_in_cub,
    make_wnids,
    put,
)

MINIATURES = {
    "celeba": (make_celeba, read_celeba),
    "cub": (make_cub, read_cub),
    "imagenet": (make_imagenet, read_imagenet),
    "imagenet-a": (make_wnids, read_imagenet_a),
    "imagenet-r": (make_wnids, read_imagenet_r),
    "imagenet-s": (make_imagenet_s, read_imagenet_s),
    "imagenet-segmentation": (make_imagenet_segmentation, read_imagenet_segmentation),
    "imagenet-sketch": (make_wnids, read_imagenet_sketch),
    "imagenet-v2": (make_imagenet_v2, read_imagenet_v2),
    "imagenet9": (make_imagenet9, read_imagenet9),
    "metashift-animals": (make_metashift_animals, read_metashift_animals),
    "metashift-disc": (make_metashift_disc, read_metashift_disc),
    "metashift-indoor-outdoor": (make_metashift_indoor_outdoor, read_metashift_indoor_outdoor),
    "objectnet": (make_objectnet, read_objectnet),
    "si-score-location": (make_si_score, read_si_score_location),
    "si-score-rotation": (make_si_score, read_si_score_rotation),
    "si-score-size": (make_si_score, read_si_score_size),
    "siim": (make_siim_kaggle, read_siim),
    "siim prepared": (make_siim_prepared, read_siim),
    "spawrious-m2m": (make_spawrious, read_spawrious_m2m),
    "spawrious-o2o": (make_spawrious, read_spawrious_o2o),
    "waterbird200": (make_waterbirds_in_cub, read_waterbird200),
    "waterbirds": (make_waterbirds, read_waterbirds),
    "waterbirds in cub": (lambda root: make_waterbirds_in_cub(root), lambda root: read_waterbirds(root / WATERBIRDS)),
}
layouts = pytest.mark.parametrize("layout", MINIATURES)


def attempt(read, root: Path) -> tuple[Rows | None, str]:
    """The rows, or what the user is told instead; nothing else may happen."""
    try:
        return read(root), ""
    except UserError as error:
        return None, str(error)


# ---- what holds for all ----------------------------------------------------------------------------------------------


@layouts
def test_every_listed_file_exists_and_all_columns_fit(layout, tmp_path):
    make, read = MINIATURES[layout]
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


def test_every_layout_that_can_be_asked_for_is_tested_here():
    assert {name.split(" ")[0] for name in MINIATURES} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_by_its_name_and_val_never_comes_from_test(layout, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    rows, published = read_rows(tmp_path, layout=layout), read(tmp_path)
    assert rows.images == published.images
    assert np.array_equal(rows.splits == TEST, published.splits == TEST)


@layouts
def test_a_wrong_folder_is_refused_with_what_was_expected_and_found(layout, tmp_path):
    read = MINIATURES[layout][1]
    put(tmp_path, "holiday/1.jpg")
    put(tmp_path / WATERBIRDS, "beach/1.jpg")
    with pytest.raises(UserError, match="expected") as refusal:
        read(tmp_path)
    assert "holiday" in str(refusal.value) or "beach" in str(refusal.value)
    for nothing in (tmp_path / "nothing", tmp_path / "holiday/1.jpg"):
        with pytest.raises(UserError, match=nothing.name):
            read(nothing)


@layouts
def test_whatever_is_missing_the_user_is_told(layout, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    whole = len(read(tmp_path))
    everything = sorted(tmp_path.rglob("*"))
    aside = tmp_path.with_name("aside")
    for path in everything[:: max(1, len(everything) // 40)]:
        path.rename(aside)
        rows, told = attempt(read, tmp_path)
        assert str(tmp_path) in told or 0 < len(rows) <= whole
        aside.rename(path)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"[1, 2]\n", b"1\n", b"{}", b"<a>"])
@layouts
def test_damaged_tables_are_refused_by_name(layout, damage, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    texts = (".txt", ".csv", ".json", ".xml", "_v2")
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.name.endswith(texts)]:
        before = path.read_bytes()
        path.write_bytes(damage)
        rows, told = attempt(read, tmp_path)
        assert rows or path.name in told or path.parent.name in told
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("cub:3", "cub:3: the layout cub has no options; write cub alone"),
        ("cub:", "cub:: the layout cub has no options"),
        ("birds:3", "birds: no such layout"),
        ("imagenet9:", "nothing after the colon; imagenet9 takes a variant, as in imagenet9:mixed_rand"),
        ("imagenet9:mixed_up", "mixed_up: no variant of ImageNet-9; there are original, .* and mixed"),
        ("metashift-animals:-1", "-1: no seed of MetaShift Animals"),
        ("metashift-animals:grass", "grass: no seed .* as in metashift-animals:3"),
    ],
)
def test_an_option_that_a_layout_does_not_know_is_refused(layout, told, tmp_path):
    if layout.partition(":")[0] in LAYOUTS:
        MINIATURES[layout.partition(":")[0]][0](tmp_path)
    with pytest.raises(UserError, match=told):
        read_rows(tmp_path, layout=layout)
