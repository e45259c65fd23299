"""`sightline distill`: a small selector that learns the part maps of a trained iFAM run.

    sightline distill RUN                        # the first three blocks of its selector
    sightline distill RUN --selector-size 224        # that also look at smaller images

The student is trained with Hinton's loss (2015, at temperature 1): the Kullback-Leibler divergence between both part
assignments of every patch, on augmented training images. Stage 2 is the trained run's. So the result is an iFAM run
like any other, with another selector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Distill, Ifam, Train
from ..config.stored import stored_config
from ..console.terminal import is_main_process
from ..data.images import Preprocess, decode
from ..data.rows import Rows, read_rows
from ..errors import UserError
from ..metrics.cost import measure_cost
from ..metrics.groups import score
from ..metrics.inference import predict_rows, sample_evenly
from ..sight import Method
from ..training.distributed import make_accelerator
from ..training.run_folder import Run, read_run
from ..training.trainable import ParameterGroup, TrainBatch, TrainContext
from ..vit.model import Input, ViT
from ..vit.weights import Origin, load_backbone
from ..what.masked import MaskedViT
from ..where.foreground import fit_logistic
from ..where.parts import PartDiscovery, in_full_precision
from .base import backbone_groups, copy_vit, record_selector
from .ifam import IFam
from .restore import Restored, restore

if TYPE_CHECKING:
    from accelerate import Accelerator

FIRST_IMAGES = 64  # from which the student's prototypes and foreground classifier start
COMPARED_IMAGES = 32  # whose sights and costs are compared


class Distilled(IFam):
    """iFAM whose stage 1 learns the part maps of a teacher; stage 2 is the teacher's, and frozen."""

    def __init__(self, where: PartDiscovery, teacher: IFam):
        super().__init__(where, teacher.what, teacher.settings, teacher.pixels)
        self.teachers = (teacher.where,)  # in a tuple, because it is no part of this model
        self.requires_grad_(False)
        for learned in (where.vit, where.prototypes, *([] if where.gate is None else [where.gate])):
            learned.requires_grad_(True)

    @torch.no_grad()
    def prepare(self, context: TrainContext, train: Callable[[Train], Path]) -> None:  # noqa: ARG002 (nothing to train)
        """Start from the student's mean token of every part that the teacher finds, and a foreground classifier fitted
        to its foreground."""
        device = context.accelerator.device
        where, (teacher,) = self.where.to(device).eval(), self.teachers
        teacher.to(device).eval().requires_grad_(False)
        if context.run.last.exists():
            return
        images = some_images(context.rows, "train", FIRST_IMAGES, context.expects).to(device)
        features = torch.cat([where.vit(where.resize(chunk)).feature_map for chunk in images.split(16)])
        target = torch.cat([part_maps(teacher, chunk, features.shape[2:]) for chunk in images.split(16)])
        means = torch.einsum("bkhw,bdhw->kd", target, features) / target.sum(dim=(0, 2, 3)).clamp_min(1e-6)[:, None]
        where.prototypes.copy_(means)
        if where.gate is not None:
            where.gate.copy_(fit_logistic(features.movedim(1, -1).flatten(0, 2), 1 - target[:, -1].flatten()))

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        parts = self.where.discover(batch.images)
        with torch.no_grad():
            target = part_maps(self.teachers[0], batch.images, parts.scores.shape[2:])
        loss = divergence(target, parts.scores)
        return {"loss": loss, "distillation": loss}

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        where = self.where
        small = [where.prototypes, *([] if where.gate is None else [where.gate])]
        return [*backbone_groups(where.vit, head_lr_factor), ParameterGroup(small, head_lr_factor, decay=False)]


def part_maps(teacher: PartDiscovery, images: Tensor, grid: tuple[int, ...]) -> Tensor:
    """[B, K+1, H, W]: the teacher's part probabilities, averaged over the cells of another grid."""
    maps = teacher.discover(images).probabilities
    return maps if maps.shape[2:] == grid else F.interpolate(maps, grid, mode="area")


@in_full_precision
def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """The mean over patches of KL(teacher ‖ student) (Hinton et al., 2015, eq. 2 at temperature 1)."""
    return F.kl_div(scores.log_softmax(dim=1), target, reduction="none").sum(dim=1).mean()


def some_images(rows: Rows, split: str, count: int, expects: Input) -> Tensor:
    """[n, 3, h, w]: at most `count` images of a split, evenly spaced, as evaluation sees them."""
    chosen = sample_evenly(rows.split_indices(split), count)
    return torch.stack([decode(rows, int(i), Preprocess.of(expects)).image for i in chosen]).float() / 255


# ---- making ----------------------------------------------------------------------------------------------------------


def open_teacher(folder: Path) -> tuple[Restored, IFam]:
    if not (folder / "run.json").is_file():
        read_run(folder)  # says what is missing
    restored = restore(folder)
    teacher = restored.method
    if not isinstance(teacher, IFam) or not isinstance(teacher.what, MaskedViT):
        raise UserError(
            f"{folder}: a {restored.run.facts['method']} run; only iFAM with a hard mask has a selector to distil"
        )
    return restored, teacher


def student_config(command: Distill, teacher: Run) -> Ifam:
    """The run's own settings, which rebuild the model, with those of this training."""
    config = stored_config(Ifam, teacher.facts["config"])
    recorded = teacher.facts["data"]
    own = command.data is None
    return replace(
        config, data=Path(recorded["path"]) if command.data is None else command.data,
        layout=recorded.get("layout") if own else None, out=command.folder, where=command.where,
        selector_size=None, epochs=command.epochs, lr=command.lr, head_lr_factor=command.head_lr_factor,
        batch=command.batch, seed=command.seed, workers=command.workers, cache=command.cache, device=command.device,
        resume=command.resume, balance="none", ema=None, warmup=0.0, grad_accum=1, augment="light", patience=None,
        compile=False,
    )  # fmt: skip


