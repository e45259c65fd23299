"""RRR and GradMask: a penalty on the input gradient at background pixels.

The published code computes this gradient without a graph, so the penalty itself has no gradient. Here it is
differentiated a second time (double backward); `--no-double-backward` reproduces the published behaviour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config.relevance import Gradmask, Rrr
from ..data.batches import Decoder
from ..data.images import Preprocess
from ..training.trainable import TrainBatch
from ..vit.model import Input, ViT
from .erm import build_erm
from .given_mask import AddMasks
from .robustvit import MaskSupervisedClassifier, load_starting_classifier, mask_provider

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class InputGradients(MaskSupervisedClassifier):
    """Cross-entropy plus a penalty on input gradients outside the mask."""

    def __init__(self, vit: ViT, add_masks: AddMasks, config: Rrr):
        super().__init__(vit, add_masks, masks_mark_background=config.mask_marks == "background")
        self.config, self.weight = config, config.background_weight

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.masks is not None
        logits, penalties = self.logits_and_penalties(batch.images, batch.labels, batch.masks)
        penalty, classification = penalties.mean(), self.classification_loss(logits, batch.labels)
        return {"loss": classification + self.weight * penalty, "background": penalty, "classification": classification}

    def logits_and_penalties(self, images: Tensor, labels: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, C], and penalties [B] on their gradients with respect to normalised pixels."""
        images = images.detach().requires_grad_()
        # Full attention matrices, because torch's fused kernels cannot be differentiated twice.
        logits = self.vit(images, attention=range(self.vit.config.depth)).logits
        score = self.score(logits.float(), labels).sum()
        (gradients,) = torch.autograd.grad(score, images, create_graph=self.config.double_backward, retain_graph=True)
        return logits, self.penalty(gradients * self.vit.std * ~masks[:, None])

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B]: the score whose gradient is penalised."""
        raise NotImplementedError

    def penalty(self, outside: Tensor) -> Tensor:
        """[B], from gradients [B, 3, h, w] that are 0 on the object."""
        raise NotImplementedError


class RrrClassifier(InputGradients):
    """Right for the right reasons (Ross et al. 2017)."""

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002 (of all classes)
        """The sum of all log probabilities (Ross et al. 2017, eq. 1)."""
        return logits.log_softmax(dim=1).sum(dim=1)

    def penalty(self, outside: Tensor) -> Tensor:
        """Sum of squares over pixels (Ross et al. 2017, eq. 1; RobustViT, suppl. eq. 7)."""
        return outside.square().sum(dim=(1, 2, 3))


class GradMask(InputGradients):
    """GradMask (Simpson et al. 2019)."""

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The logit of the true class (RobustViT, suppl. eq. 6)."""
        return logits.gather(1, labels[:, None])[:, 0]

    def penalty(self, outside: Tensor) -> Tensor:
        """The norm (Simpson et al. 2019; RobustViT, suppl. eq. 6), or the mean square, as in RobustViT's code."""
        squares = outside.square()
        if cast(Gradmask, self.config).penalty == "squares":
            return squares.mean(dim=(1, 2, 3))
        return (squares.sum(dim=(1, 2, 3)) + 1e-12).sqrt()


def make_rrr(
    config: Rrr, rows: Rows, run: Run, accelerator: Accelerator, kind: type[InputGradients] = RrrClassifier
) -> tuple[nn.Module, Input]:
    vit, expects = load_starting_classifier(config, rows, run, accelerator)
    model = kind(vit, mask_provider(config, rows, expects, run, accelerator), config).to(accelerator.device)
    first = run.facts.get("penalty_at_first")  # recorded, if the run is resumed
    if first is None:
        first = initial_penalty(model, model.with_masks(rows), expects) if config.normalize_penalty else 1.0
    model.weight = config.background_weight / max(first, 1e-30)
    if accelerator.is_main_process:
        run.note(penalty_at_first=first)
    return model, expects


def initial_penalty(model: InputGradients, rows: Rows, expects: Input, count: int = 16) -> float:
    """The mean penalty before training, over evenly spaced training images, the same on every process."""
    at = rows.split_indices("train")
    at = at[np.linspace(0, len(at) - 1, min(count, len(at))).astype(np.int64)]
    batch = Decoder(rows, Preprocess.of(expects), masks=True)(at).to(model.vit.mean.device)
    masks = model.object_masks(batch)
    _, penalties = model.logits_and_penalties(batch.images.float() / 255, batch.labels, masks)
    return penalties.mean().item()


def make_gradmask(config: Gradmask, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make_rrr(config, rows, run, accelerator, GradMask)


build_rrr: Any = build_erm
build_gradmask: Any = build_erm
