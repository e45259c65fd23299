"""GEORGE: GroupDRO without group labels, on clusters within each class that a first classifier's output forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Train
from ..config.reweighing import George
from ..console.files import as_csv, write
from ..data.rows import Rows
from ..metrics.inference import map_batches
from ..metrics.predictions import Predictions
from ..training.batches import split_batches
from ..training.run_folder import Run
from ..training.trainable import StepInfo, TrainBatch, TrainContext
from ..vit.model import Input, ViT, ViTConfig
from .base import open_and_record
from .reweighed import GroupDro, load_first, predictions_of_first, train_first

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.augment import Augment
    from ..data.batches import Batch

MOST_COMPARED = 2000  # images of a class on which the silhouette is computed


class GeorgeClassifier(GroupDro):
    """Clusters take the place of groups (Sohoni et al. 2020, algorithm 1)."""

    clusters: Tensor  # int64 [n]: the cluster of each row of the training data, -1 for other rows

    def __init__(self, vit: ViT, classes: int, images: int, config: George):
        super().__init__(vit, torch.ones(classes * config.most_clusters), config.step_size, 0, config.freeze_backbone)
        self.config = config
        self.register_buffer("clusters", torch.full((images,), -1), persistent=False)

    def prepare(self, context: TrainContext, train: Callable[[Train], Path]) -> None:
        """Train the first classifier in a folder inside this run's, and cluster the images of each class."""
        rows, at = context.rows, context.rows.split_indices("train")
        first = train_first(self.config, context, train)
        predictions = predictions_of_first(first, self.config, context)
        values = hardness(predictions)[:, None]
        if self.config.clustered == "features":
            values = principal_components(features_of_first(first, self.config, context), 2)
        clusters = clusters_by_class(values, rows.labels[at], self.config.most_clusters, self.config.seed)
        counts = torch.from_numpy(np.bincount(clusters, minlength=len(self.shares))).float()
        self.clusters[torch.from_numpy(at)] = torch.from_numpy(clusters)
        self.adjustment = (self.config.adjustment / counts.clamp(min=1).sqrt()).to(self.adjustment.device)
        if not context.run.last.exists():  # otherwise the weights are in the checkpoint
            self.shares.copy_((counts > 0).float() / (counts > 0).sum())
        if context.accelerator.is_main_process:
            save_clusters(context.run.folder / "clusters.csv", rows, at, clusters)
            context.run.note(first={"run": first.folder.name, "images_by_cluster": counts.int().tolist()})

    def train_groups(self, rows: Rows) -> np.ndarray | None:  # noqa: ARG002
        return self.clusters.clamp(min=0).cpu().numpy()

    def make_train_batch(self, batch: Batch, augment: Augment, info: StepInfo) -> TrainBatch:
        return replace(super().make_train_batch(batch, augment, info), groups=self.clusters[batch.indices])


def hardness(predictions: Predictions) -> np.ndarray:
    """[n]: the log odds of the true class."""
    likely = predictions.probabilities.astype(np.float64)
    right = likely[np.arange(len(likely)), predictions.labels]
    smallest = np.finfo(np.float32).smallest_subnormal
    wrong = np.where(np.arange(likely.shape[1]) == predictions.labels[:, None], 0, likely).sum(axis=1)
    return np.log(right.clip(min=smallest)) - np.log(wrong.clip(min=smallest))


def principal_components(values: np.ndarray, count: int) -> np.ndarray:
    """[n, count], each with variance 1."""
    left, _, _ = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    return left[:, :count] * np.sqrt(len(values))


def features_of_first(first: Run, config: Train, context: TrainContext) -> np.ndarray:
    """[n, D]: the CLS tokens of the training images."""
    model = load_first(first, context)
    with closing(split_batches(context, "train", config)) as batches:
        return map_batches(lambda images, _: model.vit(images).cls, batches, context.accelerator)


def clusters_by_class(values: np.ndarray, labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """int64 [n]: clusters of values [n, D] within each class; those of class c have numbers c · most, c · most + 1 …"""
    found = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        own = labels == label
        found[own] = label * most + clusters_of(values[own], most, seed)
    return found


def clusters_of(values: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Components of a Gaussian mixture; as many, from 2 on, as have the largest mean silhouette."""
    from sklearn.metrics import silhouette_score
    from sklearn.mixture import GaussianMixture

    best, best_score = np.zeros(len(values), dtype=np.int64), -np.inf
    for count in range(2, min(most, len(np.unique(values, axis=0)) - 1) + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a mixture that has not converged may still score best
            clusters = GaussianMixture(count, random_state=seed, n_init=3).fit_predict(values)
        if len(np.unique(clusters)) < 2:
            continue
        score = silhouette_score(values, clusters, sample_size=min(MOST_COMPARED, len(values)), random_state=seed)
        if score > best_score:
            best, best_score = np.unique(clusters, return_inverse=True)[1], score
    return best


def save_clusters(path: Path, rows: Rows, at: np.ndarray, clusters: np.ndarray) -> None:
    columns = ("image", "label", "cluster")
    every = zip(at, clusters, strict=True)
    lines = [dict(zip(columns, (rows.images[i], rows.classes[rows.labels[i]], k), strict=True)) for i, k in every]
    write(path, as_csv(columns, lines))


def make_george(config: George, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_record(config, rows, run, accelerator)
    return GeorgeClassifier(vit, len(rows.classes), len(rows), config), expects


def build_george(vit_config: ViTConfig, config: Any, _: dict[str, Any]) -> nn.Module:
    return GroupDro(ViT(vit_config), torch.ones(vit_config.classes * config.most_clusters))
