"""What a method learns from: its share of every batch, as training shows it, and who takes part."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Dfr, Loop, Train
from ..data.augment import PRESETS, Augment, Pictures
from ..data.batches import Batch, Batches, balanced
from ..data.cache import Cache
from ..data.fingerprints import file_stamps
from ..data.images import Canvas
from ..data.rows import Rows
from ..errors import UserError
from ..metrics.groups import score
from ..metrics.inference import inference_batches, predict_batches
from ..sight import Method
from ..vit.model import Input
from .run_folder import Run

ENOUGH = 64  # pictures that keep a device busy
ANSWERS_PER_LESSON = 8  # pictures that can be answered with the memory that learning from one takes


@dataclass(frozen=True)
class StepInfo:
    """Where in training a step stands. All that is drawn in it may depend on this, and on nothing else."""

    seed: int
    epoch: int
    step: int  # in this epoch
    epochs: int
    steps: int  # in an epoch
    places: Tensor  # int64 [b]: of this process's pictures in the epoch

    @property
    def number(self) -> int:
        """The step, counted from the beginning."""
        return self.epoch * self.steps + self.step

    @property
    def progress(self) -> float:
        """The share of training that is done, in [0, 1)."""
        return self.number / (self.epochs * self.steps)


@dataclass(frozen=True)
class TrainBatch:
    """What a method learns from in one step."""

    images: Tensor  # float [b, 3, h, w] in [0, 1], augmented
    labels: Tensor  # int64 [b]
    groups: Tensor | None
    masks: Tensor | None  # bool [b, h, w], moved along with the images
    indices: Tensor  # int64 [b], into the rows
    when: StepInfo
    crops: tuple[Tensor, ...] = ()  # further views [b, ...], for a learner that makes them

    def in_parts(self, count: int) -> list[TrainBatch]:
        """At most `count` of them, one after the other."""
        if count == 1:
            return [self]
        chunks = {name: value.chunk(count) for name, value in vars(self).items() if isinstance(value, Tensor)}
        crops = [crop.chunk(count) for crop in self.crops]
        number = len(chunks["labels"])
        return [
            replace(self, crops=tuple(c[k] for c in crops), **{name: chunk[k] for name, chunk in chunks.items()})
            for k in range(number)
        ]


@dataclass(frozen=True)
class Group:
    """Parameters that are trained alike."""

    parameters: list[nn.Parameter]
    lr: float = 1.0  # times the learning rate
    decay: bool = True


@dataclass(frozen=True)
class TrainContext:
    """All that training needs at hand."""

    rows: Rows
    run: Run
    accelerator: Accelerator
    expects: Input


class Trainable(nn.Module):
    """What learns step by step, in the loop. Everything that has to survive an interruption is in its state_dict."""

    trains_with_masks = False
    needs_masks = False
    class_log_prior: Tensor | None = None  # [C]: how common the classes are in training, if the loss is to allow for it

    def classification_loss(self, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy. Told how common the classes are, the answer need not know (Menon et al. 2021, eq. 10)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.class_log_prior is None else logits + self.class_log_prior
        return F.cross_entropy(logits, labels, reduction=reduction)

    def prepare(self, desk: TrainContext, train: Callable[[Train], Path]) -> None:
        """Before the loop: what needs a training of its own first, by `train`."""

    def train_indices(self, rows: Rows) -> np.ndarray:
        """The rows of an epoch; what is in it twice is seen twice."""
        return rows.where("train")

    def lesson(self, batch: Batch, augment: Augment, when: StepInfo) -> TrainBatch:
        """What a step is to learn from. Each place has a view of its own: a picture drawn twice is not seen twice."""
        seen = augment(Pictures(batch.images, batch.masks), seed=when.seed, epoch=when.epoch, indices=when.places)
        return TrainBatch(seen.images, batch.labels, batch.groups, seen.masks, batch.indices, when)

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        """Losses, each averaged over the pictures; `loss` is what is minimised."""
        raise NotImplementedError

    def parameter_groups(self, head_lr: float) -> list[Group]:
        raise NotImplementedError

    def after_step(self, when: StepInfo) -> None:
        """After the optimiser's step."""

    def validate(self, exam: Batches, desk: TrainContext, select: str) -> dict[str, float]:
        """What the epoch has come to, `select` among it."""
        answers = predict_batches(cast(Method, self), desk.rows, exam, desk.accelerator)
        return {select: score(answers, select), "accuracy": score(answers, "accuracy")}


