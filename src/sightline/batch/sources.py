"""The images of a collection: folders, tables, Parquet files and tar shards, on the disk or at a URL."""

from __future__ import annotations

import csv
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image

from ..console.files import protect
from ..data.formats import SUFFIXES, is_image
from ..data.images import find_images, open_file, read_image
from ..data.remote import StorageError, filesystem, is_url, open_seekable, read_bytes, storage_error, version_of
from ..errors import UserError

IMAGE_COLUMN = "image"
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Item(NamedTuple):
    """An image of a collection, and where its bytes are."""

    key: str  # its path or URL; for a member of a tar file or a row of a Parquet file, with the file in front
    kind: Literal["file", "tar", "row"]
    place: str  # the file that holds it
    start: int = 0  # in a tar file: the first byte; in a Parquet file: the row
    size: int = 0  # in a tar file: bytes
    version: str = ""  # what reveals a change: size and time, or the storage's ETag; empty if unknown


def list_items(inputs: Iterable[str | Path]) -> list[Item]:
    """All images of these inputs, in an order that depends on nothing but the inputs."""
    items = [item for given in inputs for one in expand_braces(str(given)) for item in items_of(one)]
    if not items:
        raise UserError("no images given: name images, folders, tables, Parquet files or tar shards")
    protect(lambda: (Path(item.place) for item in items), "an image")
    return items


def expand_braces(text: str) -> Iterator[str]:
    """shards-{000..002}.tar -> shards-000.tar, shards-001.tar, shards-002.tar."""
    match = BRACES.search(text)
    if match is None or Path(text).exists():
        yield text
        return
    first, last = match.groups()
    if int(first) > int(last):
        raise UserError(f"{text}: the first number in braces must not be larger than the last")
    for number in range(int(first), int(last) + 1):
        yield from expand_braces(f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}")


def items_of(given: str) -> list[Item]:
    suffix = Path(given).suffix.lower()
    if suffix == ".tar" and not Path(given).is_dir():
        return tar_items(given)
    if suffix == ".parquet" and not Path(given).is_dir():
        return parquet_items(given)
    if is_url(given):
        return url_items(given)
    path = Path(given).expanduser()
    if path.is_dir() and not (path / "rows.csv").is_file() and (shards := shards_in(path)):
        return [item for shard in shards for item in items_of(str(shard))]
    if path.is_file() and suffix and suffix != ".csv" and not is_image(str(path)):
        raise UserError(
            f"{path}: unknown extension {suffix}; use an image, a .csv or .parquet table, a .tar shard, or a folder"
        )
    return [local_item(path) for path in find_images([path])]


def shards_in(folder: Path) -> list[Path]:
    """The tar or Parquet files of a folder without images."""
    if any(is_image(str(path)) for path in folder.rglob("*") if path.is_file()):
        return []
    for suffix in (".tar", ".parquet"):
        if found := sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file()):
            return found
    return []


def local_item(path: Path) -> Item:
    try:
        status = path.stat()
    except OSError:  # a member of a zip file, or a file that a table names and that is missing
        return Item(str(path), "file", str(path))
    return Item(str(path), "file", str(path), version=f"{status.st_size}:{status.st_mtime_ns}")


# ---- URLs ------------------------------------------------------------------------------------------------------------


def url_items(url: str) -> list[Item]:
    if url.lower().endswith(".csv"):
        return listed_items(url, csv_column(url))
    fs, path = filesystem(url)
    try:
        fs.invalidate_cache()
        found = fs.find(path, detail=True)
    except FileNotFoundError:
        found = {}
    except Exception as error:
        raise storage_error(url, error) from error
    files = {fs.unstrip_protocol(name): info for name, info in sorted(found.items())}
    images = [
        Item(name, "file", name, version=version_of(files[name])) for name in files if suffix_of(name) in SUFFIXES
    ]
    if images:
        return images
    for suffix in (".tar", ".parquet"):
        if shards := [name for name in files if suffix_of(name) == suffix]:
            return [item for shard in shards for item in items_of(shard)]
    raise UserError(f"{url}: no images there ({', '.join(sorted(SUFFIXES))}, or .tar or .parquet files of them)")


def suffix_of(name: str) -> str:
    return Path(name).suffix.lower()


def csv_rows(place: str) -> list[dict[str, str]]:
    """The rows of a CSV file, by the lower-case names of its columns."""
    try:
        text = read_bytes(place).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{place}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error})") from None
    names, *lines = list(filter(None, csv.reader(io.StringIO(text, newline="")))) or [[]]
    for number, cells in enumerate(lines, start=1):
        if len(cells) != len(names):
            raise UserError(f"{place}: row {number} has {len(cells)} cells instead of {len(names)}")
    return [dict(zip(map(str.lower, names), cells, strict=True)) for cells in lines]


