"""CelebA faces: blond hair or not; the spurious attribute is sex (blond men are rare)."""

from __future__ import annotations

from pathlib import Path

from ..data.rows import Rows
from ..errors import UserError
from .reading import SPLIT_CODES, ListedImage, locate, parse_choice, read_columns, rows_from_table

ATTRIBUTES, PARTITION, IMAGES = "list_attr_celeba.csv", "list_eval_partition.csv", "img_align_celeba"
CLASSES = ("not blond", "blond")
SEXES = ("woman", "man")
SIGNS = {"-1": 0, "1": 1}


def read_celeba(root: Path) -> Rows:
    """Label Blond_Hair, attribute Male, the published three splits."""
    folder = locate(root, "CelebA", (ATTRIBUTES, PARTITION, IMAGES), inside=("celeba", "CelebA"))
    images = f"{IMAGES}/{IMAGES}" if (folder / IMAGES / IMAGES).is_dir() else IMAGES
    table = folder / PARTITION
    split_of = {
        name: parse_choice(f"{table}:{line}", "partition", split, SPLIT_CODES)
        for line, (name, split) in read_columns(table, ("image_id", "partition"))
    }
    table, listed = folder / ATTRIBUTES, []
    for line, (name, blond, male) in read_columns(table, ("image_id", "Blond_Hair", "Male")):
        location = f"{table}:{line}"
        if name not in split_of:
            raise UserError(f"{location}: {name} has no split in {PARTITION}")
        label, sex = parse_choice(location, "Blond_Hair", blond, SIGNS), parse_choice(location, "Male", male, SIGNS)
        listed.append(ListedImage(line, f"{images}/{name}", label, sex, split_of[name]))
    note = "the attributes are the published annotations, which are the annotators' impressions"
    return rows_from_table("celeba", folder, table, listed, CLASSES, SEXES, [note])
