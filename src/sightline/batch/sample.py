"""A random sample of a labelled collection, copied into a data folder, where everything else can work on it."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..console.files import as_csv, make_folder, save_image, save_text
from ..console.terminal import counted
from ..data.remote import StorageError, is_url, open_seekable
from ..errors import UserError
from .calibration import note
from .plan import inputs_digest
from .sources import Item, csv_rows, expand_braces, items_of, open_parquet, read_item, suffix_of

Labels = dict[str, str]  # of an image: its class, as label, and its groups
TABLES = (".csv", ".parquet")
HOW = "labels are a column label, .cls files in tar shards, or folders with the names of the classes"


class Listed(NamedTuple):
    """An image, and its number in the input that it was found in."""

    source: str
    number: int
    item: Item


def draw_sample(given: str, classes: Sequence[str], count: int, seed: int, parent: Path) -> Path:
    """A data folder with at most `count` images, as PNG, and their labels and groups."""
    listed = [Listed(one, k, item) for one in expand_braces(given) for k, item in enumerate(items_of(one))]
    chosen = np.random.default_rng(seed).choice(len(listed), min(count, len(listed)), replace=False)
    digest = inputs_digest([one.item for one in listed])
    folder = parent / f"{Path(given).stem}-{count}-{seed}-{digest[:8]}"
    copy_images([listed[i] for i in np.sort(chosen)], classes, folder)
    print(f"sightline: {counted(len(chosen))} of {len(listed):,} drawn, seed {seed}: {folder}", file=sys.stderr)
    return folder


def copy_images(chosen: Sequence[Listed], classes: Sequence[str], folder: Path) -> None:
    labels = labels_of(chosen, classes)  # before anything is written: a wrong one is an error
    columns, rows = ["image", *labels[0]], []
    make_folder(folder)
    for number, (one, known) in enumerate(zip(chosen, labels, strict=True)):
        try:
            image = read_item(one.item)
        except StorageError:
            raise
        except UserError as error:
            note(f"not in the sample: {error}")
            continue
        name = f"{number:06d}.png"
        save_image(folder / name, image, sync=False)
        rows.append({"image": name} | known)
    if not rows:
        raise UserError(f"{chosen[0].source}: none of {counted(len(chosen))} can be read")
    save_text(folder / "rows.csv", as_csv(columns, rows))


# ---- labels ----------------------------------------------------------------------------------------------------------


def labels_of(chosen: Sequence[Listed], classes: Sequence[str]) -> list[Labels]:
    """Of each image's row in a table, of its .cls file in a tar shard, or else of the folder that it is in."""
    places = [place_of_labels(one) for one in chosen]
    known = {file: labels_in(file) for file in {file for file, _ in places}}
    found = []
    for one, (file, row) in zip(chosen, places, strict=True):
        labels = known[file].get(row)
        name = label_of_folder(one.item, classes) if labels is None else class_name(labels["label"], classes)
        if name is None:
            label = Path(one.item.key).parent.name if labels is None else labels["label"]
            names = ", ".join(classes[:10])
            raise UserError(f"{one.item.key}: its label {label!r} is none of the model's classes ({names}); {HOW}")
        found.append((labels or {}) | {"label": name})
    return found


def place_of_labels(one: Listed) -> tuple[str, int | str]:
    """The file that labels would be in, and where in it."""
    if (table := table_of(one.source)) is not None:
        return table, one.number
    return one.item.place, one.item.start if one.item.kind == "row" else stem_of(one.item.key)


def table_of(source: str) -> str | None:
    if not is_url(source) and (Path(source) / "rows.csv").is_file():
        return str(Path(source) / "rows.csv")
    return source if suffix_of(source) in TABLES and not Path(source).is_dir() else None


def labels_in(file: str) -> Mapping[int | str, Labels]:
    """By the number of each row of a table, or the name of each .cls file in a tar shard; none of another file."""
    if suffix_of(file) in TABLES:
        return dict(enumerate(labels_in_table(file)))
    return labels_in_tar(file) if suffix_of(file) == ".tar" else {}


def labels_in_table(table: str) -> list[Labels]:
    if suffix_of(table) == ".csv":
        rows = csv_rows(table)
    else:
        with open_parquet(table) as file:
            rows = file.read(columns=[name for name in file.schema_arrow.names if is_kept(name)]).to_pylist()
    found = [{name: str(value) for name, value in row.items() if is_kept(name)} for row in rows]
    if not found or "label" not in found[0]:
        raise UserError(f"{table}: has no column 'label'; {HOW}")
    return found


def is_kept(column: str) -> bool:
    return column in ("label", "group") or column.startswith("group_")


def labels_in_tar(shard: str) -> dict[int | str, Labels]:
    found: dict[int | str, Labels] = {}
    with open_seekable(shard) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if suffix_of(member.name) == ".cls" and (content := archive.extractfile(member)) is not None:
                label = content.read().decode(errors="replace").strip()
                found[stem_of(f"{shard}/{member.name}")] = {"label": label}
    return found


def stem_of(name: str) -> str:
    """What the files of one image share in a tar shard: the path up to the first dot of the file's name."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def class_name(label: str, classes: Sequence[str]) -> str | None:
    """A class by its name, or by its number."""
    by_number = classes[int(label)] if label.isdecimal() and int(label) < len(classes) else None
    return label if label in classes else by_number


def label_of_folder(item: Item, classes: Sequence[str]) -> str | None:
    """The innermost folder with the name of a class."""
    return next((name for name in reversed(Path(item.key).parts[:-1]) if name in classes), None)
