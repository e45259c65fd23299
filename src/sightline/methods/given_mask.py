"""Early and late masking: the sight is given, by masks that people annotated or other programs made.

Early masking never sees the rest of the image. Late masking sees everything and averages only the tokens inside the
mask: the usual way, which is not blind. Masks are the dataset's own, files in a folder, or made once by
`where/saliency.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import EarlyMask, LateMask
from ..data.shared_cache import is_shared
from ..errors import UserError
from ..sight import Look, Method, Prediction, Sight
from ..training.trainable import ParameterGroup, Trainable, TrainBatch
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.masked import MaskedViT
from ..what.pool import LateMaskedViT
from ..what.zoom import Zoom
from ..where.mask_files import write_masks
from ..where.saliency import Found, Saliency, TokenCut, U2Net, selector_sha256
from .base import backbone_groups, copy_vit, open_backbone, record_backbone

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..config import Train
    from ..data.rows import Rows
    from ..training.run_folder import Run

AddMasks = Callable[["Rows"], "Rows"]  # returns the rows of a dataset with their masks


@dataclass(frozen=True)
class MaskSettings:
    """Which masks are given, and how a mask becomes a sight."""

    masks: str
    patch_threshold: float  # a patch is kept if at least this fraction of it is inside the mask
    pixels: bool  # hide the pixels outside the mask also inside kept patches

    @classmethod
    def of(cls, config: EarlyMask) -> MaskSettings:
        pixels, threshold = config.sight == "pixels", config.patch_threshold
        return cls(config.masks, threshold if threshold is not None else 0.1 if pixels else 0.5, pixels)

    def sight(self, masks: Tensor, grid: tuple[int, int]) -> Sight:
        return Sight.of_pixels(masks, grid, at_least=self.patch_threshold, exact=self.pixels)


@dataclass(frozen=True, eq=False)
class MaskSource:
    """Where masks come from. A plain object, shared by copies of the method, so that torch neither trains nor saves
    it."""

    add_masks: AddMasks | None
    where: Saliency | None

    def selector_on(self, device: torch.device) -> Saliency | None:
        """The saliency method that makes the masks, moved to this device."""
        return None if self.where is None else self.where.to(device)

    def __deepcopy__(self, _: dict) -> MaskSource:
        return self


class GivenMask(Trainable, Method):
    """Sees what a given mask shows; `look` works only where a saliency method makes the masks."""

    trains_with_masks = True
    accepts_masks = True
    export_graph = "given mask"

    def __init__(
        self,
        what: MaskedViT | LateMaskedViT,
        settings: MaskSettings,
        add_masks: AddMasks | None,
        where: Saliency | None,
    ):
        super().__init__()
        self.what, self.settings, self.source = what, settings, MaskSource(add_masks, where)

    @property
    def blind(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.what.blind

    @property
    def needs_masks(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.source.add_masks is not None

    def with_masks(self, rows: Rows) -> Rows:
        return rows if self.source.add_masks is None else self.source.add_masks(rows)

    def look(self, images: Tensor) -> Sight:
        where = self.source.selector_on(images.device)
        if where is None:
            raise UserError("this method needs a mask for every image; give data with masks")
        return self.look_at(images, where.look(images).visible(tuple(images.shape[2:])))

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        return self.settings.sight(masks, self.what.vit.grid(images))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        where = self.source.selector_on(images.device)
        return {} if where is None else where.maps(images)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.masks is not None
        sight = self.look_at(batch.images, batch.masks)
        return {"loss": self.classification_loss(self.what.judge(batch.images, sight).logits, batch.labels)}

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        groups = backbone_groups(self.what.vit, head_lr_factor)
        new = [p for name, p in self.what.named_parameters() if not name.startswith("vit.")]
        return groups + [ParameterGroup([p], head_lr_factor, decay=p.ndim > 1) for p in new]


# ---- masks -----------------------------------------------------------------------------------------------------------


def require_masks(rows: Rows) -> Rows:
    """The rows, all of which must have a mask."""
    if rows.masks is None:
        raise UserError(f"{rows.name}: has no masks; give a mask column, or --masks FOLDER or found:BACKBONE")
    missing = [image for image, mask in zip(rows.images, rows.masks, strict=True) if not mask]
    if missing:
        raise UserError(
            f"{rows.name}: no mask for {len(missing):,} images, such as {missing[0]}; add them, make all masks with "
            "--masks found:BACKBONE, or train robustvit, which needs few"
        )
    return rows


def find_masks(rows: Rows, folder: Path) -> list[str]:
    """The mask of each image: the file under the image's path, with any suffix, in `folder`; "" where there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of masks")
    files: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        files.setdefault(path.relative_to(folder).with_suffix("").as_posix(), []).append(path)
    masks, root = [], rows.root.resolve()
    for image in rows.images:
        matching = files.get(PurePosixPath(image).with_suffix("").as_posix()) or files.get(image) or []
        if len(matching) > 1:
            raise UserError(f"{folder}: {matching[0].name} and {matching[1].name} are both masks of {image}; keep one")
        masks += [Path(os.path.relpath(path.resolve(), root)).as_posix() for path in matching] or [""]
    return masks


