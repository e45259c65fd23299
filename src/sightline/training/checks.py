"""Checks before training: settings that cannot work, splits, missing files, uneven batches."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from ..config import Dfr, Loop, Train
from ..data.copies import find_copies
from ..data.fingerprints import file_fingerprints
from ..data.rows import SPLITS, Rows
from ..errors import UserError
from .run_folder import Run
from .trainable import Trainable


def validate_config(config: Train, rows: Rows) -> None:
    """Reject settings that cannot work with these data, before anything is written."""
    check_splits(config.data, rows, ("train", "val"))
    tuned_on_val = config.selects is not None and not (isinstance(config, Dfr) and config.fit_on == "train")
    no_groups = "the data have no group labels; add a group column"
    problems = [
        (
            config.needs_groups and rows.groups is None,
            f"{config.data}: {config.method} needs group labels, and the data have none; add a group column, or train "
            f"{'erm' if isinstance(config, Loop) else 'probe'}",
        ),
        (
            config.select_on == "train-split" and isinstance(config, Dfr),
            f"--select-on train-split: {config.method} fits and tunes on the split that --fit-on names; use that",
        ),
        (
            config.select == "worst-group" and rows.groups is None,
            f"--select worst-group: {no_groups}, or select by worst-class",
        ),
        (
            config.select == "auc" and len(rows.classes) != 2,
            f"--select auc: needs two classes, and the data have {len(rows.classes)}; select by balanced",
        ),
        (
            config.select == "auc" and tuned_on_val and len(np.unique(rows.labels[rows.split_indices("val")])) == 1,
            "--select auc: all validation images are of one class; select by balanced",
        ),
        *(loop_problems(config, rows, no_groups) if isinstance(config, Loop) else []),
    ]
    raise_first(problems)


def loop_problems(config: Loop, rows: Rows, no_groups: str) -> list[tuple[bool, str]]:
    return [
        (
            (config.grad_accum or 1) > 1 and config.weighs_batches,
            f"--grad-accum {config.grad_accum}: {config.method} weights the images of a whole batch; lower --batch "
            "instead",
        ),
        (config.warmup > config.epochs, f"--warmup {config.warmup}: must lie between 0 and --epochs"),
        (
            config.balance == "groups" and rows.groups is None and not config.finds_groups,
            f"--balance groups: {no_groups}",
        ),
    ]


def raise_first(problems: list[tuple[bool, str]]) -> None:
    for is_wrong, message in problems:
        if is_wrong:
            raise UserError(message)


def check_processes(config: Train, rows: Rows, processes: int) -> None:
    """Processes with different numbers of micro-batches would wait for each other for ever."""
    if isinstance(config, Loop) and processes > 1 and (config.grad_accum or 1) > 1:
        check_even_split(min(config.batch, len(rows.split_indices("train"))), processes, config.grad_accum or 1)


def check_divisible(model: Trainable, config: Loop, processes: int) -> None:
    raise_first([
        (processes == 1, "--fsdp: divides a model among processes, and there is only one; use accelerate launch"),
        (not model.divisible, f"--fsdp: not with {config.method}; with erm"),
        (config.ema is not None, "--fsdp: not with --ema; leave one of them out"),
        (config.compile, "--fsdp: not with --compile; leave one of them out"),
    ])  # fmt: skip


def check_even_split(batch: int, processes: int, micro_batches: int) -> None:
    if over := batch % (processes * micro_batches):
        advice = f"use --batch {batch - over}" if over < batch else "lower --grad-accum"
        raise UserError(
            f"--batch {batch}: must be divisible by {processes} processes × {micro_batches} micro-batches; {advice}"
        )


def check_splits(data: Path, rows: Rows, splits: tuple[str, ...]) -> None:
    for split in splits:
        if not len(rows.split_indices(split)):
            raise UserError(f"{data}: no images in the split {split!r}; `sightline check {data}` shows the splits")
    labels = np.unique(rows.labels[rows.split_indices("train")])
    if len(labels) == 1:
        raise UserError(f"{data}: all training images are of one class, {rows.classes[labels[0]]!r}; add another class")


def check_files_exist(rows: Rows) -> None:
    """Find missing images before training: a run cannot be resumed on data that were repaired meanwhile."""
    absent = [
        i for i, code in enumerate(file_fingerprints(rows.root, rows.images)) if code.partition(":")[0] in ("", "0")
    ]
    if absent:
        first, others = absent[0], "" if len(absent) == 1 else f" (one of {len(absent):,} such images)"
        raise UserError(
            f"{rows.location(first)}: {rows.images[first]} is missing or empty{others}; run `sightline check` to list "
            "them, then restore them or remove their rows"
        )


def check_copies(config: Train, rows: Rows) -> str:
    """Refuse test images that the model would be trained or selected on; a sentence about them if they are allowed.

    The splits of a published layout are what results are compared on: there they are allowed."""
    copies = find_copies(rows)
    if not copies.pairs:
        return ""
    if not config.allow_copies and config.layout is None:
        test, other = copies.pairs[0]
        split = SPLITS[rows.splits[other]]
        raise UserError(
            f"{rows.location(test)}: {copies.sentence}: {rows.images[test]} is the same file as {rows.images[other]} "
            f"({split}); remove them from test, or train with --allow-copies, and the results will say so"
        )
    return copies.sentence


def check_same_precision(run: Run, accelerator: Accelerator) -> str:
    """The precision of this training, which must be that in which a resumed run began: what --precision auto chooses
    depends on the machine."""
    now = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    before = run.facts.get("precision", run.facts["config"].get("precision", now))
    if before not in ("auto", now):
        raise UserError(f"{run.folder}: began in {before}, not {now}; continue it with --precision {before}")
    return now


@contextmanager
def suggesting_check(config: Train, rows: Rows) -> Generator[None]:
    """To the error about a damaged image or mask, add the command that lists all of them."""
    try:
        yield
    except UserError as error:
        files = (rows.root / name for name in (*rows.images, *(rows.masks or ())))
        advice = f"`sightline check {config.data}{f' --layout {config.layout}' if config.layout else ''}`"
        if advice in str(error) or not any(str(error).startswith(f"{file}: ") for file in files):
            raise
        raise UserError(f"{error}; {advice} lists all such files") from error
