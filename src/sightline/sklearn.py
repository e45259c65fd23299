"""Sightline as a scikit-learn estimator.

classifier = SightlineClassifier("ifam", "dinov2-s14-reg", epochs=10).fit(paths, labels)
classifier.predict(others)
classifier.model_.predict(others[0]).sight.show()
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

from .console.files import as_csv, save_image, write
from .errors import UserError

BATCH = 64
PerImage = Sequence[Any] | None
RESERVED = frozenset({"data", "out", "layout", "split_seed", "resume"})  # set by `fit`


class SightlineClassifier(ClassifierMixin, BaseEstimator):
    """Trains a method on images in memory or in files: paths, Pillow images or arrays [h, w, 3].

    `validation` is the fraction of the images on which the checkpoint is selected. None means the method's default.
    `settings` are any other flags of the method, by their Python names: {"parts": 4, "refine": False}. The run is kept
    in `folder`, or in a temporary folder for as long as the estimator exists."""

    def __init__(
        self,
        method: str = "ifam",
        backbone: str = "dinov2-s14-reg",
        *,
        epochs: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        size: int | None = None,
        select: str = "balanced",
        validation: float = 0.2,
        seed: int = 0,
        workers: int = 0,
        device: str = "auto",
        settings: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ):
        self.method = method
        self.backbone = backbone
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.size = size
        self.select = select
        self.validation = validation
        self.seed = seed
        self.workers = workers
        self.device = device
        self.settings = settings
        self.folder = folder

    def fit(self, X: Sequence[Any], y: Sequence[Any], *, groups: PerImage = None, masks: PerImage = None) -> Self:
        """Labels `y` may be of any sortable type. `groups` are for metrics, and for methods that use them; `masks`,
        bright on the object, for methods that need them."""
        from .load import load_as_trained
        from .train import train

        images, labels = list(X), np.asarray(y)
        for name, values in (("y", labels), ("groups", groups), ("masks", masks)):
            if values is not None and len(values) != len(images):
                raise UserError(f"{name}: {len(values):,} for {len(images):,} images; give one for each")
        self.classes_ = np.unique(labels)
        names = class_names(self.classes_)
        config = self._config()
        if groups is None:
            check_without_groups(config)
        home = self._home()
        in_validation = draw_validation(labels, groups, self.validation, self.seed)
        columns = {
            "image": [as_file(image, home / "images" / f"{i}.png") for i, image in enumerate(images)],
            "label": [names[k] for k in np.searchsorted(self.classes_, labels)],
            "split": np.where(in_validation, "val", "train").tolist(),
        }
        if groups is not None:
            columns["group"] = [str(group) for group in groups]
        if masks is not None:
            columns["mask"] = [as_file(mask, home / "masks" / f"{i}.png") for i, mask in enumerate(masks)]
        write_rows(home / "rows.csv", columns)
        self.run_ = train(config(data=home / "rows.csv", out=home / "run"))
        self.model_ = load_as_trained(self.run_, self.device if self.device != "auto" else best_device())
        self.order_ = [self.model_.classes.index(name) for name in names]
        self.n_features_in_ = 1  # an image
        return self

    def predict_proba(self, X: Iterable[Any]) -> np.ndarray:
        """[n, C], in the order of `classes_`."""
        check_is_fitted(self, "model_")
        images = list(X)
        batches = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
        probabilities = [self.model_.predict(batch).probabilities.cpu().numpy() for batch in batches]
        return np.concatenate(probabilities)[:, self.order_] if batches else np.empty((0, len(self.classes_)))

    def predict(self, X: Iterable[Any]) -> np.ndarray:
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def _config(self) -> partial:
        """The method's configuration, except data and folder; invalid settings are rejected before anything is
        written."""
        from .methods import trainable_methods

        methods = trainable_methods()
        if self.method not in methods:
            raise UserError(f"method={self.method!r}: no such method; choose one of {', '.join(sorted(methods))}")
        kind = methods[self.method].config
        known = {field.name for field in fields(kind)} - RESERVED
        optional = {"epochs": self.epochs, "batch": self.batch, "lr": self.lr, "size": self.size}
        given = {name: value for name, value in optional.items() if value is not None} | dict(self.settings or {})
        given |= {"select": self.select, "seed": self.seed, "workers": self.workers, "device": self.device}
        if "backbone" in known:
            given["backbone"] = self.backbone
        if unknown := sorted(set(given) - known):
            raise UserError(f"{unknown[0]}: not a setting of {self.method}, which has {', '.join(sorted(known))}")
        return partial(kind, **given)

    def _home(self) -> Path:
        if self.folder is None:
            self.temporary_ = tempfile.TemporaryDirectory(prefix="sightline-")
            return Path(self.temporary_.name)
        home = Path(self.folder)
        if home.exists() and any(home.iterdir()):
            raise UserError(f"{home}: not empty; choose another folder")
        home.mkdir(parents=True, exist_ok=True)
        return home


def class_names(classes: np.ndarray) -> list[str]:
    names = [str(name) for name in classes.tolist()]
    if len(set(names)) < len(names) or any(not name.strip() for name in names):
        raise UserError("y: two classes have the same name, or one has an empty name; rename them")
    return names


def check_without_groups(config: partial) -> None:
    """The error of the command line would ask for a column of the data instead."""
    kind: Any = config.func
    for needed, what in (
        (kind.needs_groups, kind.method),
        (config.keywords["select"] == "worst-group", "select='worst-group'"),
        (config.keywords.get("balance") == "groups", "balance='groups'"),
    ):
        if needed:
            raise UserError(f"groups: {what} needs a group for each image; use fit(..., groups=...)")


def draw_validation(labels: np.ndarray, groups: Sequence[Any] | None, fraction: float, seed: int) -> np.ndarray:
    """bool [n]: the validation images, stratified by class, and by group if all groups have at least two images."""
    if not 0 < fraction < 1:
        raise UserError(f"validation={fraction}: must be a fraction between 0 and 1, such as 0.2")
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < 2:
        raise UserError("y: at least two classes are needed, with two images each")
    cells = labels if groups is None else np.array([f"{a} {b}" for a, b in zip(labels, groups, strict=True)])
    cells = labels if np.unique(cells, return_counts=True)[1].min() < 2 else cells
    count = max(round(fraction * len(labels)), len(np.unique(cells)))
    held_out = train_test_split(np.arange(len(labels)), test_size=count, stratify=cells, random_state=seed)[1]
    return np.isin(np.arange(len(labels)), held_out)


def as_file(image: Any, path: Path) -> str:
    """The file of an image; one in memory is written to `path`."""
    from .load import open_image

    if isinstance(image, str | Path):
        return str(Path(image).expanduser().resolve())
    if isinstance(image, np.ndarray) and image.dtype == bool:
        image = 255 * image.astype(np.uint8)
    save_image(path, open_image(image), sync=False, marked=False)
    return str(path.resolve())


def write_rows(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    names = list(columns)
    write(path, as_csv(names, [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]))


def best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
