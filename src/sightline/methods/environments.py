"""Methods that compare environments, which are the attributes of the groups: the base of IRM and CORAL."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..data.rows import Rows, attribute_of
from ..errors import UserError
from ..training.trainable import TrainBatch
from ..vit.model import ViT
from .erm import Classifier
from .reweighed import gather_batch


def environments_of(rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
    """[groups]: the environment of each group, which is its attribute; and the environments' names."""
    assert rows.groups is not None
    label_of = np.zeros(len(rows.group_names), dtype=np.int64)
    label_of[rows.groups] = rows.labels
    attributes = [
        attribute_of(name, rows.classes[label]) for name, label in zip(rows.group_names, label_of, strict=True)
    ]
    names, numbers = np.unique(attributes, return_inverse=True)
    return numbers, tuple(names.tolist())


class EnvironmentClassifier(Classifier):
    """The mean of the environments' mean losses, plus a penalty on what differs between the environments of a batch."""

    environment_of_group: Tensor  # [groups]

    def __init__(self, vit: ViT, environment_of_group: Tensor, freeze_backbone: bool = False):
        super().__init__(vit, freeze_backbone)
        self.register_buffer("environment_of_group", environment_of_group, persistent=False)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.groups is not None
        out = self.vit(batch.images)
        assert out.logits is not None
        ours, (logits, features, labels, groups) = gather_batch(
            batch, out.logits.float(), self.vit.fc_norm(out.cls).float(), batch.labels, batch.groups
        )
        environments = self.environment_of_group[groups]
        present = environments.unique()
        divided = [[value[environments == one] for one in present] for value in (logits, features, labels)]
        risks = [self.classification_loss(*some) for some in zip(divided[0], divided[2], strict=True)]
        risk, penalty = torch.stack(risks).mean(), self.penalty(*divided)
        weight = self.penalty_weight(batch.info.progress)
        loss = (risk + weight * penalty) / max(1.0, weight)
        # Every process computes the loss of the whole batch, but only its own images carry a gradient.
        share = len(labels) / len(labels[ours])
        return {"loss": loss.detach() + share * (loss - loss.detach()), "risk": risk, "penalty": penalty}

    def penalty_weight(self, progress: float) -> float:
        """After this fraction of training."""
        raise NotImplementedError

    def penalty(self, logits: list[Tensor], features: list[Tensor], labels: list[Tensor]) -> Tensor:
        """Of logits [n, C], CLS tokens [n, D] and labels [n] of the images of each environment in the batch."""
        raise NotImplementedError


def check_environments(rows: Rows, method: str) -> Tensor:
    """[groups]: the environments; a user's error if the training images are all of one."""
    assert rows.groups is not None
    numbers, names = environments_of(rows)
    present = np.unique(numbers[rows.groups[rows.split_indices("train")]])
    if len(present) < 2:
        raise UserError(
            f"{method}: all training images are of one environment ({names[present[0]]}); it compares environments, "
            "which are the attributes of the groups: use erm"
        )
    return torch.from_numpy(numbers)
