"""The parts of a result: one Parquet file per chunk of images, and whether one that exists is what it should be."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.remote import join, names_in, read_bytes, write_bytes
from ..errors import UserError
from .plan import Chunk, read_plan

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = b"sightline"


@dataclass(frozen=True)
class Column:
    """A column of a part. `width` is the length of its vectors, 0 for single values."""

    name: str
    kind: str  # a name of a type of pyarrow: string, float32, bool_, binary
    width: int = 0

    def arrow(self, values: Sequence[Any], valid: np.ndarray) -> pa.Array:
        """The values of the valid rows, with nulls in the others."""
        import pyarrow as pa

        kind = getattr(pa, self.kind)()
        where = np.cumsum(valid) - 1
        indices = pa.array(np.where(valid, where, 0), mask=~valid)
        if not self.width:
            return pa.array(values, type=kind).take(indices)
        flat = np.ascontiguousarray(np.asarray(values, dtype=np.float32).reshape(-1, self.width))
        whole = np.zeros((len(valid), self.width), np.float32)
        whole[valid] = flat
        return pa.FixedSizeListArray.from_arrays(pa.array(whole.ravel()), self.width, mask=pa.array(~valid))


@dataclass(frozen=True)
class Summary:
    """Counts of finished images."""

    images: int = 0
    unreadable: int = 0
    unseen: int = 0  # with an empty sight
    parts: int = 0

    def __add__(self, other: Summary) -> Summary:
        return Summary(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def pyarrow_needed(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(f"{what}: Parquet needs pyarrow; pip install 'sightline[cloud]'") from None


def part_facts(chunk: Chunk, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished part must say about itself."""
    names = ("format", "kind", "weights", "intervention", "chunk")
    return {name: facts[name] for name in names} | {"number": chunk.number, "inputs": chunk.inputs}


def make_table(
    chunk: Chunk,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Any]],
    errors: Sequence[str | None],
    constants: Mapping[str, str | None],
) -> pa.Table:
    """A row per image of the chunk, in its order; `values` are those of the readable ones."""
    import pyarrow as pa

    valid = np.array([error is None for error in errors])
    arrays = {"image": pa.array([printable(item.key) for item in chunk.items], pa.string())}
    arrays |= {column.name: column.arrow(values[column.name], valid) for column in columns}
    arrays["error"] = pa.array([None if e is None else printable(e) for e in errors], pa.string())
    arrays |= {name: pa.array([value] * len(errors), pa.string()) for name, value in constants.items()}
    return pa.table(arrays)


def printable(text: str) -> str:
    """A name that is not UTF-8, with its other bytes escaped."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def summary_of(table: pa.Table) -> Summary:
    unreadable = len(table) - table["error"].null_count
    return Summary(len(table), unreadable, len(images_with_empty_sight(table)), 1)


def images_with_empty_sight(table: pa.Table) -> list[str]:
    return [row["image"] for row in table.select(["image", "saw_nothing"]).to_pylist() if row["saw_nothing"]]


def write_part(
    folder: str, chunk: Chunk, table: pa.Table, facts: Mapping[str, Any], notes: Mapping[str, Any]
) -> Summary:
    """In one step, with checksums of its pages; `notes` help a reader, such as the names of the classes."""
    import pyarrow.parquet as pq

    text = json.dumps({**part_facts(chunk, facts), **notes}, ensure_ascii=False)
    buffer = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({METADATA: text.encode()}), buffer, compression="zstd", write_page_checksum=True
    )
    write_bytes(join(folder, chunk.name), buffer.getvalue())
    return summary_of(table)


def read_part(folder: str, name: str) -> tuple[pa.Table, dict[str, Any]]:
    """Every page is checked against its checksum. A UserError if the part is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = io.BytesIO(read_bytes(join(folder, name)))
        table = pq.read_table(content, page_checksum_verification=True)
        return table, json.loads((table.schema.metadata or {})[METADATA])
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{join(folder, name)}: missing or damaged ({error})") from error


def finished_part(folder: str, chunk: Chunk, facts: Mapping[str, Any]) -> Summary | None:
    """The counts of a part that is complete and made of these images with these weights; else None."""
    try:
        table, known = read_part(folder, chunk.name)
    except UserError:
        return None
    wanted = part_facts(chunk, facts)
    keys = [printable(item.key) for item in chunk.items]
    if any(known.get(name) != value for name, value in wanted.items()) or table["image"].to_pylist() != keys:
        return None
    return summary_of(table)


def read_tables(folder: str) -> Iterator[pa.Table]:
    """The parts of a result, in order; an error if one is missing."""
    plan = read_plan(folder)
    present = [name for name in names_in(folder) if name.startswith("part-") and name.endswith(".parquet")]
    wanted = -(-plan["images"] // plan["chunk"])
    if len(present) < wanted:
        raise UserError(f"{folder}: {len(present):,} of {wanted:,} parts are there; run the same command again")
    for name in present:
        yield read_part(folder, name)[0]
