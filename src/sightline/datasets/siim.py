"""SIIM-ACR chest radiographs: pneumothorax or not; the spurious attribute is the chest tube that treats it.

Read as on Kaggle (train-rle.csv, dicom-images-train, with cxr_tube_dict.json beside them), or as prepared for iFAM
(train_set, full_test_set, robust_test_set, non_robust_test_set). The tube labels are published as a pickle, the masks
run-length encoded: `sightline convert siim` writes them as JSON and PNG.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..console.files import inside
from ..data.rows import TEST, TRAIN, Rows
from ..errors import UserError
from .pickles import command_for, read_converted
from .reading import (
    NO_VALIDATION,
    Folder,
    existing,
    image_names,
    locate,
    read_columns,
    rows_from_folders,
    save_mask,
    wrong_folder,
)

CLASSES = ("no pneumothorax", "pneumothorax")
TUBE, NO_TUBE, UNKNOWN = "tube", "no tube", "tube unknown"
TUBES = "cxr_tube_dict"
TABLE, DICOMS, MASKS = "train-rle.csv", "dicom-images-train", "all_masks"
SIDE = 1024  # of every image, in pixels
TEST_ONLY = "chest-tube labels exist for the test split only"


def read_siim(root: Path) -> Rows:
    """Groups are label x chest tube; the test split consists of the images with tube labels."""
    if (root / "train_set").is_dir():
        rows = _read_prepared(root)
    elif (root / TABLE).exists():
        rows = _read_kaggle(root)
    else:
        prepared = "train_set with full_test_set as prepared for iFAM"
        raise wrong_folder(root, "SIIM-ACR", f"{TABLE} with {DICOMS} as on Kaggle, or {prepared}")
    masks = existing(root, [f"{MASKS}/{Path(image).stem}.png" for image in rows.images])
    if not any(masks):
        note = f"no masks: the folder {MASKS} is missing; make it from {TABLE}: {command_for('siim', root)}"
        return replace(rows, notes=(*rows.notes, note))
    missing = masks.count("")
    notes = (*rows.notes, f"no mask for {missing:,} of the images") if missing else rows.notes
    return replace(rows, masks=masks, notes=notes)


def _read_prepared(root: Path) -> Rows:
    subsets = [name for name in ("robust_test_set", "non_robust_test_set") if (root / name).is_dir()]
    needs = ["train_set/0", "train_set/1", "full_test_set/0", "full_test_set/1"]
    locate(root, "SIIM-ACR", needs + [f"{name}/{label}" for name in subsets for label in (0, 1)])
    folders = [Folder(f"train_set/{label}", label, TRAIN, UNKNOWN) for label in (0, 1)]
    for label in (0, 1):
        path = f"full_test_set/{label}"
        if len(subsets) < 2:
            folders.append(Folder(path, label, TEST, UNKNOWN))
            continue
        robust, other = (image_names(root / name / str(label), (".dcm",)) for name in subsets)
        if sorted(robust + other) != list(image_names(root / path, (".dcm",))):
            both = " and ".join(subsets)
            raise UserError(f"{root / path}: does not contain exactly the images of {both}; prepare it again")
        with_tube, without_tube = (other, robust) if label else (robust, other)
        folders += [Folder(path, label, TEST, TUBE, with_tube), Folder(path, label, TEST, NO_TUBE, without_tube)]
    return rows_from_folders("siim", root, CLASSES, folders, [NO_VALIDATION, TEST_ONLY], (".dcm",))


def _read_kaggle(root: Path) -> Rows:
    locate(root, "SIIM-ACR", (TABLE, DICOMS))
    if not any((root / f"{TUBES}.{ending}").exists() for ending in ("json", "pkl")):
        advice = f"put {TUBES}.pkl there and convert it: {command_for('siim', root)}"
        raise UserError(f"{root}: {TUBES}.json, which defines the test split, is missing; {advice}")
    tubes = read_converted(root, TUBES, "siim")
    if not all(value in (0, 1) for value in tubes.values()):
        raise UserError(f"{root / TUBES}.json: expected true or false for each image")
    path_of = {path.stem: path.relative_to(root) for path in sorted((root / DICOMS).glob("*/*/*.dcm"))}
    labels: dict[str, int] = {}
    for line, (image, runs) in read_columns(root / TABLE, ("ImageId", "EncodedPixels")):
        if image not in path_of:
            raise UserError(f"{root / TABLE}:{line}: {image}.dcm is in no folder of {DICOMS}; restore it")
        labels.setdefault(image, int(runs != "-1"))
    folders = []
    for image, label in labels.items():
        attribute = UNKNOWN if image not in tubes else TUBE if tubes[image] else NO_TUBE
        split = TRAIN if image not in tubes else TEST
        path = path_of[image]
        folders.append(Folder(path.parent.as_posix(), label, split, attribute, (path.name,)))
    notes = [NO_VALIDATION, TEST_ONLY]
    for count, which in (
        (len(path_of.keys() - labels.keys()), "images without a label, left out"),
        (len(tubes.keys() - labels.keys()), "images with a tube label and no class label, left out"),
    ):
        notes += [f"{which}: {count:,}"] if count else []
    return rows_from_folders("siim", root, CLASSES, folders, notes, (".dcm",))


def write_masks(root: Path) -> int:
    """Decode the run-length encoded masks of train-rle.csv into all_masks/ID.png; returns how many there are."""
    runs_of: dict[str, list[tuple[int, str]]] = {}
    for line, (image, runs) in read_columns(root / TABLE, ("ImageId", "EncodedPixels")):
        runs_of.setdefault(image, []).extend([(line, runs)] if runs != "-1" else [])
    files = {image: inside(root / MASKS, f"{image}.png") for image in runs_of}  # before any of them is written
    for image, lines in runs_of.items():
        mask = np.zeros(SIDE * SIDE, bool)
        for line, runs in lines:
            try:
                _fill_runs(mask, [int(number) for number in runs.split()])
            except ValueError:
                raise UserError(f"{root / TABLE}:{line}: {runs[:40]!r} is not a run-length encoding") from None
        save_mask(mask.reshape(SIDE, SIDE).T, files[image])
    return len(runs_of)


def _fill_runs(mask: np.ndarray, numbers: list[int]) -> None:
    """Pairs of the gap since the last run and the length of a run, column by column."""
    position = 0
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        if gap < 0 or length < 0 or position + gap + length > len(mask):
            raise ValueError("run outside the image")
        mask[position + gap : position + gap + length] = True
        position += gap + length
