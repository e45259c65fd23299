"""A trained model, back from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from PIL import Image
from torch import Tensor, nn

from .checkpoint import load_tensors
from .data.images import mask_to_tensor, read_image, read_mask, to_tensor, upright_rgb
from .errors import UserError
from .methods import builder_of
from .runs import Run, config_of, read_run
from .sight import Method, Prediction, Sight
from .vit import Input


@dataclass(frozen=True)
class Model:
    """A method with its weights, its classes and what it expects of a picture."""

    method: Method
    classes: tuple[str, ...]
    expects: Input
    run: Run

    @torch.no_grad()
    def predict(
        self, pictures: str | Path | Image.Image | list[str | Path | Image.Image], mask: str | Path | None = None
    ) -> Prediction:
        """Answers for one picture or several, as files or as Pillow images. A `mask` of one picture, bright where it
        may be seen, takes the place of where the method would look."""
        several = pictures if isinstance(pictures, list) else [pictures]
        opened = [upright_rgb(one) if isinstance(one, Image.Image) else read_image(one) for one in several]
        device = next(cast(nn.Module, self.method).parameters()).device
        images = torch.stack([to_tensor(one, self.expects) for one in opened]).to(device)
        sight = self.method.look(images) if mask is None else self._drawn(Path(mask), opened, images)
        return self.method.judge(images, sight)

    def _drawn(self, path: Path, pictures: list[Image.Image], images: Tensor) -> Sight:
        from .intervene import told

        if len(pictures) != 1:
            raise UserError(f"{path}: one mask is for one picture, not for {len(pictures):,}")
        mask, picture = read_mask(path), pictures[0]
        if mask.size != picture.size:
            sizes = " but its picture has ".join("{}×{} pixels".format(*one.size) for one in (mask, picture))
            raise UserError(f"{path}: {sizes}")
        return told(self.method, images, mask_to_tensor(mask, self.expects)[None].to(images.device))


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
