"""CORAL: features with the same mean and covariance in every environment."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config.reweighing import Coral
from ..vit.model import Input, ViT
from .base import open_and_record
from .environments import EnvironmentClassifier, check_environments
from .erm import build_erm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class CoralClassifier(EnvironmentClassifier):
    """Deep CORAL (Sun & Saenko 2016), with means, as in DomainBed (Gulrajani & Lopez-Paz 2021)."""

    def __init__(self, vit: ViT, environment_of_group: Tensor, weight: float = 1.0, freeze: bool = False):
        super().__init__(vit, environment_of_group, freeze)
        self.weight = weight

    def penalty_weight(self, progress: float) -> float:  # noqa: ARG002
        return self.weight

    def penalty(self, logits: list[Tensor], features: list[Tensor], labels: list[Tensor]) -> Tensor:  # noqa: ARG002
        """The mean over pairs of environments; a single image of an environment has no covariance."""
        several = [tokens for tokens in features if len(tokens) > 1]
        found = [moment_distance(*pair) for pair in combinations(several, 2)]
        return torch.stack(found).mean() if found else features[0].sum() * 0


def moment_distance(first: Tensor, second: Tensor) -> Tensor:
    """The mean squared difference of the means, plus that of the covariances, of features [n, D] and [m, D]."""
    means = (first.mean(dim=0) - second.mean(dim=0)).square().mean()
    return means + (torch.cov(first.T) - torch.cov(second.T)).square().mean()


def make_coral(config: Coral, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    environments = check_environments(rows, "coral")
    vit, expects = open_and_record(config, rows, run, accelerator)
    return CoralClassifier(vit, environments, config.penalty, config.freeze_backbone), expects


build_coral: Any = build_erm
