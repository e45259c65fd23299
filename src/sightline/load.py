"""A trained model, back from its run folder, or from the Hugging Face hub: `hf:OWNER/NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from .data.images import mask_to_tensor, read_image, read_mask, to_tensor, upright_rgb
from .errors import UserError
from .methods import builder_of
from .sight import Method, Sight
from .training.checkpoint import load_tensors
from .training.run_folder import Run, config_of, read_run
from .vit.model import Input

if TYPE_CHECKING:
    from .report.notebook import Answer

Picture = str | Path | Image.Image | np.ndarray | Tensor
HUB = "hf:"


@dataclass(frozen=True)
class Model:
    """A method with its weights, its classes and what it expects of a picture."""

    method: Method
    classes: tuple[str, ...]
    expects: Input
    run: Run

    @torch.no_grad()
    def predict(self, pictures: Picture | list[Any], mask: str | Path | None = None) -> Answer:
        """Answers for one picture or several: files, Pillow images, arrays [h, w, 3] or tensors [3, h, w] of bytes or
        of floats in [0, 1]. A `mask` of one picture, bright where it may be seen, takes the place of where the method
        would look."""
        from .report.notebook import answer_of

        opened = [opened_picture(one) for one in one_by_one(pictures)]
        if not opened:
            raise UserError("no pictures: give one, or a list of them")
        device = next(cast(nn.Module, self.method).parameters()).device
        images = torch.stack([to_tensor(one, self.expects) for one in opened]).to(device)
        sight = self.method.look(images) if mask is None else self._drawn(Path(mask), opened, images)
        return answer_of(self.method.judge(images, sight), images, self.classes)

    def _repr_html_(self) -> str:
        from .report.notebook import model_html

        return model_html(self)

    def _drawn(self, path: Path, pictures: list[Image.Image], images: Tensor) -> Sight:
        from .interventions.apply import told

        if len(pictures) != 1:
            raise UserError(f"{path}: one mask is for one picture, not for {len(pictures):,}")
        mask, picture = read_mask(path), pictures[0]
        if mask.size != picture.size:
            sizes = " but its picture has ".join("{}×{} pixels".format(*one.size) for one in (mask, picture))
            raise UserError(f"{path}: {sizes}")
        return told(self.method, images, mask_to_tensor(mask, self.expects)[None].to(images.device))


def one_by_one(pictures: Picture | list[Any]) -> list[Any]:
    if isinstance(pictures, np.ndarray | Tensor):
        return list(pictures) if pictures.ndim in (1, 4) else [pictures]
    return list(pictures) if isinstance(pictures, list | tuple) else [pictures]


def opened_picture(one: Any) -> Image.Image:
    if isinstance(one, Image.Image):
        return upright_rgb(one)
    if isinstance(one, str | Path):
        return read_image(one)
    if isinstance(one, Tensor) and one.ndim == 3:
        one = one.detach().cpu().movedim(0, -1).numpy()
    if not isinstance(one, np.ndarray):
        raise UserError(f"a picture is a path, a Pillow image or an array, not a {type(one).__name__}")
    if one.ndim not in (2, 3) or (one.ndim == 3 and one.shape[2] not in (1, 3, 4)):
        raise UserError(f"an array of {list(one.shape)} is no picture: [h, w], [h, w, 3] or [h, w, 4]")
    if np.issubdtype(one.dtype, np.floating):
        if not (np.isfinite(one).all() and one.min() >= 0 and one.max() <= 1):
            raise UserError("an array of floats is a picture where all are between 0 and 1: divide by 255, perhaps")
        one = np.round(one * 255).astype(np.uint8)
    if one.dtype != np.uint8:
        raise UserError(f"an array of {one.dtype} is no picture: bytes (uint8), or floats between 0 and 1")
    return upright_rgb(Image.fromarray(one[..., 0] if one.ndim == 3 and one.shape[2] == 1 else one))


def load_run(folder: str | Path, device: str = "cpu", *, intervention: bool = True) -> Model:
    """`sightline.load`: a run with the intervention that is kept in it, if one is, or as it was trained."""
    from .interventions.apply import with_kept

    model = load(folder, device)
    return with_kept(model) if intervention else model


def load(folder: str | Path, device: str = "cpu") -> Model:
    """As it was trained."""
    if str(folder).startswith(HUB):
        from .export.push import fetch

        folder = fetch(str(folder).removeprefix(HUB))
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
