"""Baselines that see everything and weight training images: GroupDRO, CVaR-DRO, LfF, JTT."""

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
from ..config.reweighing import Cvar, George, Groupdro, Jtt, Lff
from ..metrics.inference import predict_batches
from ..metrics.predictions import Predictions
from ..training.batches import split_batches
from ..training.checkpoint import load_tensors, with_prefix
from ..training.distributed import process_count
from ..training.run_folder import Run, read_run, vit_config_of
from ..training.trainable import ParameterGroup, TrainBatch, TrainContext
from ..vit.model import Input, ViT, ViTConfig
from .base import backbone_groups, open_and_record
from .erm import Classifier, build_erm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows


def gather_batch(batch: TrainBatch, *values: Tensor) -> tuple[Tensor | slice, list[Tensor]]:
    """Values [b, ...] of this process's images, gathered from all processes in the batch's order; and the indices of
    this process's images among them, which alone carry a gradient."""
    if process_count() == 1:
        return slice(None), list(values)
    positions = batch.info.positions.to(values[0].device)
    ends = torch.stack([-positions.min(), positions.max()])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    ours, count, gathered = positions + ends[0], int(ends.sum()) + 1, []
    for value in values:
        everywhere = value.new_zeros(count, *value.shape[1:])
        everywhere[ours] = value.detach()
        dist.all_reduce(everywhere)
        gathered.append(everywhere.index_copy(0, ours, value))
    return ours, gathered


class Reweighed(Classifier):
    """Weights the images of a batch by their losses."""

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        losses = self.classification_loss(self.vit(batch.images).logits, batch.labels, reduction="none")
        groups = batch.labels if batch.groups is None else batch.groups
        ours, (all_losses, all_groups) = gather_batch(batch, losses.detach(), groups)
        weights = self.image_weights(all_losses, all_groups)
        return {"loss": len(all_losses) * (weights[ours] * losses).mean()}

    def image_weights(self, losses: Tensor, groups: Tensor) -> Tensor:
        """[b]: the weight of each image of the whole batch; they sum to 1."""
        raise NotImplementedError


# ---- GroupDRO --------------------------------------------------------------------------------------------------------


class GroupDro(Reweighed):
    """Groups with a high loss get more and more weight (GroupDRO; Sagawa et al. 2020, algorithm 1)."""

    shares: Tensor  # [groups]: the group weights q
    adjustment: Tensor

    def __init__(
        self, vit: ViT, counts: Tensor, step_size: float = 0.01, adjustment: float = 0.0, freeze_backbone: bool = False
    ):
        super().__init__(vit, freeze_backbone)
        self.step_size = step_size
        present = (counts > 0).float()
        self.register_buffer("shares", present / present.sum())
        self.register_buffer("adjustment", adjustment / counts.clamp(min=1).sqrt(), persistent=False)

    def image_weights(self, losses: Tensor, groups: Tensor) -> Tensor:
        member = F.one_hot(groups, len(self.shares)).to(losses.dtype)
        counts = member.sum(dim=0).clamp(min=1)
        updated = self.shares * (self.step_size * (losses @ member / counts + self.adjustment)).exp()
        self.shares.copy_(updated / updated.sum())
        return member @ (self.shares / counts)


