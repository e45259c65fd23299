"""DFR: group-balanced logistic regression on frozen features, of whole images or of A²'s crops.

It uses group labels; run.json records of which images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ..config import A2Dfr, Dfr
from ..errors import UserError
from ..metrics.groups import score
from ..metrics.inference import predictions_from_logits
from ..vit.model import Input
from ..what.dfr import fit_balanced, hyperparameter_grid, select_hyperparameters, split_off
from ..what.probe import Linear
from .a2 import build_a2, make_a2
from .probe import FittedProbe, build_probe, make_probe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


def fit_dfr(config: Dfr, rows: Rows, features: dict[str, np.ndarray]) -> FittedProbe:
    """A held-out part of the images selects C and class weights; then the rest, or all images, are fitted."""
    at, classes = usable_rows(config, rows), len(rows.classes)
    assert rows.groups is not None
    features_at = features[config.fit_on][np.searchsorted(rows.split_indices(config.fit_on), at)]
    labels, groups = rows.labels[at], rows.groups[at]
    generator = np.random.default_rng(config.seed)
    kept, held_out = split_off(groups, config.one_in, generator)

    def held_out_score(linear: Linear) -> float:
        logits = linear.logits(features_at[held_out])
        return score(predictions_from_logits(rows, at[held_out], logits), config.select)

    options = hyperparameter_grid(len(np.unique(labels)), config.tune_class_weights)
    best, tried = select_hyperparameters(
        features_at[kept], labels[kept], groups[kept], classes, options, held_out_score, generator
    )
    last = np.arange(len(at)) if config.fit_on == "val" else kept
    linear = fit_balanced(features_at[last], labels[last], groups[last], classes, best, generator, config.refits)
    used = {"fitted_to_choose": kept, "chosen_on": held_out, "fitted_in_the_end": last}
    selection = {
        "metric": config.selects,
        "on": config.fit_on,
        "group_labels": f"of the {config.fit_on} data, in fitting and in choosing; no other split was used",
        "images": {name: group_counts(groups[places], rows.group_names) for name, places in used.items()},
        "in_each_refit": f"{smallest_group(groups[last])} of each group",
        "refits": config.refits,
        "chosen": str(best),
    }
    return FittedProbe(linear, tried[best], {str(choice): value for choice, value in tried.items()}, selection)


def usable_rows(config: Dfr, rows: Rows) -> np.ndarray:
    """The indices to fit and select with: those of groups that are large enough."""
    assert rows.groups is not None
    at = rows.split_indices(config.fit_on)
    at = at[np.bincount(rows.groups[at])[rows.groups[at]] >= config.min_group_size]
    if len(np.unique(rows.labels[at])) < 2:
        raise UserError(
            f"{config.data}: fewer than two classes have a group of at least {config.min_group_size} images in the "
            f"split {config.fit_on!r}; lower --min-group-size, or change --fit-on"
        )
    return at


def smallest_group(groups: np.ndarray) -> int:
    return int(np.unique(groups, return_counts=True)[1].min())


def group_counts(groups: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    return {names[group]: int(n) for group, n in zip(*np.unique(groups, return_counts=True), strict=True)}


def check_dfr(config: Dfr, rows: Rows, accelerator: Accelerator) -> None:
    """Checks that come before the costly features."""
    at = usable_rows(config, rows)
    assert rows.groups is not None
    if smallest_group(rows.groups[at]) < 2 and accelerator.is_main_process:
        print(
            f"note: a group has a single {config.fit_on} image, so every fit uses one image per group; "
            "--min-group-size 2 excludes it"
        )


def make_dfr(config: Dfr, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_dfr(config, rows, accelerator)
    return make_probe(config, rows, run, accelerator, fit=fit_dfr)


def make_a2_dfr(config: A2Dfr, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_dfr(config, rows, accelerator)
    return make_a2(config, rows, run, accelerator, fit=fit_dfr)


build_dfr: Any = build_probe
build_a2_dfr: Any = build_a2
