"""A trained model, back from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from PIL import Image
from torch import nn

from .checkpoint import load_tensors
from .data.images import read_image, to_tensor, upright_rgb
from .errors import UserError
from .methods import builder_of
from .runs import Run, config_of, read_run
from .sight import Method, Prediction
from .vit import Input


@dataclass(frozen=True)
class Model:
    """A method with its weights, its classes and what it expects of a picture."""

    method: Method
    classes: tuple[str, ...]
    expects: Input
    run: Run

    @torch.no_grad()
    def predict(self, pictures: str | Path | Image.Image | list[str | Path | Image.Image]) -> Prediction:
        """Answers for one picture or several, as files or as Pillow images."""
        several = pictures if isinstance(pictures, list) else [pictures]
        opened = [upright_rgb(one) if isinstance(one, Image.Image) else read_image(one) for one in several]
        device = next(cast(nn.Module, self.method).parameters()).device
        images = torch.stack([to_tensor(one, self.expects) for one in opened]).to(device)
        return self.method.judge(images, self.method.look(images))


def load(folder: str | Path, device: str = "cpu") -> Model:
    run = read_run(folder)
    if missing := [fact for fact in ("method", "data", "vit") if not run.facts.get(fact)]:
        raise UserError(
            f"{run.folder}: this run ended before it had a model (run.json says nothing about {missing[0]!r}); "
            "train it again, with the same command"
        )
    vit_config = config_of(run)
    method = builder_of(run.facts["method"])(vit_config, run.facts)
    method.load_state_dict(load_tensors(run.best)[0])
    return Model(method.to(device).eval(), tuple(run.facts["data"]["classes"]), vit_config.input, run)
