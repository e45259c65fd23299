"""iFAM: stage 1 discovers parts, stage 2 predicts from their pixels or patches and is blind to everything else.

In training the mask may pass a straight-through gradient from stage 2 to stage 1; in evaluation hidden patches are
removed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Ifam
from ..data.multicrop import resize_matrix
from ..errors import UserError
from ..sight import Prediction, Sight, cell_share
from ..training.trainable import ParameterGroup
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.masked import MaskedViT, SoftMaskedViT
from ..what.zoom import Zoom, straight_through_from, zoom_in, zoom_windows
from ..where.corrections import Correction, PartAssignment
from ..where.parts import (
    PartDiscovery,
    Parts,
    foreground_probability,
    hard_keep,
    in_full_precision,
    soft_keep,
    straight_through,
)
from ..where.pixels import PixelSettings, pixel_foreground_probability
from .base import (
    PartDetections,
    PartMethod,
    PartSettings,
    RandomDraws,
    backbone_groups,
    check_part_config,
    check_selector_size,
    copy_vit,
    make_selector,
    open_backbone,
    record_backbone,
    record_selector,
    recorded_selector,
)
from .clustering import Teacher

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run

FINE_GRID = 28  # patches per side from which on stage 1 is fine enough for pixel masks


class IFam(PartMethod):
    """Stage 1 is `where`, stage 2 is `what`; with `pixels` the mask is exact to the pixel (ours)."""

    WINDOW = Zoom(
        margin=0.25, smallest=0.3
    )  # of the refined look, wide because the first mask may have missed a little
    export_graph = "parts"

    def __init__(
        self,
        where: PartDiscovery,
        what: MaskedViT | SoftMaskedViT,
        settings: PartSettings,
        pixels: PixelSettings | None = None,
    ):
        super().__init__(where, settings)
        self.what, self.pixels = what, pixels

    @property
    def blind(self) -> bool:  # ty: ignore[incompatible-property-override]
        return not self.settings.soft_mask

    @property
    def accepts_masks(self) -> bool:  # ty: ignore[incompatible-property-override]
        return not self.settings.soft_mask

    @property
    def refines(self) -> bool:
        return self.pixels is not None and self.pixels.refine

    @property
    def hides_pixels(self) -> bool:
        return self.pixels is not None and self.pixels.hide

    # ---- look and judge ----------------------------------------------------------------------------------------------

    def detect(self, images: Tensor) -> PartDetections:
        found = super().detect(images)
        if not self.refines:
            return found
        first = self.pixel_probability(foreground_probability(found.mask_assignment.scores), images)
        views, windows = self.zoomed_views(images, first)
        return replace(found, mask_assignment=PartAssignment.of(*self.discover(views)), windows=windows, views=views)

    def restore_views(self, images: Tensor, found: PartDetections) -> PartDetections:
        return found if found.windows is None else replace(found, views=self.enlarge(images, found.windows))

    def sight_from(self, images: Tensor, found: PartDetections, correction: Correction | None = None) -> Sight:
        """Whatever is corrected, the window of the refined look stays the same, so nothing is detected again."""
        correction = correction or Correction()
        if self.settings.soft_mask:
            parts = correction.probabilities(found.maps)
            return Sight(keep=parts[:, :-1].amax(dim=1) > 0.5, parts=parts)
        if self.pixels is None:
            return super().sight_from(images, found, correction)
        seen = images if found.views is None else found.views
        probability = correction.foreground_probability(found.mask_assignment)
        keep, keep_pixels = self.masks_from(images, self.pixel_probability(probability, seen, found.windows))
        if found.windows is not None:  # the distance limits are those of the refined look, not of the whole image
            correction = replace(correction, max_distances=None)
        return Sight(keep=keep, keep_pixels=keep_pixels, parts=correction.probabilities(found.maps))

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        """A user's mask, bool [B, h, w], exact to the pixel or as the patches that are half inside; without parts."""
        if self.settings.soft_mask:
            raise UserError("--soft-mask: this model weights patches by their parts, so it cannot be given a mask")
        grid = self.what.vit.grid(images)
        if not self.hides_pixels:
            return Sight.of_pixels(masks, grid, at_least=0.5, exact=False)
        return Sight.of_pixels(masks, grid, at_least=torch.finfo(torch.float32).tiny)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    # ---- pixels ------------------------------------------------------------------------------------------------------

    def pixel_probability(self, patches: Tensor, images: Tensor, windows: Tensor | None = None) -> Tensor:
        """[B, h, w]: the patches' foreground probabilities [B, H, W] at the pixels; if `images` are enlarged windows,
        pasted back to where these are."""
        assert self.pixels is not None
        probability = pixel_foreground_probability(patches, images, self.pixels)
        return probability if windows is None else paste_windows(probability, windows)

    def masks_from(self, images: Tensor, probability: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, H, W] and [B, h, w]: pixels above the threshold, and the patches that have enough of them; without the
        pixels if whole patches are hidden."""
        assert self.pixels is not None
        keep_pixels = probability >= self.pixels.pixel_threshold
        keep = cell_share(keep_pixels, self.what.vit.grid(images)) >= self.pixels.patch_threshold
        return keep, keep_pixels if self.pixels.hide else None

    def zoomed_views(self, images: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
        """The windows around the first mask, enlarged, and where they are. Stage 1 may see all of them."""
        assert self.pixels is not None
        visible = probability >= self.pixels.pixel_threshold
        windows = zoom_windows(visible, margin=self.WINDOW.margin, smallest=self.WINDOW.smallest)
        return self.enlarge(images, windows), windows

    def enlarge(self, images: Tensor, windows: Tensor) -> Tensor:
        """[B, 3, h, w]: the windows at the size of the images, with nothing hidden."""
        assert isinstance(self.what, MaskedViT)
        size = (images.shape[2], images.shape[3])
        everything = images.new_ones(len(images), *size, dtype=torch.bool)
        return zoom_in(images, everything, windows, size, self.what.vit.mean)[0]

    # ---- training ----------------------------------------------------------------------------------------------------

    def losses(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> dict[str, Tensor]:
        parts, losses = self.discovery(images, labels, draws)
        seen, keep, keep_pixels = self.stage2_input(images, parts, draws)
        # Removal waits for the device in every step, which on a GPU pays only where nothing is padded.
        removes = not images.is_cuda or self.what.vit.can_pack(images)
        hide = None if keep.dtype != torch.bool else "removal" if removes else "mask"
        logits = self.what.vit(seen, keep, keep_pixels, hide=hide).logits
        return losses | {"classification": self.classification_loss(logits, labels)}

    def stage2_input(self, images: Tensor, parts: Parts, draws: RandomDraws) -> tuple[Tensor, Tensor, Tensor | None]:
        """What stage 2 sees in training: images, kept patches and kept pixels; floats with a straight-through gradient
        to stage 1, or booleans if `mask_gradient` is off."""
        scores = self.where.scores(parts.logits, draws.noise_mask)
        if isinstance(self.what, SoftMaskedViT):
            weights = soft_keep(scores, draws.keep_masked)
            return images, weights if self.settings.mask_gradient else weights.detach(), None
        if self.pixels is None:
            mask_function = straight_through if self.settings.mask_gradient else hard_keep
            seen = self.what.masked_input(images, mask_function(scores, draws.keep_masked))
        else:
            seen = self.what.masked_input(images, *self.pixel_masks(images, scores, draws))
        return seen.images, seen.keep, seen.keep_pixels

    def pixel_masks(self, images: Tensor, scores: Tensor, draws: RandomDraws) -> tuple[Tensor, Tensor | None]:
        """[B, H, W] and [B, h, w]: the masks of patches and pixels in training."""
        assert self.pixels is not None
        with torch.set_grad_enabled(self.settings.mask_gradient):
            probability = self.pixel_probability(foreground_probability(scores, draws.keep_masked), images)
            if self.pixels.refine:
                views, windows = self.zoomed_views(images, probability)
                scores = self.where.discover(views, noise=draws.noise_mask).scores
                probability = self.pixel_probability(foreground_probability(scores, draws.keep_masked), views, windows)
        keep, keep_pixels = self.masks_from(images, probability)
        if keep_pixels is None or not self.settings.mask_gradient:
            return keep, keep_pixels
        patches = straight_through_from(keep, cell_share(probability, keep.shape[1:]))
        return patches, straight_through_from(keep_pixels, probability)

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        return [*super().parameter_groups(head_lr_factor), *backbone_groups(self.what.vit, head_lr_factor)]


@in_full_precision
def paste_windows(values: Tensor, windows: Tensor) -> Tensor:
    """[B, h, w]: values on enlarged windows, shrunk and pasted back to where the windows are; 0 outside of them."""
    left, top, right, bottom = windows.to(values.dtype).unbind(dim=1)
    rows, columns = shrinking_weights(top, bottom, values.shape[1]), shrinking_weights(left, right, values.shape[2])
    return torch.einsum("byh,bhw,bxw->byx", rows, values, columns)


def shrinking_weights(start: Tensor, end: Tensor, side: int) -> Tensor:
    """[B, side, side]: each pixel's resampling weights over the pixels of the enlarged [start, end); 0 outside of
    it."""
    scale = side / (end - start)
    weights = resize_matrix(-start * scale, side * scale, side, side)
    positions = torch.arange(side, device=start.device)
    # Antialiasing reaches over the window's edge; pixels farther out have no source at all.
    return weights.where(((positions >= start[:, None]) & (positions < end[:, None]))[..., None], 0.0)


# ---- making ----------------------------------------------------------------------------------------------------------


def pixel_settings(config: Ifam) -> PixelSettings | None:
    """None: the mask is one of patches, as in the paper."""
    if not config.masks_pixels:
        return None
    share = PixelSettings.patch_threshold if config.hides_pixels else 0.5
    return PixelSettings(
        config.pixel_threshold, share, config.guide_radius, refine=config.refines, hide=config.hides_pixels
    )


def make_predictor(vit: ViT, config: Ifam, classes: int) -> MaskedViT | SoftMaskedViT:
    """Stage 2 on a copy of this backbone, with another LayerNorm and a head without bias, as published."""
    registers = vit.config.registers * config.registers
    shape = replace(vit.config, classes=classes, head_norm=True, head_bias=False, registers=registers)
    stage2 = copy_vit(vit, shape, config.seed + 1)
    if config.freeze_predictor:
        stage2.requires_grad_(False)
        for new in (stage2.head, stage2.fc_norm):
            assert new is not None
            new.requires_grad_(True)
    if config.soft_mask:
        return SoftMaskedViT(stage2)
    return MaskedViT(stage2, zoom=Zoom() if config.zooms else None)


def make_ifam(config: Ifam, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    settings, classes = PartSettings.of(config), len(rows.classes)
    check_part_config(config, accelerator, mask_gradient=settings.mask_gradient)
    check_pixel_config(config)
    vit, expects = open_backbone(config, 0)
    where = vit if config.where is None else load_backbone(config.where, classes=0, seed=config.seed)
    selector_side = selector_size(config, where, expects)
    depth = selector_depth(config, where)
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        record_selector(run, None if where is vit else where)
        run.note(selector_size=selector_side, selector_depth=depth)
    stage1, stage2 = make_selector(where, config, classes, selector_side, depth), make_predictor(vit, config, classes)
    method = IFam(stage1, stage2, settings, pixel_settings(config))
    if config.clusters:
        whole = copy_vit(where, replace(where.config, classes=0, registers=where.config.registers * config.registers))
        method.teacher = Teacher(whole, max(selector_side or 0, finer(expects.size[0], where, 2.0) or expects.size[0]))
    return method, expects


def selector_size(config: Ifam, where: ViT, expects: Input) -> int | None:
    """The image side for stage 1, None if it is that of the images: by default larger for pixel masks where patches
    are coarse. Pixel masks need no whole number of pixels per patch; masks of patches do."""
    if config.selector_size is None and config.masks_pixels and expects.size[0] == expects.size[1]:
        return finer(expects.size[0], where, 1.5 if config.clusters else 2.0)
    if not config.masks_pixels:
        check_selector_size(config.selector_size, where, expects)
    elif config.selector_size is not None and (config.selector_size % where.config.patch or config.selector_size < 1):
        near = max(1, round(config.selector_size / where.config.patch)) * where.config.patch
        raise UserError(
            f"--selector-size {config.selector_size}: must be a multiple of the selector's patch, "
            f"{where.config.patch}, such as {near}"
        )
    return config.selector_size


def finer(side: int, vit: ViT, factor: float) -> int | None:
    """About `factor` times the side, in whole patches, where images of this side have few of them; otherwise None."""
    patch = vit.config.patch
    return math.ceil(factor * side / patch) * patch if side < FINE_GRID * patch else None


def selector_depth(config: Ifam, where: ViT) -> int | None:
    """The number of blocks that stage 1 uses, None for all: by default two thirds if it is found by clustering."""
    blocks, depth = where.config.depth, config.selector_depth
    if depth is not None and not (config.clusters and 1 <= depth <= blocks):
        raise UserError(f"--selector-depth {depth}: from 1 to {blocks} blocks, and only with --selector clusters")
    return depth or (math.ceil(2 * blocks / 3) if config.clusters else None)


def check_pixel_config(config: Ifam) -> None:
    patches, threshold, radius = not config.masks_pixels, config.pixel_threshold, config.guide_radius
    needs = "needs pixel masks; add --sight pixels"
    for wrong, complaint in (
        (
            config.soft_mask and (not patches or config.zoom),
            "--soft-mask: weights whole patches; leave out --sight pixels, --selector clusters and --zoom",
        ),
        (config.refine and not config.hides_pixels, f"--refine: {needs}"),
        (config.selector_size and patches, f"--selector-size: {needs}"),
        (threshold != Ifam.pixel_threshold and patches, f"--pixel-threshold: {needs}"),
        (radius != Ifam.guide_radius and patches, f"--guide-radius: {needs}"),
        (config.where and patches, f"--where: the patches of two backbones differ, so it {needs}"),
        (
            config.clusters and config.mask_gradient,
            "--selector clusters: is not trained; leave out --mask-gradient",
        ),
    ):
        if wrong:
            raise UserError(complaint)


def build_ifam(vit_config: ViTConfig, config: Ifam, facts: dict[str, Any]) -> nn.Module:
    classes, vit = len(facts["data"]["classes"]), ViT(vit_config)
    selector_side = facts.get("selector_size", config.selector_size)
    depth = facts.get("selector_depth")
    where = make_selector(recorded_selector(facts) or vit, config, classes, selector_side, depth)
    return IFam(where, make_predictor(vit, config, classes), PartSettings.of(config), pixel_settings(config))