def with_masks(rows: Rows, folder: Path) -> Rows:
    """The rows with masks from a folder, which must have one for every image."""
    masks = find_masks(rows, folder)
    missing = [image for image, mask in zip(rows.images, masks, strict=True) if not mask]
    if missing:
        wanted = PurePosixPath(missing[0]).with_suffix(".png")
        raise UserError(f"{folder}: no mask for {len(missing):,} images, such as {missing[0]}; add {wanted}")
    return replace(rows, masks=masks, notes=(*rows.notes, f"masks from {folder.name}"))


def mask_loader(masks: str) -> AddMasks:
    """For existing masks: the dataset's own (`data`), or those in a folder."""
    return require_masks if masks == "data" else partial(with_masks, folder=Path(masks))


def split_mask_source(masks: str) -> tuple[str, str]:
    """(`found`, BACKBONE) of `found:BACKBONE`; no kind for masks that exist already."""
    kind, colon, weights = masks.partition(":")
    return (kind, weights) if colon and kind in ("found", "tokencut", "u2net") else ("", masks)


def absolute_mask_source(masks: str) -> str:
    """The same `--masks` with an absolute path, valid in every working directory."""
    kind, path = split_mask_source(masks)
    if masks == "data" or not Path(path).exists():
        return masks
    return ":".join(filter(None, [kind, str(Path(path).resolve())]))


def saliency(masks: str, seed: int = 0) -> Saliency | None:
    """The saliency method that makes these masks, or None for masks that exist already."""
    kind, weights = split_mask_source(masks)
    if not kind:
        return None
    if kind == "u2net":
        return U2Net(weights)
    return {"found": Found, "tokencut": TokenCut}[kind](load_backbone(weights, seed=seed))


def check_saliency_weights(where: Saliency, facts: dict[str, Any]) -> str:
    """The fingerprint of its weights, which are not in the run folder and must not have changed since training."""
    found = selector_sha256(where)
    before = facts.get("saliency_sha256", found)
    if found != before:
        weights = split_mask_source(facts["masks"])[1]
        raise UserError(
            f"{weights}: not the weights that made this run's masks (sha256 {found[:12]} instead of {before[:12]}); "
            "restore them, or train again"
        )
    return found


def mask_writer(where: Look, config: Train, expects: Input, run: Run, accelerator: Accelerator) -> AddMasks:
    """Makes masks once, as files in the run folder or, with --cache on a disk, where other runs find them too."""
    home = run.folder / "masks" if config.cache is None or is_shared(config.cache) else config.cache
    return partial(write_masks, where, expects=expects, folder=home, accelerator=accelerator, workers=config.workers)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_predictor(
    vit: ViT, expects: Input, config: EarlyMask, classes: int, *, late: bool
) -> MaskedViT | LateMaskedViT:
    copy = copy_vit(vit, replace(vit.config, input=expects, classes=0 if late else classes), config.seed)
    if config.freeze_backbone:
        copy.requires_grad_(False)
        if copy.head is not None:
            copy.head.requires_grad_(True)
    if not late:
        return MaskedViT(copy, zoom=Zoom() if config.zoom else None, fill=config.fill)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LateMaskedViT(copy, classes)


def check_masking_config(config: EarlyMask, *, late: bool) -> None:
    for flag, given in (
        ("--sight pixels", config.sight == "pixels"),
        ("--zoom", config.zoom),
        ("--fill", config.fill != "mean"),
    ):
        if late and given:
            raise UserError(f"{flag}: late masking sees every pixel; use early-mask")
    if config.fill != "mean" and not (config.sight == "pixels" or config.zoom):
        raise UserError(
            f"--fill {config.fill}: no pixel of a kept patch is hidden without --sight pixels or --zoom; add one"
        )


def make_early_mask(
    config: EarlyMask, rows: Rows, run: Run, accelerator: Accelerator, *, late: bool = False
) -> tuple[nn.Module, Input]:
    check_masking_config(config, late=late)
    vit, expects = open_backbone(config, 0)
    where, add_masks, fingerprint = saliency(config.masks, config.seed), mask_loader(config.masks), {}
    if where is not None:  # made once for all epochs; augmentation transforms masks along with their images
        fingerprint = {"saliency_sha256": check_saliency_weights(where, run.facts)}
        add_masks = mask_writer(where, config, expects, run, accelerator)
    add_masks(rows)  # missing masks are reported now
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        run.note(masks=absolute_mask_source(config.masks), **fingerprint)
    what = make_predictor(vit, expects, config, len(rows.classes), late=late)
    return GivenMask(what, MaskSettings.of(config), add_masks, where), expects


def make_late_mask(config: LateMask, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make_early_mask(config, rows, run, accelerator, late=True)


def build_early_mask(
    vit_config: ViTConfig, config: EarlyMask, facts: dict[str, Any], *, late: bool = False
) -> nn.Module:
    config = replace(config, masks=facts.get("masks", config.masks))
    where = saliency(config.masks, config.seed)
    if where is not None:
        check_saliency_weights(where, facts)
    what = make_predictor(ViT(vit_config), vit_config.input, config, len(facts["data"]["classes"]), late=late)
    add_masks = None if where is not None else mask_loader(config.masks)
    return GivenMask(what, MaskSettings.of(config), add_masks, where)


def build_late_mask(vit_config: ViTConfig, config: LateMask, facts: dict[str, Any]) -> nn.Module:
    return build_early_mask(vit_config, config, facts, late=True)
