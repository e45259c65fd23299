"""RRR and GradMask: the gradient of the answer is to be small at background pixels.

The published codes take that gradient without a graph, so that their penalty teaches nothing. Here it is differentiated
once more; `--no-double-backward` does as they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config.relevance import Gradmask, Rrr
from ..data.batches import Decoder
from ..data.images import Canvas
from ..errors import UserError
from ..training.context import TrainBatch
from ..vit.model import Input, ViT
from .erm import build_erm
from .given_mask import Tell
from .robustvit import Shown, begun, teller

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class InputGradients(Shown):
    """Cross-entropy with the label, and a penalty on gradients outside the mask."""

    def __init__(self, vit: ViT, told: Tell, config: Rrr):
        super().__init__(vit, told, bright_background=config.bright == "background")
        self.config, self.weight = config, config.background

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        assert lesson.masks is not None
        logits, penalties = self.judged(lesson.images, lesson.labels, lesson.masks)
        background, answer = penalties.mean(), self.classification_loss(logits, lesson.labels)
        return {"loss": answer + self.weight * background, "background": background, "answer": answer}

    def judged(self, images: Tensor, labels: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """The answers [B, C], and the penalties [B] on their gradients to pixels as the ViT sees them, normalised."""
        images = images.detach().requires_grad_()
        # Full attention, since torch's fused kernels cannot be differentiated twice.
        logits = self.vit(images, attention=range(self.vit.config.depth)).logits
        score = self.score(logits.float(), labels).sum()
        (found,) = torch.autograd.grad(score, images, create_graph=self.config.double_backward, retain_graph=True)
        return logits, self.penalty(found * self.vit.std * ~masks[:, None])

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B]: what the gradient is of."""
        raise NotImplementedError

    def penalty(self, outside: Tensor) -> Tensor:
        """[B], from gradients [B, 3, h, w] that are 0 on the thing."""
        raise NotImplementedError


class RightReasons(InputGradients):
    def score(self, logits: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002 (all classes alike)
        """The sum of all log probabilities (Ross et al. 2017, eq. 1)."""
        return logits.log_softmax(dim=1).sum(dim=1)

    def penalty(self, outside: Tensor) -> Tensor:
        """Squares, summed over pixels (Ross et al. 2017, eq. 1; RobustViT, suppl. eq. 7)."""
        return outside.square().sum(dim=(1, 2, 3))


class GradMask(InputGradients):
    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The logit of the true class (RobustViT, suppl. eq. 6)."""
        return logits.gather(1, labels[:, None])[:, 0]

    def penalty(self, outside: Tensor) -> Tensor:
        """Its length (Simpson et al. 2019; RobustViT, suppl. eq. 6), or the mean square, as in RobustViT's code."""
        squares = outside.square()
        if cast(Gradmask, self.config).penalty == "squares":
            return squares.mean(dim=(1, 2, 3))
        return (squares.sum(dim=(1, 2, 3)) + 1e-12).sqrt()


def make_rrr(
    config: Rrr, rows: Rows, run: Run, accelerator: Accelerator, kind: type[InputGradients] = RightReasons
) -> tuple[nn.Module, Input]:
    if not config.background >= 0:
        raise UserError(f"--background {config.background}: must not be negative; 0 leaves it out")
    vit, expects = begun(config, rows, run, accelerator)
    model = kind(vit, teller(config, rows, expects, run, accelerator), config).to(accelerator.device)
    first = run.facts.get("penalty_at_first")  # of a run that goes on
    if first is None:
        first = penalty_at_first(model, model.given(rows), expects) if config.relative else 1.0
    model.weight = config.background / max(first, 1e-30)
    if accelerator.is_main_process:
        run.note(penalty_at_first=first)
    return model, expects


def penalty_at_first(model: InputGradients, rows: Rows, expects: Input, count: int = 16) -> float:
    """Of some training pictures, the same on every process, before anything is learnt."""
    at = rows.where("train")
    at = at[np.linspace(0, len(at) - 1, min(count, len(at))).astype(np.int64)]
    batch = Decoder(rows, Canvas.of(expects), masks=True)(at).to(model.vit.mean.device)
    _, found = model.judged(batch.images.float() / 255, batch.labels, model.things(batch))
    return found.mean().item()


def make_gradmask(config: Gradmask, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make_rrr(config, rows, run, accelerator, GradMask)


build_rrr: Any = build_erm
build_gradmask: Any = build_erm