def csv_column(url: str) -> list[str]:
    rows = csv_rows(url)
    if rows and IMAGE_COLUMN not in rows[0]:
        raise UserError(f"{url}:1: no column 'image' among {', '.join(rows[0])}; add one with the paths")
    return [row[IMAGE_COLUMN] for row in rows]


def listed_items(table: str, names: Sequence[str]) -> list[Item]:
    """Images that a table names, by URL or relative to the table."""
    if not names:
        raise UserError(f"{table}: has no rows; write one per image below the header")
    folder = table.rpartition("/")[0]
    items = []
    for number, name in enumerate(names, start=1):
        if not name:
            raise UserError(f"{table}: row {number} names no image; give its path, relative to this file")
        absolute = is_url(name) or Path(name).is_absolute()
        place = name if absolute or not folder else f"{folder}/{name}"
        items.append(Item(place, "file", place) if is_url(place) else local_item(Path(place)))
    return items


# ---- tar shards, named as webdataset does ----------------------------------------------------------------------------


def tar_items(place: str) -> list[Item]:
    """The images of a tar file, in its order; their bytes are read later, from where they lie in the file."""
    items = []
    try:
        with open_seekable(place) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isfile() and suffix_of(member.name) in SUFFIXES:
                    at, size = member.offset_data, member.size
                    items.append(Item(f"{place}/{member.name}", "tar", place, at, size, f"{size}:{member.mtime}"))
    except FileNotFoundError:
        raise UserError(f"{place}: no such file") from None
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{place}: not an uncompressed tar file, or damaged ({error})") from error
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror or error})") from error
    if not items:
        raise UserError(f"{place}: no images in this tar file ({', '.join(sorted(SUFFIXES))})")
    return items


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def parquet_items(place: str) -> list[Item]:
    """The rows of a Parquet file whose column `image` holds paths, or the bytes of images."""
    with open_parquet(place) as file:
        kind = image_kind(file, place)
        if kind == "paths":
            return listed_items(place, file.read(columns=[IMAGE_COLUMN])[IMAGE_COLUMN].to_pylist())
        return [Item(f"{place}#{row}", "row", place, row) for row in range(file.metadata.num_rows)]


def open_parquet(place: str) -> Any:
    pq = parquet_module(place)
    try:
        return pq.ParquetFile(open_seekable(place))
    except FileNotFoundError:
        raise UserError(f"{place}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: not a Parquet file, or damaged ({error})") from error


def parquet_module(place: str) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{place}: Parquet needs pyarrow; pip install 'sightline[cloud]'") from None
    return pq


def image_kind(file: Any, place: str) -> Literal["paths", "bytes", "struct"]:
    import pyarrow as pa

    schema = file.schema_arrow
    if IMAGE_COLUMN not in schema.names:
        raise UserError(f"{place}: no column 'image' among {', '.join(schema.names)}")
    kind = schema.field(IMAGE_COLUMN).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "paths"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if pa.types.is_struct(kind) and any(kind.field(i).name == "bytes" for i in range(kind.num_fields)):
        return "struct"
    raise UserError(f"{place}: the column 'image' is of type {kind}; it must hold paths, or the bytes of images")


@lru_cache(maxsize=2)
def row_group(place: str, number: int) -> list[Any]:
    with open_parquet(place) as file:
        return file.read_row_group(number, columns=[IMAGE_COLUMN])[IMAGE_COLUMN].to_pylist()


@lru_cache(maxsize=16)
def row_group_ends(place: str) -> tuple[int, ...]:
    ends, end = [], 0
    with open_parquet(place) as file:
        for number in range(file.metadata.num_row_groups):
            end += file.metadata.row_group(number).num_rows
            ends.append(end)
    return tuple(ends)


def parquet_bytes(item: Item) -> bytes:
    try:
        ends = row_group_ends(item.place)
        number = next(k for k, end in enumerate(ends) if item.start < end)
        value = row_group(item.place, number)[item.start - (ends[number - 1] if number else 0)]
    except UserError as error:  # it was readable when it was listed
        raise StorageError(str(error)) from error
    content = value.get("bytes") if isinstance(value, dict) else value
    if not content:
        raise UserError(f"{item.key}: no image in this row")
    return content


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_item(item: Item) -> Image.Image:
    """The image as upright RGB. A UserError if it is missing or damaged; a StorageError if that cannot be known."""
    if item.kind == "file" and not is_url(item.place):
        return read_image(open_file(Path(), item.place), item.key)
    try:
        if item.kind == "row":
            content = parquet_bytes(item)
        elif item.kind == "tar":
            content = read_bytes(item.place, item.start, item.size)
        else:
            content = read_bytes(item.place)
    except FileNotFoundError:
        raise UserError(f"{item.key}: no such file") from None
    except OSError as error:
        raise StorageError(f"{item.place}: cannot be read ({error.strerror or error})") from error
    return read_image(io.BytesIO(content), item.key)
