"""Self-distillation without labels (DINO: Caron et al., 2021; what DINOv2 added to it: Oquab et al., 2024).

A student sees all crops of an image, its teacher only the two global crops; for every crop the student is trained to
match the teacher's output for another crop of the same image. The teacher is an EMA of the student. Collapse is
prevented by centring or Sinkhorn-Knopp on the teacher's side, and by KoLeo, which spreads the images of a batch apart.
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
from ..data.images import Preprocess
from ..data.multicrop import MultiCrop
from ..errors import UserError
from ..metrics.attention import mass_and_hit
from ..metrics.inference import inference_batches
from ..training.batches import open_cache
from ..training.distributed import gather_rows, process_count, sum_over_processes
from ..training.trainable import ParameterGroup, Trainable, TrainBatch
from ..vit.model import ViT
from ..vit.weights import save_backbone
from ..where.attention import normalize_sum

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..config import Pretrain
    from ..data.augment import Augment
    from ..data.batches import Batch, Batches
    from ..training.trainable import StepInfo, TrainContext

STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
CENTRE_DECAY = 0.9
BOTTLENECK = 256
MASKED_SHARE = 0.3
MONITOR_IMAGES = 2048  # images on which progress is monitored
NEIGHBOURS = 20


class Dino(Trainable):
    """Trained on crops without labels; `teacher.vit` is the resulting backbone."""

    centre: Tensor
    patch_centre: Tensor
    epochs_done: Tensor

    def __init__(self, vit: ViT, config: Pretrain):
        super().__init__()
        self.config = config
        self.student = ViTWithHead(vit, config.head_width, config.prototypes)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        p, _, self.early, self.late = crop_geometry(config)
        self.hidden_patch = nn.Parameter(torch.full((3, p, p), 0.5)) if config.ibot else None
        self.register_buffer("centre", torch.zeros(config.prototypes))
        self.register_buffer("patch_centre", torch.zeros(config.prototypes))
        self.register_buffer("epochs_done", torch.zeros((), dtype=torch.int64))

    def make_train_batch(self, batch: Batch, augment: Augment, info: StepInfo) -> TrainBatch:  # noqa: ARG002 (crops are enough)
        """The crops and, for the iBOT loss, which patches of the first global crop are hidden."""
        views = self.early if info.progress < 1 - self.config.full_size_fraction else self.late
        crops: tuple[Tensor, ...] = views(batch.images, seed=info.seed, epoch=info.epoch, positions=info.positions)
        if self.hidden_patch is not None:
            grid = views.large // self.student.vit.config.patch
            crops += (draw_hidden_patches(info, grid).to(batch.images.device, non_blocking=True),)
        return TrainBatch(batch.images, batch.labels, None, None, batch.indices, info, crops)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        large, small, *hidden = batch.crops
        b, smalls = small.shape[:2]
        with torch.no_grad():
            seen = self.teacher.vit(large.flatten(0, 1))
            targets = self._targets(self.teacher.head(seen.cls), self.centre, batch.info).unflatten(0, (b, 2))
        if hidden:
            first = self._hide_patches(large[:, 0], hidden[0])
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
            losses["masked"] = self._ibot_loss(own.patches[::2], seen.patches[::2], hidden[0], batch.info)
        weights = {"dino": 1.0, "koleo": self.config.koleo, "masked": self.config.ibot}
        return {"loss": torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()} | losses

    @torch.no_grad()
    def after_step(self, info: StepInfo) -> None:
        """Update the teacher, an EMA of the student whose momentum rises to 1 on a cosine schedule."""
        rate = (1 - self.config.teacher_momentum) * (1 + math.cos(math.pi * info.progress)) / 2
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), rate)
        self.epochs_done.fill_(info.epoch + 1)

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:  # noqa: ARG002 (all layers are new)
        """Weight decay for matrices, not for biases, norms, tokens and position embeddings."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                decays = parameter.ndim > 1 and not name.endswith(("_token", "pos_embed", "hidden_patch"))
                groups[decays].append(parameter)
        return [ParameterGroup(parameters, decay=decay) for decay, parameters in groups.items()]

    def validate(self, val_batches: Batches, context: TrainContext, select: str) -> dict[str, float]:
        """Progress, every few epochs. The score is 1 for the last epoch only, whose checkpoint is kept."""
        epoch = int(self.epochs_done)
        due = epoch % self.config.validate_every == 0 or epoch in (1, self.config.epochs)
        if self.config.keep_every and epoch % self.config.keep_every == 0 and context.accelerator.is_main_process:
            save_backbone(self.teacher.vit, context.run.folder / f"backbone-{epoch:03}.safetensors", torch.float16)
        progress = self.monitor(val_batches.indices, context) if due else {}
        return {select: float(epoch == self.config.epochs)} | progress

    @torch.no_grad()
    def monitor(self, indices: np.ndarray, context: TrainContext) -> dict[str, float]:
        """k-NN accuracy, attention mass and hit rate on masks, and how many prototypes the teacher uses."""
        chosen = indices[:: -(-len(indices) // MONITOR_IMAGES)]
        cache = open_cache(context, Preprocess.of(context.expects), indices, self.config)
        rows, accelerator = context.rows, context.accelerator
        batches = inference_batches(
            rows, chosen, context.expects, accelerator, batch=256, workers=0, cache=cache, masks=True
        )
        tables, usage = [], torch.zeros_like(self.centre)
        with contextlib.closing(batches):
            for batch in batches.epoch(0):
                if len(batch):
                    table, outputs = self._image_statistics(batch.to(self.centre.device), accelerator)
                    tables.append(table.cpu().numpy())
                    usage += outputs
        table = np.concatenate(gather_object([np.concatenate(tables)] if tables else []))
        usage = accelerator.reduce(usage, "sum")
        perplexity = torch.special.entr(usage / usage.sum()).sum().exp()
        figures = {"entropy": table[:, 1].mean(), "prototypes_used": perplexity.item()}
        masked = table[~np.isnan(table[:, 2])]
        if len(masked):
            figures |= dict(zip(("mass", "hit", "mass_of_even"), masked[:, 2:5].mean(axis=0), strict=True))
        if len(rows.classes) > 1:
            order, features = table[:, 0].astype(np.int64), torch.from_numpy(table[:, 5:])
            figures["knn"] = knn_correct(features, torch.from_numpy(rows.labels[order])).float().mean()
        return {name: float(value) for name, value in figures.items()}

    def _image_statistics(self, batch: Batch, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
        """[b, 5 + D]: row, entropy of the teacher's output, attention mass, hit, mass of a uniform map, features; and
        the sum of the teacher's outputs."""
        vit = self.teacher.vit
        with accelerator.autocast():
            out = vit(batch.images.float() / 255, cls_attention=[-1])
            logits = self.teacher.head(out.cls).float()
        centre = self.centre if self.config.centring == "mean" else 0.0
        outputs = ((logits - centre) / TEACHER_TEMPERATURE).softmax(-1)
        entropy = torch.special.entr(outputs).sum(1) / math.log(outputs.shape[1])
        overlap = torch.full((len(batch), 3), torch.nan, device=logits.device)
        if batch.masks is not None and batch.has_mask is not None:
            uniform = torch.ones(len(batch), 1, math.prod(out.grid), device=logits.device)
            attention = torch.cat([patch_attention(vit, out.cls_attention).mean(1, keepdim=True), uniform], dim=1)
            mass, hit = mass_and_hit(attention.unflatten(2, out.grid), batch.masks)
            measured = torch.stack([mass[:, 0], hit[:, 0], mass[:, 1]], dim=1)
            overlap = torch.where(batch.has_mask[:, None], measured, overlap)
        row = batch.indices[:, None].double()
        return torch.cat([row, entropy[:, None], overlap, F.normalize(out.cls.float(), dim=1)], dim=1), outputs.sum(0)

    def _targets(self, logits: Tensor, centre: Tensor, info: StepInfo) -> Tensor:
        """[m, K], summing to 1: the teacher's outputs, sharpened and centred (or Sinkhorn-Knopp) against collapse."""
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            if self.config.centring == "sinkhorn":
                return sinkhorn(logits / TEACHER_TEMPERATURE)
            targets = ((logits - centre) / TEACHER_TEMPERATURE).softmax(-1)
            if self.training:
                rate = max(1 - CENTRE_DECAY, 1 / (1 + info.number))  # the first centre is that of the first batch
                centre.lerp_(sum_over_processes(logits.mean(0)) / process_count(), rate)
            return targets

    def _hide_patches(self, images: Tensor, hidden: Tensor) -> Tensor:
        """The images with their hidden patches (indices [b, m]) replaced by a learned patch."""
        assert self.hidden_patch is not None
        p, (h, w) = self.student.vit.config.patch, images.shape[2:]
        cells = torch.zeros(len(images), h * w // p**2, dtype=torch.bool, device=images.device)
        cells = cells.scatter(1, hidden, True).view(-1, 1, h // p, w // p)
        pixels = cells.repeat_interleave(p, 2).repeat_interleave(p, 3)
        return torch.where(pixels, self.hidden_patch.repeat(1, h // p, w // p), images)

    def _ibot_loss(self, student: Tensor, teacher: Tensor, hidden: Tensor, info: StepInfo) -> Tensor:
        """iBOT (Zhou et al., 2022, eq. 2): cross-entropy of the student's outputs for patches hidden from it with those
        of the teacher, which sees them."""
        at = hidden[..., None].expand(-1, -1, student.shape[-1])
        with torch.no_grad():
            targets = self._targets(self.teacher.head(teacher.gather(1, at).flatten(0, 1)), self.patch_centre, info)
        logits = self.student.head(student.gather(1, at).flatten(0, 1))
        with torch.autocast(logits.device.type, enabled=False):
            return -(targets * F.log_softmax(logits.float() / STUDENT_TEMPERATURE, -1)).sum(-1).mean()


class ViTWithHead(nn.Module):
    """A backbone and its DINO head."""

    def __init__(self, vit: ViT, hidden: int, prototypes: int):
        super().__init__()
        self.vit, self.head = vit, DinoHead(vit.config.width, hidden, prototypes)


class DinoHead(nn.Module):
    """DINO's head: an MLP of three layers to a unit vector, then its cosine with each of K prototypes."""

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
    raise UserError(
        "this run pretrained a backbone, not a classifier; train one with --backbone RUN/backbone.safetensors"
    )


def crop_geometry(config: Pretrain) -> tuple[int, int, MultiCrop, MultiCrop]:
    """Patch size, image size, the crops of most of training, and those of its end, with global crops at full size."""
    patch = config.patch or (8 if config.arch == "nano" else 16)
    pixels = config.size or (96 if config.arch == "nano" else 224)

    def patches(side: float) -> int:
        return max(1, round(side / patch)) * patch

    large = config.global_size or patches(pixels * (2 / 3 if config.arch == "nano" else 1 / 2))
    small = config.local_size or patches(0.45 * large)
    early = MultiCrop(large, small, config.local_crops)
    return patch, pixels, early, replace(early, large=pixels, small=patches(small * pixels / large))


def draw_hidden_patches(info: StepInfo, grid: int) -> Tensor:
    """int64 [b, m]: the maxima of smoothed noise, so that neighbouring patches are hidden together."""
    count = round(MASKED_SHARE * grid**2)
    noise = uniforms(info.seed, -2 - info.epoch, info.positions, grid**2).float().view(-1, 1, grid, grid)
    return F.avg_pool2d(noise, 3, 1, 1, count_include_pad=False).flatten(1).topk(count, dim=1).indices


# ---- losses ----------------------------------------------------------------------------------------------------------


def self_distillation(student: Tensor, targets: Tensor) -> Tensor:
    """DINO (Caron et al., 2021, eq. 3): cross-entropy of every crop [b, n, K] with the other global crops [b, 2, K]."""
    with torch.autocast(student.device.type, enabled=False):
        log_probabilities = F.log_softmax(student.float() / STUDENT_TEMPERATURE, dim=-1)
        agreement = torch.bmm(log_probabilities, targets.mT).mean(0)  # [n, 2]
        pairs = agreement.numel() - 2
        return (agreement[0, 0] + agreement[1, 1] - agreement.sum()) / pairs


def koleo(features: Tensor) -> Tensor:
    """KoLeo (Sablayrolles et al., 2019, eq. 2): -log of the distance to the nearest other image of the whole batch.

    The neighbour, which may be in another process, has no gradient.
    """
    with torch.autocast(features.device.type, enabled=False):
        own = F.normalize(features.float(), dim=-1, eps=1e-8)
        with torch.no_grad():
            features_of_all = gather_rows(own)
            similarity = own @ features_of_all.T
            first = len(own) * (dist.get_rank() if process_count() > 1 else 0)
            similarity.diagonal(offset=first).fill_(-2)
            nearest = features_of_all[similarity.argmax(dim=1)]
        return -F.pairwise_distance(own, nearest, eps=1e-8).add(1e-8).log().mean()


def sinkhorn(scores: Tensor, iterations: int = 3) -> Tensor:
    """Sinkhorn-Knopp (SwAV: Caron et al., 2020, eq. 4): assignments [m, K] that use all prototypes equally."""
    assignments = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    for _ in range(iterations):
        assignments = assignments / sum_over_processes(assignments.sum(0)).clamp(min=1e-12)
        assignments = assignments / assignments.sum(1, keepdim=True)
    return assignments


# ---- monitoring ------------------------------------------------------------------------------------------------------


def patch_attention(vit: ViT, cls_attention: Tensor | None) -> Tensor:
    """[B, heads, N], each summing to 1: CLS attention on patches in the last of the recorded blocks."""
    assert cls_attention is not None
    return normalize_sum(cls_attention[:, -1, :, vit.prefix :].float())


def knn_correct(
    queries: Tensor, labels: Tensor, bank: Tensor | None = None, bank_labels: Tensor | None = None
) -> Tensor:
    """bool [n]: whether the weighted k-NN vote of the bank, with weights exp(cosine / 0.07), is correct (DINO, sec.
    4.1).

    Without a bank the neighbours are the other queries. Features have unit length.
    """
    similarity = queries @ (queries if bank is None else bank).T
    if bank is None:
        similarity.fill_diagonal_(-2)
    known = labels if bank_labels is None else bank_labels
    near = similarity.topk(min(NEIGHBOURS, similarity.shape[1] - (bank is None)), dim=1)
    votes = torch.zeros(
        len(queries), int(max(known.max(), labels.max())) + 1, device=queries.device, dtype=queries.dtype
    )
    votes.scatter_add_(1, known[near.indices], (near.values / 0.07).exp())
    return votes.argmax(dim=1) == labels
