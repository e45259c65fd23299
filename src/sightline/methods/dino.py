"""Self-distillation without labels (DINO: Caron et al., 2021; what DINOv2 added to it: Oquab et al., 2024).

A student sees every view of a picture, its teacher the two large ones; the student is to give each view the answer that
the teacher gives another view of the same picture. The teacher is a moving average of the student. Collapse is held off
by centring or Sinkhorn-Knopp on the teacher's side, and by KoLeo, which keeps the pictures of a batch apart.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..data.augment import uniforms
from ..data.images import Canvas
from ..data.multicrop import MultiCrop
from ..errors import UserError
from ..metrics.inference import inference_batches
from ..metrics.overlap import map_columns
from ..training.context import Group, Trainable, TrainBatch, open_cache
from ..training.distributed import from_all_processes, over_processes, processes
from ..vit.model import ViT
from ..vit.weights import save_backbone

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..config import Pretrain
    from ..data.augment import Augment
    from ..data.batches import Batch, Batches
    from ..training.context import StepInfo, TrainContext

STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
CENTRE_DECAY = 0.9
BOTTLENECK = 256
MASKED_SHARE = 0.3
PANEL = 2048  # pictures that are looked at to see how far it has come
NEIGHBOURS = 20


class Dino(Trainable):
    """Learns from crops alone; what is kept of it is `teacher.vit`."""

    centre: Tensor
    patch_centre: Tensor
    epochs_done: Tensor

    def __init__(self, vit: ViT, config: Pretrain):
        super().__init__()
        self.config = config
        self.student = Projected(vit, config.head_width, config.prototypes)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        p, _, self.early, self.late = geometry(config)
        self.hidden_patch = nn.Parameter(torch.full((3, p, p), 0.5)) if config.masked else None
        self.register_buffer("centre", torch.zeros(config.prototypes))
        self.register_buffer("patch_centre", torch.zeros(config.prototypes))
        self.register_buffer("epochs_done", torch.zeros((), dtype=torch.int64))

    def lesson(self, batch: Batch, augment: Augment, when: StepInfo) -> TrainBatch:  # noqa: ARG002 (crops vary enough)
        """The crops; and, for the masked-patch loss, which patches of the first large one are hidden."""
        views = self.early if when.progress < 1 - self.config.finish else self.late
        crops: tuple[Tensor, ...] = views(batch.images, seed=when.seed, epoch=when.epoch, places=when.places)
        if self.hidden_patch is not None:
            grid = views.large // self.student.vit.config.patch
            crops += (hidden_patches(when, grid).to(batch.images.device, non_blocking=True),)
        return TrainBatch(batch.images, batch.labels, None, None, batch.indices, when, crops)

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        large, small, *hidden = lesson.crops
        b, smalls = small.shape[:2]
        with torch.no_grad():
            seen = self.teacher.vit(large.flatten(0, 1))
            targets = self._targets(self.teacher.head(seen.cls), self.centre, lesson.when).unflatten(0, (b, 2))
        if hidden:
            first = self._without(large[:, 0], hidden[0])
            large = torch.stack([first, large[:, 1]], dim=1)
        own = self.student.vit(large.flatten(0, 1))
        cls = own.cls.unflatten(0, (b, 2))
        if smalls:
            cls = torch.cat([cls, self.student.vit(small.flatten(0, 1)).cls.unflatten(0, (b, smalls))], dim=1)
        losses = {
            "dino": self_distillation(self.student.head(cls), targets),
            "koleo": koleo(cls[:, 0]) + koleo(cls[:, 1]),
        }
        if hidden:
            losses["masked"] = self._masked(own.patches[::2], seen.patches[::2], hidden[0], lesson.when)
        weights = {"dino": 1.0, "koleo": self.config.koleo, "masked": self.config.masked}
        return {"loss": torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()} | losses

    @torch.no_grad()
    def after_step(self, when: StepInfo) -> None:
        """The teacher follows, ever more slowly: its momentum rises to 1 by a cosine."""
        share = (1 - self.config.momentum) * (1 + math.cos(math.pi * when.progress)) / 2
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), share)
        self.epochs_done.fill_(when.epoch + 1)

    def parameter_groups(self, head_lr: float) -> list[Group]:  # noqa: ARG002 (all of it is new)
        """Matrices decay; biases, norms, tokens and positions do not."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                single = name.endswith(("_token", "pos_embed", "hidden_patch")) or parameter.ndim < 2
                groups[not single].append(parameter)
        return [Group(parameters, decay=decay) for decay, parameters in groups.items()]

    def validate(self, exam: Batches, desk: TrainContext, select: str) -> dict[str, float]:
        """Now and then how far the teacher has come. The score is 1 for the last epoch, which is the one to keep."""
        epoch = int(self.epochs_done)
        due = epoch % self.config.examine_every == 0 or epoch in (1, self.config.epochs)
        if self.config.keep_every and epoch % self.config.keep_every == 0 and desk.accelerator.is_main_process:
            save_backbone(self.teacher.vit, desk.run.folder / f"backbone-{epoch:03}.safetensors", torch.float16)
        return {select: float(epoch == self.config.epochs)} | (self.progress_report(exam.indices, desk) if due else {})

    @torch.no_grad()
    def progress_report(self, indices: np.ndarray, desk: TrainContext) -> dict[str, float]:
        """Neighbours of the same class, attention on the masks, and how the teacher uses its prototypes."""
        chosen = indices[:: -(-len(indices) // PANEL)]
        cache = open_cache(desk, Canvas.of(desk.expects), indices, self.config)
        batches = inference_batches(
            desk.rows, chosen, desk.expects, desk.accelerator, batch=256, workers=0, cache=cache, masks=True
        )
        found, used = [], torch.zeros_like(self.centre)
        with contextlib.closing(batches):
            for batch in batches.epoch(0):
                if len(batch):
                    some, answers = self._look(batch.to(self.centre.device), desk.accelerator)
                    found.append(some)
                    used += answers
        table = np.concatenate(gather_object([np.concatenate([some.cpu().numpy() for some in found])] if found else []))
        used = desk.accelerator.reduce(used, "sum")
        spread = torch.special.entr(used / used.sum()).sum().exp()
        figures = {"entropy": table[:, 1].mean(), "prototypes_used": spread.item()}
        masked = table[~np.isnan(table[:, 2])]
        if len(masked):
            figures |= dict(zip(("mass", "hit", "mass_of_even"), masked[:, 2:5].mean(axis=0), strict=True))
        if len(desk.rows.classes) > 1:
            order, features = table[:, 0].astype(np.int64), torch.from_numpy(table[:, 5:])
            figures["knn"] = nearest_neighbours(features, torch.from_numpy(desk.rows.labels[order])).float().mean()
        return {name: float(value) for name, value in figures.items()}

    def _look(self, batch: Batch, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
        """[b, 5 + D]: row, entropy of the answer, mass, hit, mass of an even map, features; and the summed answers."""
        vit = self.teacher.vit
        with accelerator.autocast():
            out = vit(batch.images.float() / 255, cls_attention=[-1])
            logits = self.teacher.head(out.cls).float()
        centre = self.centre if self.config.centring == "mean" else 0.0
        answers = ((logits - centre) / TEACHER_TEMPERATURE).softmax(-1)
        entropy = torch.special.entr(answers).sum(1) / math.log(answers.shape[1])
        on_masks = torch.full((len(batch), 3), torch.nan, device=logits.device)
        if batch.masks is not None and batch.has_mask is not None:
            even = torch.ones(len(batch), 1, math.prod(out.grid), device=logits.device)
            attention = torch.cat([patch_attention(vit, out.cls_attention).mean(1, keepdim=True), even], dim=1)
            mass, hit = mass_and_hit(attention.unflatten(2, out.grid), batch.masks)
            there = torch.stack([mass[:, 0], hit[:, 0], mass[:, 1]], dim=1)
            on_masks = torch.where(batch.has_mask[:, None], there, on_masks)
        row = batch.indices[:, None].double()
        return torch.cat([row, entropy[:, None], on_masks, F.normalize(out.cls.float(), dim=1)], dim=1), answers.sum(0)

    def _targets(self, logits: Tensor, centre: Tensor, when: StepInfo) -> Tensor:
        """[m, K], summing to 1: the teacher's answers, kept from all being one and from being all alike."""
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            if self.config.centring == "sinkhorn":
                return sinkhorn(logits / TEACHER_TEMPERATURE)
            targets = ((logits - centre) / TEACHER_TEMPERATURE).softmax(-1)
            if self.training:
                new = max(1 - CENTRE_DECAY, 1 / (1 + when.number))  # the first centre is that of the first batch
                centre.lerp_(over_processes(logits.mean(0)) / processes(), new)
            return targets

    def _without(self, images: Tensor, hidden: Tensor) -> Tensor:
        """The images with their hidden patches (indices [b, m]) painted over by a learned one."""
        assert self.hidden_patch is not None
        p, (h, w) = self.student.vit.config.patch, images.shape[2:]
        cells = torch.zeros(len(images), h * w // p**2, dtype=torch.bool, device=images.device)
        cells = cells.scatter(1, hidden, True).view(-1, 1, h // p, w // p)
        pixels = cells.repeat_interleave(p, 2).repeat_interleave(p, 3)
        return torch.where(pixels, self.hidden_patch.repeat(1, h // p, w // p), images)

    def _masked(self, student: Tensor, teacher: Tensor, hidden: Tensor, when: StepInfo) -> Tensor:
        """iBOT (Zhou et al., 2022, eq. 2): the student's answers for hidden patches, the teacher's, who sees them."""
        at = hidden[..., None].expand(-1, -1, student.shape[-1])
        with torch.no_grad():
            targets = self._targets(self.teacher.head(teacher.gather(1, at).flatten(0, 1)), self.patch_centre, when)
        logits = self.student.head(student.gather(1, at).flatten(0, 1))
        with torch.autocast(logits.device.type, enabled=False):
            return -(targets * F.log_softmax(logits.float() / STUDENT_TEMPERATURE, -1)).sum(-1).mean()


class Projected(nn.Module):
    """A backbone and the head that compares its features with prototypes."""

    def __init__(self, vit: ViT, hidden: int, prototypes: int):
        super().__init__()
        self.vit, self.head = vit, Prototypes(vit.config.width, hidden, prototypes)


class Prototypes(nn.Module):
    """DINO's head: three layers down to a unit vector, then its cosine with each of K unit vectors."""

    def __init__(self, width: int, hidden: int, prototypes: int):
        super().__init__()
        layers = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, BOTTLENECK)]
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.prototypes = nn.Parameter(torch.empty(prototypes, BOTTLENECK))
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        nn.init.trunc_normal_(self.prototypes, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., K] in [-1, 1]."""
        return F.linear(F.normalize(self.mlp(features), dim=-1, eps=1e-6), F.normalize(self.prototypes, dim=-1))


def build_pretrain(*_: Any) -> nn.Module:
    raise UserError("this run made a backbone, not a classifier; train one with --backbone RUN/backbone.safetensors")


def geometry(config: Pretrain) -> tuple[int, int, MultiCrop, MultiCrop]:
    """Patch, picture, the crops of most of the training, and those of its end, with large ones at full size."""
    patch = config.patch or (8 if config.size == "nano" else 16)
    pixels = config.pixels or (96 if config.size == "nano" else 224)

    def patches(side: float) -> int:
        return max(1, round(side / patch)) * patch

    large = config.large or patches(pixels * (2 / 3 if config.size == "nano" else 1 / 2))
    small = config.small or patches(0.45 * large)
    early = MultiCrop(large, small, config.smalls)
    return patch, pixels, early, replace(early, large=pixels, small=patches(small * pixels / large))


def hidden_patches(when: StepInfo, grid: int) -> Tensor:
    """int64 [b, m]: where smoothed noise is highest, so that neighbours are hidden together."""
    count = round(MASKED_SHARE * grid**2)
    noise = uniforms(when.seed, -2 - when.epoch, when.places, grid**2).float().view(-1, 1, grid, grid)
    return F.avg_pool2d(noise, 3, 1, 1, count_include_pad=False).flatten(1).topk(count, dim=1).indices


# ---- losses ----------------------------------------------------------------------------------------------------------


def self_distillation(student: Tensor, targets: Tensor) -> Tensor:
    """DINO (Caron et al., 2021, eq. 3): cross-entropy of every view [b, n, K] with the other large views [b, 2, K]."""
    with torch.autocast(student.device.type, enabled=False):
        log_shares = F.log_softmax(student.float() / STUDENT_TEMPERATURE, dim=-1)
        agreement = torch.bmm(log_shares, targets.mT).mean(0)  # [n, 2]
        pairs = agreement.numel() - 2
        return (agreement[0, 0] + agreement[1, 1] - agreement.sum()) / pairs


def koleo(features: Tensor) -> Tensor:
    """KoLeo (Sablayrolles et al., 2019, eq. 2): -log of the distance to the nearest other picture of the whole batch.

    The neighbour is held still, so that it may lie in another process.
    """
    with torch.autocast(features.device.type, enabled=False):
        own = F.normalize(features.float(), dim=-1, eps=1e-8)
        with torch.no_grad():
            everyone = from_all_processes(own)
            likeness = own @ everyone.T
            first = len(own) * (dist.get_rank() if processes() > 1 else 0)
            likeness.diagonal(offset=first).fill_(-2)
            nearest = everyone[likeness.argmax(dim=1)]
        return -F.pairwise_distance(own, nearest, eps=1e-8).add(1e-8).log().mean()


def sinkhorn(scores: Tensor, iterations: int = 3) -> Tensor:
    """Sinkhorn-Knopp (SwAV: Caron et al., 2020, eq. 4): answers [m, K] that use all prototypes equally."""
    shares = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    for _ in range(iterations):
        shares = shares / over_processes(shares.sum(0)).clamp(min=1e-12)
        shares = shares / shares.sum(1, keepdim=True)
    return shares


# ---- how far it has come ---------------------------------------------------------------------------------------------


def patch_attention(vit: ViT, cls_attention: Tensor | None) -> Tensor:
    """[B, heads, N], each summing to 1: from CLS to the patches in the last of the blocks that were looked into."""
    assert cls_attention is not None
    patches = cls_attention[:, -1, :, vit.prefix :].float()
    return patches / patches.sum(dim=-1, keepdim=True)


def mass_and_hit(attention: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Of maps [B, k, H, W] and masks [B, h, w], each [B, k]: the share on the mask, and whether the peak is on it."""
    found = [map_columns(each, masks) for each in attention.unbind(1)]
    mass, hit = (torch.stack([columns[name][:, 0] for columns in found], dim=1) for name in ("mass", "hit"))
    return mass, hit


def nearest_neighbours(
    queries: Tensor, labels: Tensor, bank: Tensor | None = None, bank_labels: Tensor | None = None
) -> Tensor:
    """bool [n]: whether the nearest in the bank, voting by exp(cosine / 0.07), name the right class (DINO, sec. 4.1).

    Without a bank each picture's neighbours are the other queries. Features are of length 1.
    """
    likeness = queries @ (queries if bank is None else bank).T
    if bank is None:
        likeness.fill_diagonal_(-2)
    known = labels if bank_labels is None else bank_labels
    near = likeness.topk(min(NEIGHBOURS, likeness.shape[1] - (bank is None)), dim=1)
    votes = torch.zeros(
        len(queries), int(max(known.max(), labels.max())) + 1, device=queries.device, dtype=queries.dtype
    )
    votes.scatter_add_(1, known[near.indices], (near.values / 0.07).exp())
    return votes.argmax(dim=1) == labels
