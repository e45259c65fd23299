"""Early and late masking: the method is told where to look, by masks that people or other programs made.

Early masking never sees the rest. Late masking sees everything and averages only what the mask shows, which is not the
same, although it is the usual way. Masks are the data's own, files in a folder, or made once by `where/saliency.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..config import EarlyMask, LateMask
from ..errors import UserError
from ..sight import Look, Method, Prediction, Sight
from ..training.context import Group, Trainable, TrainBatch
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import weights_sha256
from ..what.masked import MaskedViT
from ..what.pool import LateMask as LatelyMaskedViT
from ..what.zoom import Zoom
from .base import backbone_groups, open_backbone, record_backbone, resembling

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class Given:
    """Which masks, and what becomes of them."""

    masks: str
    at_least: float
    pixels: bool

    @classmethod
    def of(cls, config: EarlyMask) -> Given:
        pixels, said = config.sight == "pixels", config.at_least
        return cls(config.masks, said if said is not None else 0.1 if pixels else 0.5, pixels)

    def sight(self, masks: Tensor, grid: tuple[int, int]) -> Sight:
        return Sight.of_pixels(masks, grid, at_least=self.at_least, exact=self.pixels)


Tell = Callable[["Rows"], "Rows"]  # gives the rows of a data set their masks


@dataclass(frozen=True, eq=False)
class Source:
    """Where masks come from. Hidden from torch, and one for all copies: it is not trained or saved with the method."""

    told: Tell | None
    where: Look | None

    def on(self, device: torch.device) -> Look | None:
        """What looks, moved there: the method does not carry it along."""
        return self.where.to(device) if isinstance(self.where, nn.Module) else self.where

    def __deepcopy__(self, _: dict) -> Source:
        return self


class GivenMask(Trainable, Method):
    """Told by masks where to look; it can look for itself only where a saliency method makes its masks."""

    trains_with_masks = True
    accepts_masks = True
    export_graph = "given mask"

    def __init__(self, what: MaskedViT | LatelyMaskedViT, how: Given, told: Tell | None, where: Look | None):
        super().__init__()
        self.what, self.how, self.source = what, how, Source(told, where)

    @property
    def blind(self) -> bool:
        return self.what.blind

    @property
    def needs_masks(self) -> bool:
        return self.source.told is not None

    def with_masks(self, rows: Rows) -> Rows:
        return rows if self.source.told is None else self.source.told(rows)

    def look(self, images: Tensor) -> Sight:
        where = self.source.on(images.device)
        if where is None:
            raise UserError("this method is told where to look: it answers only for data that have masks")
        return self.look_at(images, where.look(images).visible(tuple(images.shape[2:])))

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        return self.how.sight(masks, self.what.vit.grid(images))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        where = self.source.on(images.device)
        return {} if where is None else where.maps(images)

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        assert lesson.masks is not None
        sight = self.look_at(lesson.images, lesson.masks)
        return {"loss": self.classification_loss(self.what.judge(lesson.images, sight).logits, lesson.labels)}

    def parameter_groups(self, head_lr: float) -> list[Group]:
        groups = backbone_groups(self.what.vit, head_lr)
        if isinstance(self.what, LatelyMaskedViT):
            weight, bias = self.what.head.parameters()
            groups += [Group([weight], head_lr), Group([bias], head_lr, decay=False)]
        return groups


# ---- masks -----------------------------------------------------------------------------------------------------------


def having_masks(rows: Rows) -> Rows:
    if rows.masks is None:
        raise UserError(f"{rows.name}: has no masks; give a mask column, or --masks FOLDER, found:BACKBONE, ...")
    missing = [image for image, mask in zip(rows.images, rows.masks, strict=True) if not mask]
    if missing:
        raise UserError(
            f"{rows.name}: no mask for {len(missing):,} of its pictures, such as {missing[0]}; add them, have all made "
            "with --masks found:BACKBONE, or train robustvit, which learns from few"
        )
    return rows


def masks_in(rows: Rows, folder: Path) -> list[str]:
    """Masks under the pictures' paths, with or without their suffix, then any other; "" where there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of masks")
    there: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        there.setdefault(path.relative_to(folder).with_suffix("").as_posix(), []).append(path)
    masks, root = [], rows.root.resolve()
    for image in rows.images:
        found = there.get(PurePosixPath(image).with_suffix("").as_posix()) or there.get(image) or []
        if len(found) > 1:
            raise UserError(f"{folder}: {found[0].name} and {found[1].name} could both be {image}'s mask; keep one")
        masks += [Path(os.path.relpath(one.resolve(), root)).as_posix() for one in found] or [""]
    return masks


def with_masks(rows: Rows, folder: Path) -> Rows:
    """The rows with masks from a folder, which must have all of them."""
    masks = masks_in(rows, folder)
    missing = [image for image, mask in zip(rows.images, masks, strict=True) if not mask]
    if missing:
        wanted = PurePosixPath(missing[0]).with_suffix(".png")
        raise UserError(f"{folder}: no mask for {len(missing):,} of the pictures, such as {missing[0]}; add {wanted}")
    return replace(rows, masks=masks, notes=(*rows.notes, f"masks from {folder.name}"))


