"""Batches for training and evaluation within a run: views, class balance, class priors and the image cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..config import Loop, Train
from ..data.augment import PRESETS, Augment
from ..data.batches import Batches, balanced_weights
from ..data.cache import Cache
from ..data.images import Preprocess
from ..metrics.inference import inference_batches
from ..vit.model import Input
from .trainable import Trainable, TrainContext

MIN_INFERENCE_BATCH = 64  # images that keep a device busy
INFERENCE_PER_TRAIN_IMAGE = 8  # images of inference that fit into the memory of one image of training

# By augmentation preset: the fraction of the decoded image that a crop covers, and whether the preset's own colour
# fills what lies outside the image, rather than the backbone's mean. `none` and
# `flip` have the views of evaluation.
VIEWS = {"light": (0.875, False), "published": (1.0, True), "imagenet": (0.875, False)}


def training_view(augment: str, expects: Input) -> tuple[Preprocess, Augment]:
    """How training images are decoded, and how they are augmented."""
    preset = replace(PRESETS[augment], size=expects.size)
    if augment in ("none", "flip"):
        return Preprocess.of(expects), replace(preset, crop=1.0)
    (h, w), (fraction, own_fill) = expects.size, VIEWS[augment]
    preprocess = Preprocess((round(h / fraction), round(w / fraction)), expects.fit, expects.resample)
    return preprocess, replace(preset, crop=fraction, fill=preset.fill if own_fill else expects.mean)


def training_batches(context: TrainContext, config: Loop, model: Trainable) -> Batches:
    rows, accelerator = context.rows, context.accelerator
    indices = model.train_indices(rows)
    preprocess, _ = training_view(config.augment, context.expects)
    codes = {"classes": rows.labels, "groups": model.train_groups(rows)}.get(config.balance)
    weights = None if codes is None else balanced_weights(codes, indices)
    return Batches(
        rows, indices, preprocess, min(config.batch, len(indices)), shuffle=True, seed=config.seed,
        workers=config.workers, cache=open_cache(context, preprocess, rows.split_indices("train"), config),
        rank=accelerator.process_index, world=accelerator.num_processes, drop_last=True, weights=weights,
        pin=accelerator.device.type == "cuda", masks=model.trains_with_masks,
    )  # fmt: skip


def class_log_prior(context: TrainContext, config: Loop) -> Tensor | None:
    """[C], for logit adjustment; a class without training images counts as one image."""
    if config.balance != "logit-adjustment":
        return None
    rows = context.rows
    counts = np.bincount(rows.labels[rows.split_indices("train")], minlength=len(rows.classes)).clip(min=1)
    return torch.from_numpy(np.log(counts / counts.sum())).float().to(context.accelerator.device)


def split_batches(context: TrainContext, split: str, config: Train, masks: bool = False) -> Batches:
    """A split as evaluation sees it, from the image cache if there is one."""
    indices = context.rows.split_indices(split)
    cache = open_cache(context, Preprocess.of(context.expects), indices, config)
    return inference_batches(
        context.rows, indices, context.expects, context.accelerator, batch=inference_batch_size(config),
        workers=config.workers, cache=cache, masks=masks,
    )  # fmt: skip


def inference_batch_size(config: Train) -> int:
    """Inference keeps no activations, so its batches may be larger than those of training."""
    if not isinstance(config, Loop):
        return config.batch
    at_once = config.batch // (config.grad_accum or 1)
    return max(config.batch, min(MIN_INFERENCE_BATCH, INFERENCE_PER_TRAIN_IMAGE * at_once))


def open_cache(context: TrainContext, preprocess: Preprocess, indices: np.ndarray, config: Train) -> Cache | None:
    if config.cache is None:
        return None
    with context.accelerator.main_process_first():
        cache = Cache.open(context.rows, preprocess, config.cache, indices, workers=max(1, config.workers))
    device = context.accelerator.device
    return cache.to(device) if device.type == "cuda" else cache


def positions_in_epoch(step: int, count: int, batches: Batches) -> Tensor:
    """int64 [count]: positions of this process's images in the epoch, whatever the number of processes."""
    each, longer = divmod(batches.batch, batches.world)
    start = step * batches.batch + batches.rank * each + min(batches.rank, longer)
    return torch.arange(start, start + count)
