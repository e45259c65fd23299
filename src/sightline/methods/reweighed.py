"""Rivals that see everything, and let some pictures count more than others: GroupDRO, CVaR-DRO, LfF, JTT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Erm, Train
from ..config.reweighing import Cvar, Groupdro, Jtt, Lff
from ..errors import UserError
from ..metrics.inference import predict_batches
from ..training.checkpoint import load_tensors, under
from ..training.context import Group, TrainBatch, TrainContext, split_batches
from ..training.distributed import processes
from ..training.run_folder import Run, config_of, read_run
from ..vit.model import Input, ViT, ViTConfig
from .base import backbone_groups, open_and_record
from .erm import Classifier, build_erm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows


def of_whole_batch(lesson: TrainBatch, *values: Tensor) -> tuple[Tensor | slice, list[Tensor]]:
    """What all processes know of their pictures, in the batch's order; and which of these are this process's."""
    if processes() == 1:
        return slice(None), list(values)
    places = lesson.when.places.to(values[0].device)
    ends = torch.stack([-places.min(), places.max()])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    ours, count, whole = places + ends[0], int(ends.sum()) + 1, []
    for value in values:
        every = value.new_zeros(count)
        every[ours] = value
        dist.all_reduce(every)
        whole.append(every)
    return ours, whole


class Reweighed(Classifier):
    """Weighs the pictures of a batch by their losses."""

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        losses = self.classification_loss(self.vit(lesson.images).logits, lesson.labels, reduction="none")
        groups = lesson.labels if lesson.groups is None else lesson.groups
        ours, (every, groups) = of_whole_batch(lesson, losses.detach(), groups)
        weights = self.weigh(every, groups)
        return {"loss": len(every) * (weights[ours] * losses).mean()}

    def weigh(self, losses: Tensor, groups: Tensor) -> Tensor:
        """[b]: what each picture counts, of the whole batch."""
        raise NotImplementedError


# ---- GroupDRO --------------------------------------------------------------------------------------------------------


class GroupDro(Reweighed):
    """Groups that are answered badly count more and more (Sagawa et al. 2020, algorithm 1)."""

    shares: Tensor
    adjustment: Tensor

    def __init__(self, vit: ViT, counts: Tensor, step: float = 0.01, adjust: float = 0.0, frozen: bool = False):
        super().__init__(vit, frozen)
        self.step = step
        there = (counts > 0).float()
        self.register_buffer("shares", there / there.sum())
        self.register_buffer("adjustment", adjust / counts.clamp(min=1).sqrt(), persistent=False)

    def weigh(self, losses: Tensor, groups: Tensor) -> Tensor:
        member = F.one_hot(groups, len(self.shares)).to(losses.dtype)
        counts = member.sum(dim=0).clamp(min=1)
        warmup_factor = self.shares * (self.step * (losses @ member / counts + self.adjustment)).exp()
        self.shares.copy_(warmup_factor / warmup_factor.sum())
        return member @ (self.shares / counts)


def make_groupdro(config: Groupdro, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if not (config.step_size >= 0 and config.adjust >= 0):
        raise UserError(f"--step-size {config.step_size}, --adjust {config.adjust}: must not be negative")
    assert rows.groups is not None
    vit, expects = open_and_record(config, rows, run, accelerator)
    counts = np.bincount(rows.groups[rows.where("train")], minlength=len(rows.group_names))
    if accelerator.is_main_process:
        used = dict(zip(rows.group_names, counts.tolist(), strict=True))
        run.note(
            selection=run.facts["selection"] | {"group_labels": "of the train data, in every step", "pictures": used}
        )
    weighed = torch.from_numpy(counts).float()
    return GroupDro(vit, weighed, config.step_size, config.adjust, config.frozen), expects


def build_groupdro(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return GroupDro(ViT(vit_config), torch.ones(len(facts["selection"]["pictures"])))


# ---- CVaR ------------------------------------------------------------------------------------------------------------


class WorstShare(Reweighed):
    """Only the worst answered pictures of a batch count, all alike (CVaR-DRO; Levy et al. 2020, sec. 2)."""

    def __init__(self, vit: ViT, worst: float = 0.2, frozen: bool = False):
        super().__init__(vit, frozen)
        self.worst = worst

    def weigh(self, losses: Tensor, groups: Tensor) -> Tensor:  # noqa: ARG002
        many = self.worst * len(losses)
        rank = losses.argsort(descending=True).argsort()
        return (many - rank).clamp(0, 1) / many  # the last of them may count in part


def make_cvar(config: Cvar, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if not 0 < config.worst <= 1:
        raise UserError(f"--worst {config.worst}: must be more than 0, and at most 1, which is all pictures")
    vit, expects = open_and_record(config, rows, run, accelerator)
    return WorstShare(vit, config.worst, config.frozen), expects


build_cvar: Any = build_erm


# ---- LfF -------------------------------------------------------------------------------------------------------------


class FromFailure(Classifier):
    """A second ViT learns what is easy, and the first one what that fails at (LfF; Nam et al. 2020, algorithm 1)."""

    recent: Tensor
    classes: Tensor

    def __init__(self, vit: ViT, pictures: int, easy: float = 0.7, memory: float = 0.7, frozen: bool = False):
        super().__init__(vit, frozen)
        self.biased, self.easy, self.memory = copy.deepcopy(vit), easy, memory
        self.register_buffer("recent", torch.zeros(2, pictures))  # losses of both, picture by picture
        self.register_buffer("classes", torch.full((pictures,), -1, dtype=torch.long))  # of pictures seen so far

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        ours, theirs = (
            self.classification_loss(vit(lesson.images).logits, lesson.labels, reduction="none")
            for vit in (self.vit, self.biased)
        )
        counts = self.hardness(lesson, theirs.detach(), ours.detach())
        sure = (-theirs.detach()).exp()
        biased = (self.easy * sure**self.easy * theirs).mean()  # the gradient of (1 - p^q) / q, times q
        return {"loss": (counts * ours).mean() + biased, "biased": biased.detach()}

    def hardness(self, lesson: TrainBatch, theirs: Tensor, ours: Tensor) -> Tensor:
        """[b]: the easy one's share of both losses, each smoothed over time and relative to the class's largest."""
        values = torch.stack([theirs, ours])
        _, (index, labels, *whole) = of_whole_batch(lesson, lesson.indices, lesson.labels, *values.float())
        self.classes[index] = labels
        self.recent[:, index] = self.memory * self.recent[:, index] + (1 - self.memory) * torch.stack(whole)
        theirs, ours = self.recent[:, lesson.indices] / self.largest()[:, lesson.labels].clamp(min=1e-8)
        return theirs / (theirs + ours).clamp(min=1e-8)

    def largest(self) -> Tensor:
        """[2, C]: of each class; a picture that was not seen yet has no loss, and takes no part."""
        assert self.vit.head is not None
        none = self.recent.new_zeros(2, self.vit.head.out_features)
        return none.scatter_reduce(1, self.classes.clamp(min=0).expand(2, -1), self.recent, "amax")

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return [*backbone_groups(self.vit, head_lr), *backbone_groups(self.biased, head_lr)]


def make_lff(config: Lff, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if not (config.easy > 0 and 0 <= config.memory < 1):
        raise UserError(f"--easy {config.easy}: must be more than 0; --memory {config.memory}: from 0 to below 1")
    vit, expects = open_and_record(config, rows, run, accelerator)
    if accelerator.is_main_process:
        run.note(pictures=len(rows))
    return FromFailure(vit, len(rows), config.easy, config.memory, config.frozen), expects


def build_lff(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return FromFailure(ViT(vit_config), facts["pictures"])


# ---- JTT -------------------------------------------------------------------------------------------------------------


class Twice(Classifier):
    """Sees the pictures that a first classifier failed at more often (JTT; Liu et al. 2021, algorithm 1)."""

    def __init__(self, vit: ViT, config: Jtt):
        super().__init__(vit, config.frozen)
        self.config, self.failed = config, np.zeros(0, dtype=np.int64)

    def prepare(self, desk: TrainContext, train: Callable[[Train], Path]) -> None:
        """Train the first classifier, inside this run's folder; it goes on where it was stopped."""
        folder = desk.run.folder / "first"
        if not (folder / "metrics.json").exists():
            same: dict[str, Any] = {field.name: getattr(self.config, field.name) for field in fields(Erm)}
            train(Erm(**same | {"out": folder, "epochs": self.config.first, "resume": True, "patience": None}))
        first, rows = read_run(folder), desk.rows
        self.failed = failures(first, self.config, desk)
        if desk.accelerator.is_main_process:
            groups = None if rows.groups is None else rows.groups[self.failed]
            counts = None if groups is None else np.bincount(groups, minlength=len(rows.group_names)).tolist()
            by_group = None if counts is None else dict(zip(rows.group_names, counts, strict=True))
            desk.run.note(first={"run": folder.name, "failed": len(self.failed), "failed_by_group": by_group})

    def train_indices(self, rows: Rows) -> np.ndarray:
        return np.concatenate([super().train_indices(rows), np.repeat(self.failed, self.config.more)])


def make_jtt(config: Jtt, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if config.first < 1 or config.more < 0:
        raise UserError(f"--first {config.first}: at least one epoch; --more {config.more}: must not be negative")
    vit, expects = open_and_record(config, rows, run, accelerator)
    return Twice(vit, config), expects


def failures(first: Run, config: Jtt, desk: TrainContext) -> np.ndarray:
    """The training pictures that it answers wrongly, with the weights that it had in the end."""
    model = Classifier(ViT(config_of(first)))
    model.load_state_dict(under("model.", load_tensors(first.last)[0]))
    with closing(split_batches(desk, "train", config)) as batches:
        answers = predict_batches(model.to(desk.accelerator.device).eval(), desk.rows, batches, desk.accelerator)
    if desk.accelerator.is_main_process:
        answers.save_csv(first.folder / "predictions" / "train.csv")
    return desk.rows.where("train")[~answers.correct]


build_jtt: Any = build_erm