def masks_there(masks: str) -> Tell:
    return having_masks if masks == "data" else partial(with_masks, folder=Path(masks))


def kind_of(masks: str) -> tuple[str, str]:
    """How masks are made, and by what; no kind for those that are there already."""
    kind, colon, of = masks.partition(":")
    return (kind, of) if colon and kind in ("found", "tokencut", "u2net") else ("", masks)


def from_anywhere(masks: str) -> str:
    """The same, with a path that holds in every working folder."""
    kind, of = kind_of(masks)
    if masks == "data" or not Path(of).exists():
        return masks
    return ":".join(filter(None, [kind, str(Path(of).resolve())]))


def saliency(masks: str, seed: int = 0) -> Look | None:
    """What makes masks of this name, or None for masks that are there already."""
    kind, of = kind_of(masks)
    if not kind:
        return None
    from ..vit.weights import load_backbone
    from ..where.saliency import Found, TokenCut, U2Net

    if kind == "u2net":
        return U2Net(of)
    return {"found": Found, "tokencut": TokenCut}[kind](load_backbone(of, seed=seed))


def same_saliency(where: Look, facts: dict[str, Any]) -> str:
    """Its fingerprint. The weights that look are not in the run folder, so they may have changed since."""
    found = getattr(where, "sha256", None) or weights_sha256(cast(nn.Module, where))
    before = facts.get("saliency_sha256", found)
    if found != before:
        of = kind_of(facts["masks"])[1]
        raise UserError(
            f"{of}: not the weights that made this run's masks (sha256 {found[:12]} instead of {before[:12]}); "
            "put those back, or train again"
        )
    return found


# ---- making ----------------------------------------------------------------------------------------------------------


def predictor(vit: ViT, config: EarlyMask, classes: int, *, late: bool) -> MaskedViT | LatelyMaskedViT:
    bare = resembling(vit, replace(vit.config, classes=0 if late else classes), config.seed)
    if config.frozen:
        bare.requires_grad_(False)
        if bare.head is not None:
            bare.head.requires_grad_(True)
    if not late:
        return MaskedViT(bare, zoom=Zoom() if config.zoom else None, fill=config.fill)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LatelyMaskedViT(bare, classes)


def check_hopeless_masking(config: EarlyMask, *, late: bool) -> None:
    if config.at_least is not None and not 0 < config.at_least <= 1:
        raise UserError(f"--at-least {config.at_least}: a share above 0, at most 1")
    for flag, given in (
        ("--sight pixels", config.sight == "pixels"),
        ("--zoom", config.zoom),
        ("--fill", config.fill != "mean"),
    ):
        if late and given:
            raise UserError(f"{flag}: late masking sees every pixel; use early-mask")
    if config.fill != "mean" and not (config.sight == "pixels" or config.zoom):
        raise UserError(
            f"--fill {config.fill}: without --sight pixels or --zoom no pixel of a kept patch is hidden; add one"
        )


def make_early_mask(
    config: EarlyMask, rows: Rows, run: Run, accelerator: Accelerator, *, late: bool = False
) -> tuple[nn.Module, Input]:
    check_hopeless_masking(config, late=late)
    vit, expects = open_backbone(config, 0)
    where, told = saliency(config.masks, config.seed), masks_there(config.masks)
    seen_by = {} if where is None else {"saliency_sha256": same_saliency(where, run.facts)}
    if where is not None:  # once for all epochs; they are moved along with their pictures
        from ..where.mask_files import write_masks

        home = config.cache or run.folder / "masks"
        told = partial(
            write_masks, where, expects=expects, folder=home, accelerator=accelerator, workers=config.workers
        )
    told(rows)  # so that what is missing is said now
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        run.note(masks=from_anywhere(config.masks), **seen_by)
    what = predictor(vit, config, len(rows.classes), late=late)
    return GivenMask(what, Given.of(config), told, where), expects


def make_late_mask(config: LateMask, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make_early_mask(config, rows, run, accelerator, late=True)


def build_early_mask(
    vit_config: ViTConfig, config: EarlyMask, facts: dict[str, Any], *, late: bool = False
) -> nn.Module:
    config = replace(config, masks=facts.get("masks", config.masks))
    where = saliency(config.masks, config.seed)
    if where is not None:
        same_saliency(where, facts)
    what = predictor(ViT(vit_config), config, len(facts["data"]["classes"]), late=late)
    return GivenMask(what, Given.of(config), None if where is not None else masks_there(config.masks), where)


def build_late_mask(vit_config: ViTConfig, config: LateMask, facts: dict[str, Any]) -> nn.Module:
    return build_early_mask(vit_config, config, facts, late=True)