# How large a part of the decoded picture is used (so that crops have room), and whether the preset's own colour fills
# what lies outside it, instead of the mean that the backbone expects. `none` is what evaluation sees, and not here.
VIEWS = {"light": (0.875, False), "published": (1.0, True), "imagenet": (0.875, False)}


def view(augment: str, expects: Input) -> tuple[Canvas, Augment]:
    """The canvas that training pictures are decoded to, and what is done with it."""
    preset = replace(PRESETS[augment], size=expects.size)
    if augment == "none":
        return Canvas.of(expects), replace(preset, crop=1.0)
    (h, w), (part, own_fill) = expects.size, VIEWS[augment]
    canvas = Canvas((round(h / part), round(w / part)), resample=expects.resample)
    return canvas, replace(preset, crop=part, fill=preset.fill if own_fill else expects.mean)


def training_batches(desk: TrainContext, config: Loop, learner: Trainable) -> Batches:
    rows, accelerator = desk.rows, desk.accelerator
    indices = learner.train_indices(rows)
    canvas, _ = view(config.augment, desk.expects)
    codes = {"classes": rows.labels, "groups": rows.groups}.get(config.balance)
    return Batches(
        rows, indices, canvas, min(config.batch, len(indices)), shuffle=True, seed=config.seed, workers=config.workers,
        cache=open_cache(desk, canvas, rows.where("train"), config), rank=accelerator.process_index,
        world=accelerator.num_processes, drop_last=True, weights=None if codes is None else balanced(codes, indices),
        pin=accelerator.device.type == "cuda", masks=learner.trains_with_masks,
    )  # fmt: skip


def class_log_prior(desk: TrainContext, config: Loop) -> Tensor | None:
    """[C], if the loss is to be balanced; a class that is never seen in training counts as one picture."""
    if config.balance != "loss":
        return None
    counts = np.bincount(desk.rows.labels[desk.rows.where("train")], minlength=len(desk.rows.classes)).clip(min=1)
    return torch.from_numpy(np.log(counts / counts.sum())).float().to(desk.accelerator.device)


def split_batches(desk: TrainContext, split: str, config: Train, masks: bool = False) -> Batches:
    """A split as evaluation sees it, from the cache of decoded pictures if there is to be one."""
    indices = desk.rows.where(split)
    cache = open_cache(desk, Canvas.of(desk.expects), indices, config)
    return inference_batches(
        desk.rows, indices, desk.expects, desk.accelerator, batch=answered_at_once(config), workers=config.workers,
        cache=cache, masks=masks,
    )  # fmt: skip


