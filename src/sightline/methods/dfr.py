"""DFR: logistic regression on frozen features, of whole pictures or of A²'s crops, that no group outweighs.

It uses group labels, and run.json says of which pictures.
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
from ..what.dfr import choices, refit, set_aside, tune
from ..what.probe import Linear
from .a2 import build_a2, make_a2
from .probe import Fitted, build_probe, make_probe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


def fit_dfr(config: Dfr, rows: Rows, features: dict[str, np.ndarray]) -> Fitted:
    """Part of the pictures chooses C and class weights for the rest; then the rest, or all of them, are fitted."""
    at, classes = balanceable(config, rows), len(rows.classes)
    assert rows.groups is not None
    features_at = features[config.kind][np.searchsorted(rows.where(config.kind), at)]
    labels, groups = rows.labels[at], rows.groups[at]
    generator = np.random.default_rng(config.seed)
    kept, aside = set_aside(groups, config.one_in, generator)

    def on_aside(linear: Linear) -> float:
        return score(predictions_from_logits(rows, at[aside], linear.logits(features_at[aside])), config.select)

    options = choices(len(np.unique(labels)), config.weigh_classes)
    best, tried = tune(features_at[kept], labels[kept], groups[kept], classes, options, on_aside, generator)
    last = np.arange(len(at)) if config.kind == "val" else kept
    linear = refit(features_at[last], labels[last], groups[last], classes, best, generator, config.refits)
    used = {"fitted_to_choose": kept, "chosen_on": aside, "fitted_in_the_end": last}
    selection = {
        "metric": config.selects,
        "on": config.kind,
        "group_labels": f"of the {config.kind} data, in fitting and in choosing; no other split was used",
        "pictures": {name: counts(groups[places], rows.group_names) for name, places in used.items()},
        "in_each_refit": f"{smallest(groups[last])} of each group",
        "refits": config.refits,
        "chosen": str(best),
    }
    return Fitted(linear, tried[best], {str(choice): value for choice, value in tried.items()}, selection)


def balanceable(config: Dfr, rows: Rows) -> np.ndarray:
    """The rows to fit and choose with: of groups that are large enough."""
    assert rows.groups is not None
    at = rows.where(config.kind)
    at = at[np.bincount(rows.groups[at])[rows.groups[at]] >= config.floor]
    if len(np.unique(rows.labels[at])) < 2:
        raise UserError(
            f"{config.data}: fewer than two classes have a group of at least {config.floor} pictures in the split "
            f"{config.kind!r}; lower --floor, or change --kind"
        )
    return at


def smallest(groups: np.ndarray) -> int:
    return int(np.unique(groups, return_counts=True)[1].min())


def counts(groups: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    return {names[group]: int(n) for group, n in zip(*np.unique(groups, return_counts=True), strict=True)}


def check_dfr(config: Dfr, rows: Rows, accelerator: Accelerator) -> None:
    """Before features are computed for nothing."""
    if config.refits < 1:
        raise UserError(f"--refits {config.refits}: must be at least 1")
    at = balanceable(config, rows)
    assert rows.groups is not None
    if smallest(rows.groups[at]) < 2 and accelerator.is_main_process:
        print(f"A group has only one {config.kind} picture, so that one of each is fitted; --floor 2 leaves it out.")


def make_dfr(config: Dfr, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_dfr(config, rows, accelerator)
    return make_probe(config, rows, run, accelerator, fit=fit_dfr)


def make_a2_dfr(config: A2Dfr, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_dfr(config, rows, accelerator)
    return make_a2(config, rows, run, accelerator, fit=fit_dfr)


build_dfr: Any = build_probe
build_a2_dfr: Any = build_a2
