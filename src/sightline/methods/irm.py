"""IRM: features on which the same classifier is optimal in every environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config.reweighing import Irm
from ..vit.model import Input, ViT
from .base import open_and_record
from .environments import EnvironmentClassifier, check_environments
from .erm import build_erm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class IrmClassifier(EnvironmentClassifier):
    """Invariant risk minimisation (Arjovsky et al. 2019, IRMv1)."""

    def __init__(
        self, vit: ViT, environment_of_group: Tensor, weight: float = 1.0, ramp: float = 0.0, freeze: bool = False
    ):
        super().__init__(vit, environment_of_group, freeze)
        self.weight, self.ramp = weight, ramp

    def penalty_weight(self, progress: float) -> float:
        return self.weight * min(1.0, progress / self.ramp if self.ramp else 1.0)

    def penalty(self, logits: list[Tensor], features: list[Tensor], labels: list[Tensor]) -> Tensor:  # noqa: ARG002
        """The mean over environments of the squared gradient of the risk by a factor of the logits, at 1 (IRMv1)."""
        found = [risk_gradient(some, right) for some, right in zip(logits, labels, strict=True)]
        return torch.stack(found).square().mean()


def risk_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """The derivative of the mean cross-entropy of w · logits by w, at w = 1."""
    expected = (logits.softmax(dim=1) * logits).sum(dim=1)
    return (expected - logits.gather(1, labels[:, None])[:, 0]).mean()


def make_irm(config: Irm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    environments = check_environments(rows, "irm")
    vit, expects = open_and_record(config, rows, run, accelerator)
    return IrmClassifier(vit, environments, config.penalty, config.ramp, config.freeze_backbone), expects


build_irm: Any = build_erm