def answered_at_once(config: Train) -> int:
    """A step keeps what every block has made of a picture, an answer does not: few pictures in a step need not mean
    few at a time here."""
    if not isinstance(config, Loop):
        return config.batch
    return max(config.batch, min(ENOUGH, ANSWERS_PER_LESSON * config.batch // config.accumulate))


def open_cache(desk: TrainContext, canvas: Canvas, indices: np.ndarray, config: Train) -> Cache | None:
    if config.cache is None:
        return None
    with desk.accelerator.main_process_first():
        cache = Cache.open(desk.rows, canvas, config.cache, indices, workers=max(1, config.workers))
    device = desk.accelerator.device
    return cache.to(device) if device.type == "cuda" else cache


def positions_in_epoch(step: int, count: int, batches: Batches) -> Tensor:
    """int64 [count]: where this process's pictures stand in the epoch, whoever else shares the batch."""
    each, longer = divmod(batches.batch, batches.world)
    start = step * batches.batch + batches.rank * each + min(batches.rank, longer)
    return torch.arange(start, start + count)


@contextmanager
def suggesting_check(config: Train, rows: Rows) -> Generator[None]:
    """A picture or mask that cannot be used ends training, and need not be the only one."""
    try:
        yield
    except UserError as error:
        files = (rows.root / name for name in (*rows.images, *(rows.masks or ())))
        advice = f"`sightline check {config.data}{f' --layout {config.layout}' if config.layout else ''}`"
        if advice in str(error) or not any(str(error).startswith(f"{file}: ") for file in files):
            raise
        raise UserError(f"{error}; {advice} finds all such files") from error


@contextmanager
def deterministic(wanted: bool) -> Generator[None]:
    """The same bits every time, also on a GPU; afterwards torch is as it was before."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_processes(config: Train, rows: Rows, processes: int) -> None:
    """Processes that cut their shares into different numbers of pieces would wait for each other for ever."""
    if isinstance(config, Loop) and processes > 1 and config.accumulate > 1:
        check_even_split(min(config.batch, len(rows.where("train"))), processes, config.accumulate)


def check_even_split(batch: int, processes: int, parts: int) -> None:
    """A batch that does not fall into pieces of one size."""
    if over := batch % (processes * parts):
        advice = f"take {batch - over}" if over < batch else "lower --accumulate"
        raise UserError(f"--batch {batch}: must divide evenly among {processes} processes and {parts} parts; {advice}")


def check_splits(data: Path, rows: Rows, splits: tuple[str, ...]) -> None:
    for split in splits:
        if not len(rows.where(split)):
            raise UserError(f"{data}: no pictures in the split {split!r}; `sightline check` says more")
    only = np.unique(rows.labels[rows.where("train")])
    if len(only) == 1:
        name = rows.classes[only[0]]
        raise UserError(f"{data}: all training pictures are of one class, {name!r}; there is nothing to tell")


def check_files_exist(rows: Rows) -> None:
    """Pictures that training or testing would miss only when they are needed; nobody could go on with such a run, since
    data that are restored are other data."""
    stamps = file_stamps(rows.root, rows.images)
    absent = [i for i, stamp in enumerate(stamps) if stamp.partition(":")[0] in ("", "0")]
    if absent:
        first, some = absent[0], "" if len(absent) == 1 else f", one of {len(absent):,} such pictures"
        raise UserError(
            f"{rows.place(first)}: {rows.images[first]} is missing or empty{some}; run `sightline check`, which names "
            "all, and restore them or remove their rows"
        )


def validate_config(config: Train, rows: Rows) -> None:
    """Settings that cannot work, said before anything is begun."""
    check_splits(config.data, rows, ("train", "val"))
    chosen_on_val = config.selects is not None and not (isinstance(config, Dfr) and config.kind == "train")
    complaints = [
        (config.batch < 1, f"--batch {config.batch}: must be at least 1"),
        (config.workers < 0, f"--workers {config.workers}: must not be negative"),
        (
            config.needs_groups and rows.groups is None,
            f"{config.data}: {config.method} needs groups, and these data have none; give them a group column, or "
            f"train {'erm' if isinstance(config, Loop) else 'a probe'}",
        ),
        (
            config.select == "worst-group" and rows.groups is None,
            "--select worst-group: these data have no groups; give them a group column, or select by worst-class",
        ),
        (
            config.select == "auc" and len(rows.classes) != 2,
            f"--select auc: is for two classes, and these data have {len(rows.classes)}; select by balanced",
        ),
        (
            config.select == "auc" and chosen_on_val and len(np.unique(rows.labels[rows.where("val")])) == 1,
            "--select auc: needs both classes, and all validation pictures are of one; select by balanced",
        ),
    ]
    if isinstance(config, Loop):
        complaints += [
            (config.epochs < 1, f"--epochs {config.epochs}: must be at least 1"),
            (config.accumulate < 1, f"--accumulate {config.accumulate}: must be at least 1"),
            (
                config.accumulate > 1 and config.weighs_batches,
                f"--accumulate {config.accumulate}: {config.method} weighs the pictures of a batch against each other, "
                "and needs it whole; lower --batch instead",
            ),
            (not config.lr >= 0, f"--lr {config.lr}: must not be negative"),
            (not config.head_lr >= 0, f"--head-lr {config.head_lr}: must not be negative"),
            (not config.weight_decay >= 0, f"--weight-decay {config.weight_decay}: must not be negative"),
            (not 0 <= config.warmup <= config.epochs, f"--warmup {config.warmup}: must lie between 0 and --epochs"),
            (not config.clip >= 0, f"--clip {config.clip}: must not be negative; 0 does not clip"),
            (
                config.average is not None and not 0 < config.average < 1,
                f"--average {config.average}: must lie between 0 and 1, such as 0.999",
            ),
            (
                config.patience is not None and config.patience < 1,
                f"--patience {config.patience}: must be at least 1; leave it out to train to the end",
            ),
            (
                config.balance == "groups" and rows.groups is None,
                "--balance groups: these data have no groups; give them a group column",
            ),
        ]
    for wrong, complaint in complaints:
        if wrong:
            raise UserError(complaint)