def make_student(
    command: Distill, restored: Restored, teacher: IFam, config: Ifam, rows: Rows, run: Run, accelerator: Accelerator
) -> tuple[Distilled, Input]:
    if rows.classes != restored.classes:
        raise UserError(f"{config.data}: its classes are not those of {command.run}; give data with the same classes")
    old, facts, size = teacher.where, restored.run.facts, command.selector_size or teacher.where.size
    if command.where is not None:
        vit = load_backbone(command.where, classes=0, seed=command.seed)
        vit = copy_vit(vit, replace(vit.config, registers=vit.config.registers * config.registers))
    else:
        depth = old.vit.config.depth
        if command.blocks > depth:
            raise UserError(f"--blocks {command.blocks}: the selector of {command.run} has {depth}")
        vit = copy_vit(old.vit, replace(old.vit.config, depth=command.blocks))
        vit.origin = Origin((facts.get("backbone") or {}).get("name"), f"{command.run.resolve().name}/best.safetensors")
    check_student_size(command, vit, teacher)
    where = PartDiscovery(
        vit, old.parts, len(rows.classes), dropout=old.dropout, temperature=old.temperature, size=size,
        seed=command.seed, gated=old.gate is not None,
    )  # fmt: skip
    if accelerator.is_main_process:
        record_selector(run, vit)
        taught = {"run": command.run.resolve().name, "blocks": vit.config.depth, "of": old.vit.config.depth}
        run.note(**{name: facts.get(name) for name in ("vit", "backbone")}, selector_size=size, distilled=taught)
    return Distilled(where, teacher), restored.expects


def check_student_size(command: Distill, vit: ViT, teacher: IFam) -> None:
    patch, own = teacher.what.vit.config.patch, vit.config.patch
    if teacher.pixels is None and (command.selector_size or own != patch):
        raise UserError(
            f"{command.run}: hides whole patches, so its selector must have the same {patch}-pixel patches; leave out "
            "--selector-size, and choose --where accordingly"
        )
    if command.selector_size and (command.selector_size % own or command.selector_size < own):
        near = max(1, round(command.selector_size / own)) * own
        raise UserError(
            f"--selector-size {command.selector_size}: must be a multiple of the selector's patch "
            f"({own}), such as {near}"
        )


# ---- the command -----------------------------------------------------------------------------------------------------


def distill(command: Distill) -> Path:
    """Train the small selector; returns the new run folder, whose run.json has the comparison under `distilled`."""
    from ..train import train

    restored, teacher = open_teacher(command.run)
    config = student_config(command, restored.run)
    folder = train(config, make=partial(make_student, command, restored, teacher))
    compared = compare(command, config, teacher, restored.expects, folder)  # by all processes together
    if is_main_process():
        run = read_run(folder)
        run.note(distilled=run.facts["distilled"] | compared)
    return folder


@torch.no_grad()
def compare(command: Distill, config: Ifam, teacher: IFam, expects: Input, folder: Path) -> dict[str, Any]:
    """Teacher and student on the validation data: metrics, agreement of their sights, and cost."""
    accelerator = make_accelerator(config.device, config.precision)
    rows = read_rows(config.data, layout=config.layout, seed=config.split_seed)
    pair: dict[str, Method] = {"before": teacher, "after": restore(folder).method}
    found: dict[str, Any] = {"before": {}, "after": {}}
    images = some_images(rows, "val", COMPARED_IMAGES, expects)
    size, seen = (images.shape[2], images.shape[3]), {}
    for name, method in pair.items():
        method.to(accelerator.device).eval()
        predictions = predict_rows(
            method, rows, rows.split_indices("val"), expects, accelerator, batch=command.batch, workers=command.workers,
            cache=command.cache,
        )  # fmt: skip
        found[name] |= {metric: score(predictions, metric) for metric in dict.fromkeys(("accuracy", config.select))}
        on_device = images.to(accelerator.device)
        found[name]["gflops"] = round(measure_cost(method, on_device[:8]).gflops, 3)
        seen[name] = torch.cat([method.look(chunk).visible(size) for chunk in on_device.split(8)])
    both, either = seen["before"] & seen["after"], seen["before"] | seen["after"]
    iou = both.sum(dim=(1, 2)) / either.sum(dim=(1, 2)).clamp_min(1)
    return found | {"on": "val", "images": len(rows.split_indices("val")), "sight_iou": round(float(iou.mean()), 4)}


def run_command(command: Distill) -> int:
    folder = distill(command)
    if is_main_process():
        facts = read_run(folder).facts["distilled"]
        before, after, n = facts["before"], facts["after"], facts["images"]
        for metric in [name for name in before if name != "gflops"]:
            change = f"{100 * (after[metric] - before[metric]):+.1f} points, n = {n}"
            print(f"Validation {metric}: {after[metric]:.1%}, before {before[metric]:.1%} ({change}).")
        ratio = after["gflops"] / before["gflops"]
        print(f"Both stages: {after['gflops']:.3g} GFLOPs per image, {ratio:.0%} of {before['gflops']:.3g}.")
        print(f"Sight IoU of both selectors: {facts['sight_iou']:.2f} (at most {COMPARED_IMAGES} validation images).")
        print(f"Run folder: {folder}")
    return 0
