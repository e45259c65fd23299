"""Spawrious: four dog breeds on six backgrounds; training and test backgrounds of a breed differ (hard variants).

O2O: one background per breed, in 97 % and 87 % of the training images. M2M: two backgrounds shared by two breeds.
"""

from __future__ import annotations

from pathlib import Path

from ..data.rows import TEST, TRAIN, Rows
from .reading import NO_VALIDATION, Folder, image_names, locate, rows_from_folders

CLASSES = ("bulldog", "corgi", "dachshund", "labrador")
O2O_TRAIN = {"bulldog": "jungle", "corgi": "desert", "dachshund": "mountain", "labrador": "snow"}
O2O_TEST = {"bulldog": "mountain", "corgi": "jungle", "dachshund": "snow", "labrador": "desert"}
O2O_SHARED = "beach"
O2O_PERCENT = {"0": 97, "1": 87}  # of a folder's images that are taken from the breed's own background
M2M_FIRST, M2M_SECOND = ("dirt", "jungle"), ("beach", "snow")
M2M_TRAIN = {"bulldog": M2M_FIRST, "corgi": M2M_SECOND, "dachshund": M2M_FIRST, "labrador": M2M_SECOND}
M2M_TEST = {"bulldog": M2M_SECOND, "corgi": M2M_FIRST, "dachshund": M2M_SECOND, "labrador": M2M_FIRST}
PER_FOLDER = 3168
SORTED = "the published code takes the first files of a folder in directory order; here they are sorted first"


def read_spawrious_o2o(root: Path) -> Rows:
    """One-to-one, hard: the remaining training images of each breed have the beach as background."""
    folder = _locate(root, [f"{half}/{O2O_SHARED}" for half in O2O_PERCENT])
    folders, sizes = [], set()
    for half, percent in O2O_PERCENT.items():
        for label, breed in enumerate(CLASSES):
            backgrounds = (O2O_TRAIN[breed], O2O_SHARED, O2O_TEST[breed])
            own, shared, test = (f"{half}/{background}/{breed}" for background in backgrounds)
            own_names, shared_names = image_names(folder / own), image_names(folder / shared)
            sizes |= {len(own_names), len(shared_names)}
            rest = len(shared_names) - percent * len(shared_names) // 100
            folders += [
                Folder(own, label, TRAIN, O2O_TRAIN[breed], own_names[: percent * len(own_names) // 100]),
                Folder(shared, label, TRAIN, O2O_SHARED, shared_names[:rest]),
                Folder(test, label, TEST, O2O_TEST[breed]),
            ]
    notes = [NO_VALIDATION, SORTED]
    if sizes != {PER_FOLDER}:
        notes.append(f"folders contain {min(sizes)} to {max(sizes)} images, not {PER_FOLDER:,}")
    return rows_from_folders("spawrious-o2o", folder, CLASSES, folders, notes)


def read_spawrious_m2m(root: Path) -> Rows:
    """Many-to-many, hard: two breeds on two backgrounds each, exchanged in the test; only folder 0 is used."""
    folder = _locate(root, [f"0/{background}" for background in M2M_FIRST + M2M_SECOND])
    folders = [
        Folder(f"0/{background}/{breed}", label, split, background)
        for split, backgrounds_of in ((TRAIN, M2M_TRAIN), (TEST, M2M_TEST))
        for label, breed in enumerate(CLASSES)
        for background in backgrounds_of[breed]
    ]
    return rows_from_folders("spawrious-m2m", folder, CLASSES, folders, [NO_VALIDATION])


def _locate(root: Path, needs: list[str]) -> Path:
    return locate(root, "Spawrious", needs, inside=("spawrious224",))
