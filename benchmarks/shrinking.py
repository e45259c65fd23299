"""Why do learned parts shrink on coarse grids? Stage 1 alone, on a frozen ViT whose tokens are computed beforehand, so
that a training of hundreds of steps takes seconds: with the published code's augmentation and ours, and with its weight
of the total variation and the one that takes the grid into account.

    python benchmarks/shrinking.py DATA BACKBONE --out benchmarks/results/shrinking.json

DATA: a dataset with object masks, such as `sightline data waterbirds --limit 1200` makes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from tyro.conf import Positional

from record import record
from sightline.config import Pdiscoformer
from sightline.config.parts import Shaping
from sightline.data.augment import PRESETS, Affine, AnnotatedImages, random_affine, unwarp_affine, warp_affine
from sightline.data.batches import Batch, Batches
from sightline.data.images import Preprocess
from sightline.data.rows import Rows, read_rows
from sightline.methods.base import PartSettings, RandomDraws
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.sight import cell_share
from sightline.training.schedule import cosine_decay
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone
from sightline.where.parts import PartDiscovery, Parts, gumbel_noise

AUGMENTATIONS = ("light", "published")
COPIES, AFFINES = 6, 6  # augmented copies of the training images, and transformations of each (equivariance loss)
TEST, STEPS, BATCH = 256, 375, 64
GRID = 37  # patches per side in the papers


@dataclass(frozen=True)
class Shrinking:
    data: Positional[Path]
    """Dataset with object masks."""
    backbone: Positional[Path]
    """Weights of the frozen ViT."""
    out: Path
    """Result file."""
    seeds: int = 5
    """Number of seeds."""


@dataclass(frozen=True)
class Tokens:
    """Patch tokens of training images, half precision."""

    labels: Tensor  # int64 [N]
    plain: Tensor  # [COPIES, N, D, H, W]
    moved: Tensor  # [COPIES, AFFINES, N, D, H, W]: of transformed images
    affines: list[list[Affine]]
    size: tuple[int, int]


def load(rows: Rows, vit: ViT, split: str, most: int | None = None) -> list[Batch]:
    indices = rows.split_indices(split)
    if most is not None:
        indices = np.sort(np.random.default_rng(0).choice(indices, min(most, len(indices)), replace=False))
    preprocess = Preprocess.of(vit.config.input)
    with closing(Batches(rows, indices, preprocess, 32, shuffle=False, seed=0, workers=0)) as batches:
        return list(batches.epoch(0))


@torch.inference_mode()
def tokens_of(vit: ViT, images: Tensor) -> Tensor:
    return torch.cat([vit(chunk).feature_map.half() for chunk in images.split(32)])


def training_tokens(vit: ViT, batches: list[Batch], augmentation: str) -> Tokens:
    images, size = torch.cat([batch.images for batch in batches]), vit.config.input.size
    augment, plain, moved, affines = replace(PRESETS[augmentation], size=size), [], [], []
    for copy in range(COPIES):
        given = AnnotatedImages(images=images, masks=None, boxes=None, keypoints=None)
        seen = augment(given, seed=0, epoch=copy, indices=torch.arange(len(images))).images
        affines.append([random_affine(size, seed=copy, step=step) for step in range(AFFINES)])
        plain.append(tokens_of(vit, seen))
        mean = vit.mean
        moved.append(torch.stack([tokens_of(vit, warp_affine(seen - mean, each) + mean) for each in affines[-1]]))
    return Tokens(torch.cat([batch.labels for batch in batches]), torch.stack(plain), torch.stack(moved), affines, size)


class Prepared(PartDiscovery):
    """Stage 1 on tokens in place of images; `moved` holds the same of transformed images."""

    moved: Tensor
    image_size: tuple[int, int]

    def discover(self, images: Tensor, *, noise: Tensor | None = None) -> Parts:
        return self._assign(images.float(), noise)

    def discover_transformed(self, images: Tensor, affine: Affine, *, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return unwarp_affine(self.discover(self.moved, noise=noise).probabilities, affine, self.image_size)


def trained(vit: ViT, tokens: Tokens, config: Pdiscoformer, seed: int) -> Prepared:
    """Prototypes, modulation and part classifier after STEPS steps, with the losses of `sightline train pdiscoformer`.
    Its loop reads images, so a short one stands in for it."""
    torch.manual_seed(seed)
    where = Prepared(vit, config.parts, int(tokens.labels.max()) + 1, dropout=config.part_dropout, seed=seed)
    where.image_size = tokens.size
    method = PDiscoFormer(where, PartSettings.of(config))
    groups = where.part_groups(config.head_lr_factor, config.prototype_lr_factor)
    optimizer = torch.optim.AdamW([{"params": g.parameters, "lr": config.lr * g.lr} for g in groups], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine_decay(step, STEPS))
    trainable = [p for group in groups for p in group.parameters]
    for _ in range(STEPS):
        some = torch.randperm(len(tokens.labels))[:BATCH]
        copy, other = int(torch.randint(COPIES, ())), int(torch.randint(AFFINES, ()))
        plain, where.moved = tokens.plain[copy, some], tokens.moved[copy, other, some]
        shape = (len(some), config.parts + 1, *plain.shape[2:])
        noise, noise_moved = gumbel_noise(shape), gumbel_noise(shape)
        keep = where.draw_keep_parts(plain)
        draws = RandomDraws(noise, noise_moved, noise, tokens.affines[copy][other], keep, keep)
        optimizer.zero_grad()
        torch.stack(list(method.losses(plain, tokens.labels[some], draws).values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(trainable, config.clip_grad)
        optimizer.step()
        schedule.step()
    return where


@torch.no_grad()
def measured(where: Prepared, features: Tensor, objects: Tensor) -> dict[str, float]:
    """Of patches that belong to a part, against those at least half of which is object."""
    seen = where.discover(features).logits.argmax(dim=1) != where.parts
    both, either = (seen & objects).sum(dim=(1, 2)), (seen | objects).sum(dim=(1, 2))
    return {
        "coverage": round(seen.float().mean().item(), 4),
        "patch_iou": round((both / either.clamp(min=1)).mean().item(), 4),
    }


def main() -> None:
    config = tyro.cli(Shrinking)
    rows, vit = read_rows(config.data), load_backbone(str(config.backbone), classes=0, seed=0).eval()
    test, train = load(rows, vit, "test", TEST), load(rows, vit, "train")
    features = torch.cat([tokens_of(vit, batch.images.float() / 255) for batch in test])
    masks = torch.cat([batch.masks for batch in test if batch.masks is not None])
    objects = cell_share(masks, features.shape[2:]) >= 0.5
    facts = {
        "note": "Stage 1 alone on a frozen ViT-Ti, --preset published otherwise; patches of test images.",
        "images": {"train": sum(map(len, train)), "test": len(features)},
        "steps": STEPS,
        "object_area": round(objects.float().mean().item(), 4),
    }
    runs: list[dict] = []
    for augmentation in AUGMENTATIONS:
        tokens = training_tokens(vit, train, augmentation)
        for parts in (4, 8):
            for grid in (0, GRID):
                shaping = Shaping(total_variation_grid=grid)
                published = Pdiscoformer(config.data, parts=parts, preset="published", shaping=shaping)
                for seed in range(config.seeds):
                    how = {"augmentation": augmentation, "parts": parts, "total_variation_grid": grid, "seed": seed}
                    runs.append(how | measured(trained(vit, tokens, published, seed), features, objects))
                    print(runs[-1], flush=True)
                    record(config.out, "cpu", facts | {"runs": runs})


if __name__ == "__main__":
    main()
