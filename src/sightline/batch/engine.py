"""The local engine: images are decoded ahead of time in worker processes, and a part is written when it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batches import Workers
from ..data.images import Preprocess
from .parts import Summary, make_table, write_part
from .plan import Chunk
from .scoring import DecodeBatch, Decoded, Score
from .sources import Item

if TYPE_CHECKING:
    import pyarrow as pa

Task = tuple[int, int, int]  # a batch: its chunk among those given, and where it starts and ends in it


class BatchItems(Sequence[Sequence[Item]]):
    """The images of each batch, looked up when it is decoded: batches never reach across chunks."""

    def __init__(self, chunks: Sequence[Chunk], tasks: Sequence[Task]):
        self.chunks, self.tasks = chunks, tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        number, start, end = self.tasks[index]
        return self.chunks[number].items[start:end]


def batches_of(chunks: Sequence[Chunk], batch: int) -> list[Task]:
    return [
        (number, start, min(start + batch, len(chunk.items)))
        for number, chunk in enumerate(chunks)
        for start in range(0, len(chunk.items), batch)
    ]


def decoded_batches(
    chunks: Sequence[Chunk], preprocess: Preprocess, *, batch: int, workers: int, threads: int = 1
) -> Iterator[tuple[Chunk, int, Decoded]]:
    """Every batch, decoded, with its chunk and where it starts in it."""
    tasks = batches_of(chunks, batch)
    with closing(Workers(DecodeBatch(preprocess, threads), workers)) as pool:
        for (number, start, _), decoded in zip(tasks, pool.run(BatchItems(chunks, tasks)), strict=True):
            yield chunks[number], start, decoded


@dataclass(eq=False)
class Rows:
    """The rows of a chunk so far."""

    values: list[dict[str, Any]]
    errors: list[str | None]

    def add(self, score: Score, decoded: Decoded) -> None:
        self.errors += decoded.errors
        if len(decoded.images):
            self.values.append(score(decoded.images))

    def table(self, chunk: Chunk, score: Score, constants: Mapping[str, str | None]) -> pa.Table:
        joined = {
            column.name: joined_values([values[column.name] for values in self.values]) for column in score.columns
        }
        return make_table(chunk, score.columns, joined, self.errors, constants)


def joined_values(pieces: list[Any]) -> Any:
    if pieces and all(isinstance(piece, np.ndarray) for piece in pieces):
        return np.concatenate(pieces)
    return [value for piece in pieces for value in piece]


def tables_of(
    chunks: Sequence[Chunk], score: Score, constants: Mapping[str, str | None],
    *, batch: int, workers: int, threads: int = 1,
) -> Iterator[tuple[Chunk, pa.Table]]:  # fmt: skip
    """The table of every chunk, in order. Only one is held at a time."""
    rows = Rows([], [])
    preprocess = Preprocess.of(score.model.expects)
    for chunk, _, decoded in decoded_batches(chunks, preprocess, batch=batch, workers=workers, threads=threads):
        rows.add(score, decoded)
        if len(rows.errors) == len(chunk.items):
            yield chunk, rows.table(chunk, score, constants)
            rows = Rows([], [])


def write_parts(
    folder: str, chunks: Sequence[Chunk], score: Score, facts: Mapping[str, Any],
    *, batch: int, workers: int, threads: int = 1,
) -> Iterator[Summary]:  # fmt: skip
    """Compute and write the parts of these chunks; what each of them holds."""
    constants = {name: facts[name] for name in ("weights", "intervention")}
    for chunk, table in tables_of(chunks, score, constants, batch=batch, workers=workers, threads=threads):
        yield write_part(folder, chunk, table, facts, score.notes)
