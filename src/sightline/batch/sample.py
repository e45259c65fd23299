"""A random sample of a labelled collection, copied into a data folder, where everything else can work on it."""

from __future__ import annotations

import csv
import io
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..console.files import as_cells, make_folder, save_image, save_text
from ..console.terminal import counted
from ..errors import UserError
from .calibration import note
from .remote import is_url, open_seekable, read_bytes
from .sources import Item, list_items, open_parquet, read_item


def draw_sample(given: str | Path, classes: Sequence[str], count: int, seed: int, folder: Path) -> Path:
    """Copy at most `count` images, as PNG, with their labels and groups in rows.csv; the folder."""
    items = list_items([given])
    chosen = np.sort(np.random.default_rng(seed).permutation(len(items))[:count]).tolist()
    columns: dict[str, Any] = columns_of(str(given), len(items)) or labels_of_items([items[i] for i in chosen], chosen)
    rows = []
    make_folder(folder)
    for i in chosen:
        row = {name: values[i] for name, values in columns.items()}
        row["label"] = class_name(row["label"], classes, items[i].key)
        try:
            image = read_item(items[i])
        except UserError as error:
            note(f"left out of the sample: {error}")
            continue
        save_image(folder / f"{i:08d}.png", image, sync=False)
        rows.append({"image": f"{i:08d}.png"} | row)
    if not rows:
        raise UserError(f"{given}: none of {counted(len(chosen))} can be read")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(as_cells, rows))
    save_text(folder / "rows.csv", text.getvalue())
    print(f"sightline: {len(rows):,} of {counted(len(items))} of {given} drawn, seed {seed}: {folder}", file=sys.stderr)
    return folder


def columns_of(given: str, count: int) -> dict[str, list[str]]:
    """The labels of a table, and its groups if it has any, row by row; nothing if it is no table."""
    if not is_url(given) and (Path(given) / "rows.csv").is_file():
        given = str(Path(given) / "rows.csv")
    suffix = Path(given).suffix.lower()
    if suffix == ".csv":
        reader = csv.DictReader(io.StringIO(read_bytes(given).decode("utf-8-sig"), newline=""))
        rows = list(reader)
        columns = {name.lower(): [row[name] or "" for row in rows] for name in reader.fieldnames or []}
    elif suffix == ".parquet" and not Path(given).is_dir():
        with open_parquet(given) as file:
            names = [name for name in file.schema_arrow.names if is_kept(name)]
            table = file.read(columns=names)
        columns = {name: [str(value) for value in table[name].to_pylist()] for name in names}
    else:
        return {}
    if "label" not in columns:
        raise UserError(f"{given}: no column 'label' among {', '.join(columns) or 'nothing'}; an audit needs labels")
    assert all(len(values) == count for values in columns.values()), "a row per image"
    return {name: values for name, values in columns.items() if is_kept(name)}


def is_kept(column: str) -> bool:
    return column in ("label", "group") or column.startswith("group_")


def labels_of_items(items: Sequence[Item], numbers: Iterable[int]) -> dict[str, dict[int, str]]:
    """By the number of each image: of its .cls file in a tar shard, or else the name of its folder."""
    stems: dict[str, str] = {}
    for place in sorted({item.place for item in items if item.kind == "tar"}):
        with open_seekable(place) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".cls") else None
                if content is not None:
                    stems[f"{place}/{member.name[:-4]}"] = content.read().decode(errors="replace").strip()
    found = (stems.get(item.key.rsplit(".", 1)[0], Path(item.key).parent.name) for item in items)
    return {"label": dict(zip(numbers, found, strict=True))}


def class_name(label: str, classes: Sequence[str], key: str) -> str:
    """A class by its name, or by its number."""
    if label in classes:
        return label
    if label.isdecimal() and int(label) < len(classes):
        return classes[int(label)]
    raise UserError(
        f"{key}: {label!r} is none of the model's classes ({', '.join(classes[:10])}); an audit needs labels: a column "
        "label, .cls files in tar shards, or a folder per class"
    )
