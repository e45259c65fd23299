"""SIIM-ACR chest radiographs: is there a pneumothorax? Who is treated for one has a chest tube, and models find that.

Read as on Kaggle (train-rle.csv, dicom-images-train, with cxr_tube_dict.json beside them), or as prepared for iFAM
(train_set, full_test_set, robust_test_set, non_robust_test_set). The tubes are published as a pickle, the masks as
runs of pixels: `sightline convert siim` makes JSON and pictures of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, Rows
from ..errors import UserError
from .cub import NO_VAL, Folder, locate, pictures, present, read_columns, rows_of_folders, save_mask, wrong_folder
from .pickles import command_for, read_converted

CLASSES = ("no pneumothorax", "pneumothorax")
TUBE, NO_TUBE, UNKNOWN = "tube", "no tube", "tube unknown"
TUBES = "cxr_tube_dict"
TABLE, DICOMS, MASKS = "train-rle.csv", "dicom-images-train", "all_masks"
SIDE = 1024  # of every picture, in pixels
ONLY_TEST = "whether there is a tube is known for the test split only"


def read_siim(root: Path) -> Rows:
    """Groups are label and chest tube; the test split is what the tubes were looked for in."""
    if (root / "train_set").is_dir():
        rows = _read_prepared(root)
    elif (root / TABLE).exists():
        rows = _read_kaggle(root)
    else:
        prepared = "train_set with full_test_set as prepared for iFAM"
        raise wrong_folder(root, "SIIM-ACR", f"{TABLE} with {DICOMS} as on Kaggle, or {prepared}")
    masks = [f"{MASKS}/{Path(image).stem}.png" for image in rows.images]
    there = present(root, masks)
    if any(there):
        lacking = len(there) - sum(there)
        notes = (*rows.notes, f"no mask for {lacking:,} of the pictures") if lacking else rows.notes
        masks = [mask if found else "" for mask, found in zip(masks, there, strict=True)]
        return replace(rows, masks=masks, notes=notes)
    how = command_for("siim", root)
    return replace(rows, notes=(*rows.notes, f"no masks: no folder {MASKS}; make it from {TABLE}: {how}"))


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
        robust, other = (pictures(root / name / str(label), (".dcm",)) for name in subsets)
        if sorted(robust + other) != list(pictures(root / path, (".dcm",))):
            raise UserError(f"{root / path}: does not hold the pictures of {' and '.join(subsets)}; prepare it again")
        with_tube, without = (other, robust) if label else (robust, other)
        folders += [Folder(path, label, TEST, TUBE, with_tube), Folder(path, label, TEST, NO_TUBE, without)]
    return rows_of_folders("siim", root, CLASSES, folders, [NO_VAL, ONLY_TEST], (".dcm",))


def _read_kaggle(root: Path) -> Rows:
    locate(root, "SIIM-ACR", (TABLE, DICOMS))
    if not any((root / f"{TUBES}.{ending}").exists() for ending in ("json", "pkl")):
        how = f"put {TUBES}.pkl there, and convert it: {command_for('siim', root)}"
        raise UserError(f"{root}: no {TUBES}.json, which says what the test split is; {how}")
    tubes = read_converted(root, TUBES, "siim")
    if not all(value in (0, 1) for value in tubes.values()):
        raise UserError(f"{root / TUBES}.json: expected true or false for each picture")
    found = {path.stem: path.relative_to(root) for path in sorted((root / DICOMS).glob("*/*/*.dcm"))}
    labels: dict[str, int] = {}
    for line, (picture, runs) in read_columns(root / TABLE, ("ImageId", "EncodedPixels")):
        if picture not in found:
            raise UserError(f"{root / TABLE}:{line}: {picture}.dcm is in no folder of {DICOMS}; restore it")
        labels.setdefault(picture, int(runs != "-1"))
    folders = []
    for picture, label in labels.items():
        attribute = UNKNOWN if picture not in tubes else TUBE if tubes[picture] else NO_TUBE
        split = TRAIN if picture not in tubes else TEST
        path = found[picture]
        folders.append(Folder(path.parent.as_posix(), label, split, attribute, (path.name,)))
    notes = [NO_VAL, ONLY_TEST]
    for count, told in (
        (len(found.keys() - labels.keys()), "pictures without a label, left out"),
        (len(tubes.keys() - labels.keys()), "pictures with a tube label and no other, left out"),
    ):
        notes += [f"{told}: {count:,}"] if count else []
    return rows_of_folders("siim", root, CLASSES, folders, notes, (".dcm",))


def write_masks(root: Path | str) -> int:
    """Write the pneumothorax of each picture in train-rle.csv as all_masks/ID.png; how many there are."""
    root = Path(root)
    runs_of: dict[str, list[tuple[int, str]]] = {}
    for line, (picture, runs) in read_columns(root / TABLE, ("ImageId", "EncodedPixels")):
        runs_of.setdefault(picture, []).extend([(line, runs)] if runs != "-1" else [])
    for picture, lines in runs_of.items():
        mask = np.zeros(SIDE * SIDE, bool)
        for line, runs in lines:
            try:
                _fill(mask, [int(number) for number in runs.split()])
            except ValueError:
                raise UserError(f"{root / TABLE}:{line}: {runs[:40]!r} are no runs of pixels") from None
        save_mask(mask.reshape(SIDE, SIDE).T, root / MASKS / f"{picture}.png")
    return len(runs_of)


def _fill(mask: np.ndarray, numbers: list[int]) -> None:
    """Pairs of a gap since the last run and a run's length, down the columns."""
    place = 0
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        if gap < 0 or length < 0 or place + gap + length > len(mask):
            raise ValueError("runs outside the picture")
        mask[place + gap : place + gap + length] = True
        place += gap + length


# ---- DICOM -----------------------------------------------------------------------------------------------------------
