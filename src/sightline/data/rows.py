"""A data set is rows: one per image, with a label, and perhaps a group, a mask, boxes and a split."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SPLITS = ("train", "val", "test")
TRAIN, VAL, TEST = range(3)


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns over n images; a million rows are cheap.

    Paths are relative to `root`. A path may lead into an archive: `birds.zip/images/1.webp`.
    Groups are the combinations of label and attributes that occur, numbered in the order of `group_names`.
    """

    name: str
    root: Path
    images: list[str]
    labels: np.ndarray  # int64 [n], into `classes`
    classes: tuple[str, ...]
    splits: np.ndarray  # int8 [n], into SPLITS
    groups: np.ndarray | None = None  # int64 [n], into `group_names`
    group_names: tuple[str, ...] = ()
    masks: list[str] | None = None  # paths; "" where an image has none
    boxes: list[np.ndarray] | None = None  # per image float32 [k, 4]: left, top, right, bottom in pixels of the file
    keypoints: np.ndarray | None = None  # float32 [n, K, 3]: x, y in pixels of the file, visible 0/1
    keypoint_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what was decided while reading, for the user to know

    def __len__(self) -> int:
        return len(self.images)
