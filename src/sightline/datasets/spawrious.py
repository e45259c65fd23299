"""Spawrious: four breeds of dogs in six places; each breed's places in training and in the test differ (hard variants).

O2O: one place goes with each breed, in 97 and 87 % of the pictures. M2M: two places go with two breeds.
"""

from __future__ import annotations

from pathlib import Path

from ..data.rows import TEST, TRAIN, Rows
from .cub import NO_VAL, Folder, locate, pictures, rows_of_folders

CLASSES = ("bulldog", "corgi", "dachshund", "labrador")
O2O_TRAIN = {"bulldog": "jungle", "corgi": "desert", "dachshund": "mountain", "labrador": "snow"}
O2O_TEST = {"bulldog": "mountain", "corgi": "jungle", "dachshund": "snow", "labrador": "desert"}
O2O_OTHER = "beach"
O2O_SHARES = {"0": 97, "1": 87}  # percent of a folder's pictures in the breed's own place
M2M_ONE, M2M_OTHER = ("dirt", "jungle"), ("beach", "snow")
M2M_TRAIN = {"bulldog": M2M_ONE, "corgi": M2M_OTHER, "dachshund": M2M_ONE, "labrador": M2M_OTHER}
M2M_TEST = {"bulldog": M2M_OTHER, "corgi": M2M_ONE, "dachshund": M2M_OTHER, "labrador": M2M_ONE}
PER_FOLDER = 3168
SORTED = "the published code takes the first files of a folder as the disk lists them; here they are sorted"


def read_spawrious_o2o(root: Path) -> Rows:
    """One-to-one, hard: the rest of each breed's training pictures is on the beach."""
    folder = _located(root, [f"{half}/{O2O_OTHER}" for half in O2O_SHARES])
    folders, sizes = [], set()
    for half, percent in O2O_SHARES.items():
        for label, breed in enumerate(CLASSES):
            own, other, test = (f"{half}/{place}/{breed}" for place in (O2O_TRAIN[breed], O2O_OTHER, O2O_TEST[breed]))
            names, fillers = pictures(folder / own), pictures(folder / other)
            sizes |= {len(names), len(fillers)}
            folders += [
                Folder(own, label, TRAIN, O2O_TRAIN[breed], names[: percent * len(names) // 100]),
                Folder(other, label, TRAIN, O2O_OTHER, fillers[: len(fillers) - percent * len(fillers) // 100]),
                Folder(test, label, TEST, O2O_TEST[breed]),
            ]
    return rows_of_folders("spawrious-o2o", folder, CLASSES, folders, [NO_VAL, SORTED, *_size_note(sizes)])


def read_spawrious_m2m(root: Path) -> Rows:
    """Many-to-many, hard: two breeds each in two places, exchanged in the test; only folder 0 is used."""
    folder = _located(root, [f"0/{place}" for place in M2M_ONE + M2M_OTHER])
    folders = [
        Folder(f"0/{place}/{breed}", label, split, place)
        for split, places_of in ((TRAIN, M2M_TRAIN), (TEST, M2M_TEST))
        for label, breed in enumerate(CLASSES)
        for place in places_of[breed]
    ]
    return rows_of_folders("spawrious-m2m", folder, CLASSES, folders, [NO_VAL])


def _located(root: Path, needs: list[str]) -> Path:
    return locate(root, "Spawrious", needs, inside=("spawrious224",))


def _size_note(sizes: set[int]) -> list[str]:
    return [] if sizes == {PER_FOLDER} else [f"folders hold {min(sizes)} to {max(sizes)} pictures, not {PER_FOLDER:,}"]
