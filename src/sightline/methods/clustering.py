"""Stage 1 by clustering, before training: the whole backbone finds the foreground of some training images, and the
selector, which is smaller and faster, learns it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import Batches
from ..data.images import Preprocess
from ..training.trainable import TrainContext
from ..vit.model import ViT
from ..where.foreground import find_foreground, learn_foreground
from ..where.parts import PartDiscovery

CLUSTERED_IMAGES = 256  # training images whose patch tokens are clustered
CHUNK = 16  # images at a time: more would not fit into the cache of a CPU


@dataclass(frozen=True)
class Teacher:
    """The backbone that finds the foreground. It sees it more finely than the selector, which is used for every image
    ever after; this one is not kept."""

    vit: ViT
    size: int  # image side in pixels

    def features(self, images: Tensor) -> Tensor:
        """[N, D, H, W]"""
        size = (self.size, self.size)
        resized = images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear", antialias=True)
        return self.vit(resized).feature_map


def start_by_clustering(where: PartDiscovery, teacher: Teacher, context: TrainContext) -> dict[str, Any]:
    """Let the selector learn the foreground of some training images; returns what run.json records of it."""
    seed = context.run.facts["seed"]
    return learn_selector(where, teacher, some_training_images(context, seed), seed)


@torch.no_grad()
def learn_selector(where: PartDiscovery, teacher: Teacher, images: Tensor, seed: int) -> dict[str, Any]:
    """From images [N, 3, h, w] in [0, 1], on the device to use; returns facts about the foreground."""
    vit = teacher.vit.to(images.device).eval()
    found = find_foreground(
        torch.cat([Teacher(vit, teacher.size).features(chunk) for chunk in images.split(CHUNK)]), images, seed=seed
    )
    where.to(images.device).eval()
    features = torch.cat([where.vit(where.resize(chunk)).feature_map for chunk in images.split(CHUNK)])
    start = learn_foreground(features, found.masks, where.parts, seed=seed)
    where.start_from(start)
    facts = {name: value for name, value in asdict(found).items() if name != "masks"}
    return facts | {"coverage": start.coverage, "images": len(images)}


def some_training_images(context: TrainContext, seed: int) -> Tensor:
    """[N, 3, h, w] in [0, 1], on the device: drawn with this seed, not augmented."""
    indices = context.rows.split_indices("train")
    some = np.random.default_rng(seed).choice(indices, min(CLUSTERED_IMAGES, len(indices)), replace=False)
    preprocess, device = Preprocess.of(context.expects), context.accelerator.device
    with closing(Batches(context.rows, np.sort(some), preprocess, CHUNK, shuffle=False, seed=0, workers=0)) as batches:
        return torch.cat([batch.to(device).images.float() / 255 for batch in batches.epoch(0)])
