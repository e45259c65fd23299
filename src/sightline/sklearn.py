"""Sightline as a scikit-learn estimator.

classifier = SightlineClassifier("ifam", "dinov2-s14-reg", epochs=10).fit(paths, labels)
classifier.predict(others)
classifier.model_.predict(others[0]).sight.show()
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

from .errors import UserError

BATCH = 64
Some = Sequence[Any] | None  # one for each picture
OWN = frozenset({"data", "out", "layout", "split_seed", "resume"})  # are not for a user of `fit` to say


class SightlineClassifier(ClassifierMixin, BaseEstimator):
    """Trains a method on pictures in memory or in files. Pictures are paths, Pillow images or arrays [h, w, 3].

    `validation` is the share of the pictures that chooses the weights. What is None is the method's default. `settings`
    are all its other flags, by their names in Python: {"parts": 4, "look_again": False}. The run is kept in `folder`,
    or else for as long as the estimator is.
    """

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

    def fit(self, X: Sequence[Any], y: Sequence[Any], *, groups: Some = None, masks: Some = None) -> Self:
        """Labels `y` may be anything that can be compared. `groups` are for measuring, and for methods that use them;
        `masks`, bright where the thing is, are for those that are told where to look."""
        from .load import load_as_trained
        from .train import train

        pictures, labels = list(X), np.asarray(y)
        for name, some in (("y", labels), ("groups", groups), ("masks", masks)):
            if some is not None and len(some) != len(pictures):
                raise UserError(f"{name}: {len(some):,} for {len(pictures):,} pictures; give one for each")
        self.classes_ = np.unique(labels)
        names = class_names(self.classes_)
        told = self._told()
        if groups is None:
            check_without_groups(told)
        home = self._home()
        validating = chosen(labels, groups, self.validation, self.seed)
        columns = {
            "image": [filed(one, home / "pictures" / f"{i}.png") for i, one in enumerate(pictures)],
            "label": [names[k] for k in np.searchsorted(self.classes_, labels)],
            "split": np.where(validating, "val", "train").tolist(),
        }
        if groups is not None:
            columns["group"] = [str(one) for one in groups]
        if masks is not None:
            columns["mask"] = [filed(one, home / "masks" / f"{i}.png") for i, one in enumerate(masks)]
        write_rows(home / "rows.csv", columns)
        self.run_ = train(told(data=home / "rows.csv", out=home / "run"))
        self.model_ = load_as_trained(self.run_, self.device if self.device != "auto" else best_device())
        self.order_ = [self.model_.classes.index(name) for name in names]
        self.n_features_in_ = 1  # a picture
        return self

    def predict_proba(self, X: Iterable[Any]) -> np.ndarray:
        """[n, C], in the order of `classes_`."""
        check_is_fitted(self, "model_")
        pictures = list(X)
        batches = [pictures[start : start + BATCH] for start in range(0, len(pictures), BATCH)]
        found = [self.model_.predict(batch).probabilities.cpu().numpy() for batch in batches]
        return np.concatenate(found)[:, self.order_] if found else np.empty((0, len(self.classes_)))

    def predict(self, X: Iterable[Any]) -> np.ndarray:
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def _told(self) -> Any:
        """The method's configuration, but for data and folder; refused before anything is written."""
        from functools import partial

        from . import config

        kinds = {
            kind.method: kind
            for kind in vars(config).values()
            if isinstance(kind, type) and issubclass(kind, config.Train) and kind.method not in ("", "pretrain")
        }
        if self.method not in kinds:
            raise UserError(f"method={self.method!r}: no such method; there are {', '.join(sorted(kinds))}")
        kind = kinds[self.method]
        known = {field.name for field in fields(kind)} - OWN
        plain = {"epochs": self.epochs, "batch": self.batch, "lr": self.lr, "size": self.size}
        said = {name: value for name, value in plain.items() if value is not None} | dict(self.settings or {})
        said |= {"select": self.select, "seed": self.seed, "workers": self.workers, "device": self.device}
        if "backbone" in known:
            said["backbone"] = self.backbone
        if unknown := sorted(set(said) - known):
            raise UserError(f"{unknown[0]}: is no setting of {self.method}, which has {', '.join(sorted(known))}")
        return partial(kind, **said)

    def _home(self) -> Path:
        if self.folder is None:
            self.temporary_ = tempfile.TemporaryDirectory(prefix="sightline-")
            return Path(self.temporary_.name)
        home = Path(self.folder)
        if home.exists() and any(home.iterdir()):
            raise UserError(f"{home}: is not empty; choose another folder")
        home.mkdir(parents=True, exist_ok=True)
        return home


def class_names(classes: np.ndarray) -> list[str]:
    names = [str(one) for one in classes.tolist()]
    if len(set(names)) < len(names) or any(not name.strip() for name in names):
        raise UserError("y: two classes have the same name, or one has none")
    return names


def check_without_groups(told: Any) -> None:
    """What the command line would ask a column of the data for."""
    for needed, what in (
        (told.func.needs_groups, told.func.method),
        (told.keywords["select"] == "worst-group", "select='worst-group'"),
        (told.keywords.get("balance") == "groups", "balance='groups'"),
    ):
        if needed:
            raise UserError(f"groups: {what} needs one for each picture: fit(..., groups=...)")


def chosen(labels: np.ndarray, groups: Sequence[Any] | None, share: float, seed: int) -> np.ndarray:
    """bool [n]: the pictures that choose, of every class, and group if there are enough of each."""
    if not 0 < share < 1:
        raise UserError(f"validation={share}: a share between 0 and 1, such as 0.2")
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < 2:
        raise UserError("y: at least two classes are needed, and two pictures of each")
    cells = labels if groups is None else np.array([f"{a} {b}" for a, b in zip(labels, groups, strict=True)])
    cells = labels if np.unique(cells, return_counts=True)[1].min() < 2 else cells
    count = max(round(share * len(labels)), len(np.unique(cells)))
    held = train_test_split(np.arange(len(labels)), test_size=count, stratify=cells, random_state=seed)[1]
    return np.isin(np.arange(len(labels)), held)


def filed(one: Any, path: Path) -> str:
    """Where a picture is; one that is in memory is written down."""
    from .load import open_image

    if isinstance(one, str | Path):
        return str(Path(one).expanduser().resolve())
    if isinstance(one, np.ndarray) and one.dtype == bool:
        one = 255 * one.astype(np.uint8)
    path.parent.mkdir(exist_ok=True)
    open_image(one).save(path)
    return str(path.resolve())


def write_rows(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))


def best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