def make_groupdro(config: Groupdro, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    assert rows.groups is not None
    vit, expects = open_and_record(config, rows, run, accelerator)
    counts = np.bincount(rows.groups[rows.split_indices("train")], minlength=len(rows.group_names))
    if accelerator.is_main_process:
        images = dict(zip(rows.group_names, counts.tolist(), strict=True))
        uses = {"group_labels": "of the train data, in every step", "images": images}
        run.note(selection=run.facts["selection"] | uses)
    sizes = torch.from_numpy(counts).float()
    return GroupDro(vit, sizes, config.step_size, config.adjustment, config.freeze_backbone), expects


def build_groupdro(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return GroupDro(ViT(vit_config), torch.ones(len(facts["selection"]["images"])))


# ---- CVaR-DRO --------------------------------------------------------------------------------------------------------


class CvarDro(Reweighed):
    """Only the images of a batch with the highest losses count, with equal weights (CVaR-DRO; Levy et al. 2020, sec.
    2)."""

    def __init__(self, vit: ViT, worst_fraction: float = 0.2, freeze_backbone: bool = False):
        super().__init__(vit, freeze_backbone)
        self.worst_fraction = worst_fraction

    def image_weights(self, losses: Tensor, groups: Tensor) -> Tensor:  # noqa: ARG002
        count = self.worst_fraction * len(losses)
        rank = losses.argsort(descending=True).argsort()
        return (count - rank).clamp(0, 1) / count  # the last of them may have a fraction of the weight


def make_cvar(config: Cvar, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_record(config, rows, run, accelerator)
    return CvarDro(vit, config.worst_fraction, config.freeze_backbone), expects


build_cvar: Any = build_erm


# ---- LfF -------------------------------------------------------------------------------------------------------------


class LfF(Classifier):
    """Learning from failure (LfF; Nam et al. 2020, algorithm 1): a second, biased ViT learns what is easy, and the
    first gives more weight to the images that the biased one fails on."""

    recent: Tensor
    classes: Tensor

    def __init__(self, vit: ViT, images: int, gce_q: float = 0.7, loss_ema: float = 0.7, freeze_backbone: bool = False):
        super().__init__(vit, freeze_backbone)
        self.biased, self.gce_q, self.loss_ema = copy.deepcopy(vit), gce_q, loss_ema
        self.register_buffer("recent", torch.zeros(2, images))  # EMA of the losses of both ViTs, image by image
        self.register_buffer("classes", torch.full((images,), -1, dtype=torch.long))  # of the images seen so far

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        losses, biased_losses = (
            self.classification_loss(vit(batch.images).logits, batch.labels, reduction="none")
            for vit in (self.vit, self.biased)
        )
        weights = self.relative_difficulty(batch, biased_losses.detach(), losses.detach())
        probability = (-biased_losses.detach()).exp()
        # Generalised cross-entropy: the gradient of (1 - p^q) / q, times q.
        biased = (self.gce_q * probability**self.gce_q * biased_losses).mean()
        return {"loss": (weights * losses).mean() + biased, "biased": biased.detach()}

    def relative_difficulty(self, batch: TrainBatch, biased_losses: Tensor, losses: Tensor) -> Tensor:
        """[b]: the biased loss over the sum of both, each an EMA over time and relative to the class's largest."""
        values = torch.stack([biased_losses, losses])
        _, (index, labels, *gathered) = gather_batch(batch, batch.indices, batch.labels, *values.float())
        self.classes[index] = labels
        self.recent[:, index] = self.loss_ema * self.recent[:, index] + (1 - self.loss_ema) * torch.stack(gathered)
        biased, own = self.recent[:, batch.indices] / self.largest_losses()[:, batch.labels].clamp(min=1e-8)
        return biased / (biased + own).clamp(min=1e-8)

    def largest_losses(self) -> Tensor:
        """[2, C]: the largest loss of each class; images not seen yet have loss 0."""
        assert self.vit.head is not None
        zeros = self.recent.new_zeros(2, self.vit.head.out_features)
        return zeros.scatter_reduce(1, self.classes.clamp(min=0).expand(2, -1), self.recent, "amax")

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        return [*backbone_groups(self.vit, head_lr_factor), *backbone_groups(self.biased, head_lr_factor)]


def make_lff(config: Lff, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_record(config, rows, run, accelerator)
    if accelerator.is_main_process:
        run.note(images=len(rows))
    return LfF(vit, len(rows), config.gce_q, config.loss_ema, config.freeze_backbone), expects


def build_lff(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return LfF(ViT(vit_config), facts["images"])


# ---- JTT -------------------------------------------------------------------------------------------------------------


class JttClassifier(Classifier):
    """Just train twice (JTT; Liu et al. 2021, algorithm 1): images that a first classifier misclassifies are
    repeated."""

    def __init__(self, vit: ViT, config: Jtt):
        super().__init__(vit, config.freeze_backbone)
        self.config, self.misclassified = config, np.zeros(0, dtype=np.int64)

    def prepare(self, context: TrainContext, train: Callable[[Train], Path]) -> None:
        first, rows = train_first(self.config, context, train), context.rows
        wrong = ~predictions_of_first(first, self.config, context).correct
        self.misclassified = rows.split_indices("train")[wrong]
        if context.accelerator.is_main_process:
            by_group = None
            if rows.groups is not None:
                counts = np.bincount(rows.groups[self.misclassified], minlength=len(rows.group_names)).tolist()
                by_group = dict(zip(rows.group_names, counts, strict=True))
            facts = {"run": first.folder.name, "failed": len(self.misclassified), "failed_by_group": by_group}
            context.run.note(first=facts)

    def train_indices(self, rows: Rows) -> np.ndarray:
        return np.concatenate([super().train_indices(rows), np.repeat(self.misclassified, self.config.upweight)])


def make_jtt(config: Jtt, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_record(config, rows, run, accelerator)
    return JttClassifier(vit, config), expects


def train_first(config: Jtt | George, context: TrainContext, train: Callable[[Train], Path]) -> Run:
    """The first classifier, trained in a folder inside this run's; an interrupted training is resumed."""
    folder = context.run.folder / "first"
    if not (folder / "metrics.json").exists():
        settings: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(Erm)}
        balance = "none" if config.finds_groups else config.balance
        settings.update(out=folder, epochs=config.first_epochs, resume=True, patience=None, balance=balance)
        train(Erm(**settings))
    return read_run(folder)


def load_first(first: Run, context: TrainContext) -> Classifier:
    """With its last weights."""
    model = Classifier(ViT(vit_config_of(first)))
    tensors, _ = load_tensors(first.last, checksum=first.has_checksums)
    model.load_state_dict(with_prefix("model.", tensors))
    return model.to(context.accelerator.device).eval()


def predictions_of_first(first: Run, config: Train, context: TrainContext) -> Predictions:
    """Of the training images."""
    with closing(split_batches(context, "train", config)) as batches:
        predictions = predict_batches(load_first(first, context), context.rows, batches, context.accelerator)
    if context.accelerator.is_main_process:
        predictions.save_csv(first.folder / "predictions" / "train.csv")
    return predictions


build_jtt: Any = build_erm
