"""`sightline predict`: predictions for images without labels, and images of what was seen.

A few images become CSV or JSON here; a collection becomes Parquet files, which `batch/` writes, restartable.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from .batch.engine import decoded_batches, tables_of
from .batch.job import plan_facts, report, write_result
from .batch.parts import METADATA, Summary, images_with_empty_sight, pyarrow_needed, summary_of
from .batch.plan import Chunks
from .batch.scoring import judge, open_run, scorer_maker
from .batch.sources import Item, list_items, read_item
from .config import Predict
from .config.flags import PREDICTIONS
from .console.files import as_cells, claim, inside, prepare_output, refuse_foreign, replace_durably, save_image
from .console.terminal import counted, fail, is_main_process
from .data.drawing import grey_out_hidden, to_pil_images
from .data.images import Preprocess
from .data.remote import is_url
from .errors import UserError
from .load import Model
from .sight import Prediction, Sight
from .training.distributed import make_accelerator

FILES = (".csv", ".json", ".parquet")


@dataclass(frozen=True)
class PredictionTable:
    """What was predicted. Images in Parquet files are only counted."""

    text: str  # CSV, an entry per readable image; empty if it was written to a file
    images: int
    unreadable: int
    unseen: tuple[str, ...] = ()  # images with an empty sight


def predict(command: Predict) -> PredictionTable:
    """For every image the predicted class and its probabilities: as text, or in the file or folder `command.out`."""
    if (kind := kind_of_output(command)) == "parts":
        summary = write_result(command, make_accelerator(command.device), distance=command.distance)
        return PredictionTable("", summary.images, summary.unreadable)
    return predict_to_file(command, kind)


def kind_of_output(command: Predict) -> str:
    """`parts`, the suffix of a file, or `text`; an error in one line if flags and output do not fit."""
    out = "" if command.out is None else str(command.out)
    suffix = Path(out).suffix.lower()
    if is_url(out):
        if suffix in FILES:
            raise UserError(f"--out {out}: a URL holds one Parquet file per chunk; name it without {suffix}")
        kind = "parts"
    elif out and (out.endswith("/") or Path(out).is_dir() or not suffix) and not Path(out).is_file():
        kind = "parts"
    elif suffix in FILES or not out:
        kind = suffix or "text"
    else:
        raise UserError(f"--out {out}: unknown extension {suffix or '(none)'}; use .csv, .json, .parquet, or a folder")
    only_parts = {"shard": command.shard is not None, "engine": command.engine != "local"}
    for name, given in only_parts.items():
        if given and kind != "parts":
            raise UserError(f"--{name}: needs a folder or a URL as --out, for one Parquet file per chunk")
    for name in ("overlay", "mask"):
        if getattr(command, name) is not None and kind in ("parts", ".parquet"):
            raise UserError(f"--{name}: not with Parquet; use --out FILE.csv, or leave --out out")
    return kind


# ---- one file, or text -----------------------------------------------------------------------------------------------


def predict_to_file(command: Predict, kind: str) -> PredictionTable:
    accelerator = make_accelerator(command.device)
    if accelerator.num_processes > 1:
        raise UserError("several processes write one Parquet file per chunk: name a folder or a URL as --out")
    if kind == ".parquet":
        return predict_to_parquet(command)
    out = None if command.out is None else Path(command.out)
    prepare_output(out)
    if out is not None:
        refuse_foreign(out, PREDICTIONS)
    stream = Predicted(command, accelerator.device)
    if out is None:
        text = io.StringIO()
        write_lines(text, kind, stream.columns, stream.lines())
        return stream.table(text.getvalue())

    def write_partial(partial: Path) -> None:
        with partial.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            write_lines(file, kind, stream.columns, stream.lines())

    write_or_explain(out, write_partial)
    return stream.table("")


def write_or_explain(out: Path, write_partial: Callable[[Path], object]) -> None:
    try:
        replace_durably(out, write_partial)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        reason = error.__cause__.strerror or error.__cause__
        raise UserError(f"{out}: cannot be written ({reason})") from error


class Predicted:
    """Predictions of the images of a command, one after the other; what could not be read is reported and counted."""

    def __init__(self, command: Predict, device: torch.device):
        apply_saved = (
            command.intervention and command.mask is None
        )  # a mask replaces the sight, and interventions on it
        self.command, self.model = command, open_run(command.run, str(device), intervention=apply_saved).model
        method = self.model.method
        if command.overlay is not None and (method.sees_everything or not method.blind):
            raise UserError("--overlay: this method sees the whole image, so there is nothing to draw; leave it out")
        self.items = list_items(command.images)
        paths = [Path(item.key) for item in self.items]
        self.names = overlay_names(paths, [Path(given) for given in command.images])
        if command.overlay is not None:
            claim(command.overlay, self.names)
        self.columns = ["image", "predicted", *(f"p_{name}" for name in self.model.classes)]
        self.unreadable, self.unseen = 0, []

    def lines(self) -> Iterator[dict[str, Any]]:
        chunks = Chunks(self.items, max(1, len(self.items)))
        preprocess, settings = Preprocess.of(self.model.expects), self.command
        stream = decoded_batches(chunks, preprocess, batch=settings.batch, workers=few_workers(settings, self.items))
        for _, start, decoded in stream:
            readable = [start + k for k, error in enumerate(decoded.errors) if error is None]
            for error in filter(None, decoded.errors):
                print(f"sightline: {error}", file=sys.stderr)
            self.unreadable += len(decoded.errors) - len(readable)
            if readable:
                yield from self.predict_batch(readable, decoded.images)

    def predict_batch(self, readable: list[int], images: Tensor) -> Iterator[dict[str, Any]]:
        model, command = self.model, self.command
        prediction = judge_with_mask(model, images, [self.items[i] for i in readable], command.mask)
        for i, probabilities in zip(readable, prediction.probabilities.cpu().tolist(), strict=True):
            predicted = model.classes[max(range(len(probabilities)), key=probabilities.__getitem__)]
            yield dict(zip(self.columns, [self.items[i].key, predicted, *probabilities], strict=True))
        seen = prediction.sight.visible(model.expects.size).flatten(1).any(dim=1).tolist()
        self.unseen += [self.items[i].key for i, is_seen in zip(readable, seen, strict=True) if not is_seen]
        if command.overlay is not None:
            floats = images.to(prediction.logits.device).float() / 255
            draw_overlays(command.overlay, [self.names[i] for i in readable], floats, prediction.sight)

    def table(self, text: str) -> PredictionTable:
        return PredictionTable(text, len(self.items), self.unreadable, tuple(self.unseen))


def few_workers(command: Predict, items: Sequence[Item]) -> int:
    """Processes are not worth their start for a batch or two."""
    return command.workers if len(items) > 2 * command.batch else 0


def judge_with_mask(model: Model, images: Tensor, items: Sequence[Item], mask: Path | None) -> Prediction:
    if mask is None:
        return judge(model, images).prediction
    return model.predict([read_item(item) for item in items], mask)


def write_lines(file: TextIO, kind: str, columns: Sequence[str], lines: Iterator[dict[str, Any]]) -> None:
    if kind != ".json":
        writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(as_cells, lines))
        return
    separator = "[\n"
    for line in lines:
        file.write(separator + " " + json.dumps(line, indent=1, ensure_ascii=False).replace("\n", "\n "))
        separator = ",\n"
    file.write("[]\n" if separator == "[\n" else "\n]\n")


def predict_to_parquet(command: Predict) -> PredictionTable:
    """One file with a row group per chunk. It is computed anew each time; a folder can be continued."""
    out = Path(str(command.out))
    pyarrow_needed(f"--out {out}")
    import pyarrow.parquet as pq

    prepare_output(out)
    refuse_foreign(out, PREDICTIONS)
    accelerator = make_accelerator(command.device)
    opened = open_run(command.run, str(accelerator.device), intervention=command.intervention)
    items = list_items(command.images)
    settings = {"batch": command.batch, "workers": command.workers}
    score = scorer_maker(opened, accelerator, kind=command.kind, distance=command.distance, **settings)(opened.model)
    facts, counts, unseen = plan_facts(command, opened, items), Summary(), []
    constants = {name: facts[name] for name in ("weights", "intervention")}
    metadata = {METADATA: json.dumps(facts | score.notes, ensure_ascii=False).encode()}

    def write_partial(partial: Path) -> None:
        nonlocal counts
        writer = None
        for _, table in tables_of(Chunks(items, command.chunk), score, constants, **settings):
            named = table.replace_schema_metadata(metadata)
            writer = writer or pq.ParquetWriter(partial, named.schema, compression="zstd", write_page_checksum=True)
            writer.write_table(named)
            counts += summary_of(table)
            unseen.extend(images_with_empty_sight(table))
        assert writer is not None, "there is at least one image"
        writer.close()

    write_or_explain(out, write_partial)
    return PredictionTable("", len(items), counts.unreadable, tuple(unseen))


# ---- overlays --------------------------------------------------------------------------------------------------------


def overlay_names(paths: Sequence[Path], given: Sequence[Path]) -> list[Path]:
    """The file of each image's overlay: folders under the given one are kept, and no name is used twice."""
    names, taken = [], set()
    folders = [path.parent if path.suffix.lower() == ".csv" else path for path in given]
    for path in paths:
        folder = next((f for f in folders if f.is_dir() and path.is_relative_to(f)), path.parent)
        parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != ".."]
        stem = Path(*parts)  # inside the folder, also for images that are beside their table
        name, number = stem, 1
        while str(name).lower() in taken:
            number += 1
            name = stem.with_name(f"{stem.name}-{number}")
        taken.add(str(name).lower())
        names.append(name.with_name(f"{name.name}.png"))
    return names


def draw_overlays(folder: Path, names: Sequence[Path], images: Tensor, sight: Sight) -> None:
    for name, image in zip(names, to_pil_images(grey_out_hidden(images, sight)), strict=True):
        save_image(inside(folder, name), image, sync=False)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Predict) -> int:
    if kind_of_output(command) == "parts":
        summary = write_result(command, make_accelerator(command.device), distance=command.distance)
        return report("Predictions", str(command.out), summary) if is_main_process() else 0
    table = predict(command)
    if command.out is None:
        sys.stdout.write(table.text)
    else:
        print(f"Predictions: {command.out}")
    if table.unseen:
        count, first = counted(len(table.unseen)), table.unseen[0]
        print(
            f"note: empty sight for {count} (such as {first}): these predictions carry no information", file=sys.stderr
        )
    if table.unreadable:
        return fail(f"{table.unreadable:,} of {table.images:,} images could not be read", 1)
    return 0
