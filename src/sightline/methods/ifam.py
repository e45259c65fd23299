"""iFAM: the first stage discovers parts, the second answers from their pixels, or patches, and is blind to all others.

In training the mask may pass a gradient straight through to the first stage; in evaluation hidden patches are removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Ifam
from ..data.multicrop import resizing
from ..errors import UserError
from ..sight import Prediction, Sight, cell_share
from ..training.context import Group
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.masked import MaskedViT, SoftlyMaskedViT
from ..what.zoom import Zoom, passing, zoom_boxes, zoom_in
from ..where.corrections import Correction, PartAssignment
from ..where.fine import Fine, fine_share
from ..where.parts import (
    PartDiscovery,
    Parts,
    foreground,
    hard_keep,
    in_full_precision,
    soft_keep,
    straight_through,
)
from .base import (
    Found,
    PartMethod,
    PartSettings,
    RandomDraws,
    backbone_groups,
    check_hopeless_parts,
    check_odd_look,
    fits,
    open_backbone,
    record_backbone,
    record_selector,
    recorded_selector,
    resembling,
    selector,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class Pixels:
    """How iFAM hides pixels, beyond the patches of the papers."""

    fine: Fine
    look_again: bool

    @classmethod
    def of(cls, config: Ifam) -> Pixels | None:
        if not config.hides_pixels:
            return None
        return cls(Fine(sure=config.sure, guide=config.guide), config.look_again is not False)


FINE = 28  # patches a side from which on parts are fine enough


class IFam(PartMethod):
    WINDOW = Zoom(margin=0.25, smallest=0.3)  # where to look again: the first sight may have missed a little

    def __init__(
        self, where: PartDiscovery, what: MaskedViT | SoftlyMaskedViT, how: PartSettings, pixels: Pixels | None = None
    ):
        super().__init__(where, how)
        self.what, self.pixels = what, pixels

    export_graph = "parts"

    @property
    def blind(self) -> bool:
        return not self.how.soft

    def find(self, images: Tensor) -> Found:
        found = super().find(images)
        if not self.looks_again:
            return found
        views, windows = self.closer(images, self.in_pixels(foreground(found.deciding.scores), images))
        return replace(found, deciding=PartAssignment.of(*self.discover(views)), windows=windows, views=views)

    def again(self, images: Tensor, found: Found) -> Found:
        return found if found.windows is None else replace(found, views=self.enlarged(images, found.windows))

    @property
    def accepts_masks(self) -> bool:
        return not self.how.soft

    @property
    def looks_again(self) -> bool:
        return self.pixels is not None and self.pixels.look_again

    def decide(self, images: Tensor, found: Found, correction: Correction | None = None) -> Sight:
        """Whatever is corrected, the window that was looked at again stays: nothing has to be found anew."""
        correction = correction or Correction()
        if self.how.soft:
            parts = correction.shares(found.maps)
            return Sight(keep=parts[:, :-1].amax(dim=1) > 0.5, parts=parts)
        if self.pixels is None:
            return super().decide(images, found, correction)
        looked_at = images if found.views is None else found.views
        share = self.in_pixels(correction.foreground(found.deciding), looked_at, found.windows)
        keep, keep_pixels = self.kept(images, share)
        if found.windows is not None:  # distances are those of the closer look, and the maps are not
            correction = replace(correction, farthest=None)
        return Sight(keep=keep, keep_pixels=keep_pixels, parts=correction.shares(found.maps))

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        """Where a user says, bool [B, h, w], to the pixel or by patches that are half inside; no parts are found."""
        if self.how.soft:
            raise UserError("this method weighs patches by their parts, so that it cannot be shown a mask")
        if self.pixels is None:
            return Sight.of_pixels(masks, self.what.vit.grid(images), at_least=0.5, exact=False)
        return Sight.of_pixels(masks, self.what.vit.grid(images), at_least=torch.finfo(torch.float32).tiny)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    # ---- pixels ------------------------------------------------------------------------------------------------------

    def in_pixels(self, share: Tensor, images: Tensor, windows: Tensor | None = None) -> Tensor:
        """[B, h, w]: patches' share of the parts, pixel by pixel; where images are enlarged windows, at their place."""
        assert self.pixels is not None
        share = fine_share(share, images, self.pixels.fine)
        return share if windows is None else put_back(share, windows)

    def kept(self, images: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, W] and [B, h, w]: the pixels that are surely of a part, and the patches that have enough of them."""
        assert self.pixels is not None
        keep_pixels = share >= self.pixels.fine.sure
        return cell_share(keep_pixels, self.what.vit.grid(images)) >= self.pixels.fine.at_least, keep_pixels

    def closer(self, images: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """The window around the sight, enlarged, and where it is: the first stage may see all of it."""
        assert self.pixels is not None
        visible = share >= self.pixels.fine.sure
        windows = zoom_boxes(visible, margin=self.WINDOW.margin, smallest=self.WINDOW.smallest)
        return self.enlarged(images, windows), windows

    def enlarged(self, images: Tensor, windows: Tensor) -> Tensor:
        """[B, 3, h, w]"""
        assert isinstance(self.what, MaskedViT)
        size = (images.shape[2], images.shape[3])
        everything = images.new_ones(len(images), *size, dtype=torch.bool)
        return zoom_in(images, everything, windows, size, self.what.vit.mean)[0]

    # ---- training ----------------------------------------------------------------------------------------------------

    def losses(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> dict[str, Tensor]:
        parts, losses = self.discovery(images, labels, draws)
        seen, keep, keep_pixels = self.shown(images, parts, draws)
        # On a GPU removal would save little, and wait for it in every step.
        hide = None if keep.dtype != torch.bool else "mask" if images.is_cuda else "removal"
        logits = self.what.vit(seen, keep, keep_pixels, hide=hide).logits
        return losses | {"answer": self.classification_loss(logits, labels)}

    def shown(self, images: Tensor, parts: Parts, draws: RandomDraws) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the second stage is given in training: pictures, patches and pixels; these are boolean if it is to
        teach the first stage nothing."""
        scores = self.where.scores(parts.logits, draws.noise_mask)
        if isinstance(self.what, SoftlyMaskedViT):
            weights = soft_keep(scores, draws.keep_masked)
            return images, weights if self.how.mask_gradient else weights.detach(), None
        if self.pixels is None:
            kept = straight_through if self.how.mask_gradient else hard_keep
            seen = self.what.seen(images, kept(scores, draws.keep_masked))
        else:
            seen = self.what.seen(images, *self.pixel_masks(images, scores, draws))
        return seen.images, seen.keep, seen.keep_pixels

    def pixel_masks(self, images: Tensor, scores: Tensor, draws: RandomDraws) -> tuple[Tensor, Tensor]:
        """[B, H, W] and [B, h, w]"""
        assert self.pixels is not None
        with torch.set_grad_enabled(self.how.mask_gradient):
            share = self.in_pixels(foreground(scores, draws.keep_masked), images)
            if self.pixels.look_again:
                views, windows = self.closer(images, share)
                scores = self.where.discover(views, noise=draws.noise_mask).scores
                share = self.in_pixels(foreground(scores, draws.keep_masked), views, windows)
        keep, keep_pixels = self.kept(images, share)
        if not self.how.mask_gradient:
            return keep, keep_pixels
        return passing(keep, cell_share(share, keep.shape[1:])), passing(keep_pixels, share)

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return [*super().parameter_groups(head_lr), *backbone_groups(self.what.vit, head_lr)]


@in_full_precision
def put_back(shares: Tensor, windows: Tensor) -> Tensor:
    """[B, h, w]: what was found in enlarged windows, at its place in the picture; 0 outside of them."""
    left, top, right, bottom = windows.to(shares.dtype).unbind(dim=1)
    rows, columns = shrinking(top, bottom, shares.shape[1]), shrinking(left, right, shares.shape[2])
    return torch.einsum("byh,bhw,bxw->byx", rows, shares, columns)


def shrinking(start: Tensor, end: Tensor, side: int) -> Tensor:
    """[B, side, side]: each pixel's weights over those of the enlarged stretch [start, end); 0 outside of it."""
    scale = side / (end - start)
    weights = resizing(-start * scale, side * scale, side, side)
    places = torch.arange(side, device=start.device)
    # Antialiasing reaches over the window's edge, and finds nothing at all farther out.
    return weights.where(((places >= start[:, None]) & (places < end[:, None]))[..., None], 0.0)


def predictor(vit: ViT, config: Ifam, classes: int) -> MaskedViT | SoftlyMaskedViT:
    """The second stage on this backbone: another LayerNorm and a head without a bias, as published."""
    registers = vit.config.registers * config.registers
    shape = replace(vit.config, classes=classes, head_norm=True, head_bias=False, registers=registers)
    seeing = resembling(vit, shape, config.seed + 1)
    if config.freeze_predictor:
        seeing.requires_grad_(False)
        for new in (seeing.head, seeing.fc_norm):
            assert new is not None
            new.requires_grad_(True)
    if config.soft:
        return SoftlyMaskedViT(seeing)
    return MaskedViT(seeing, zoom=Zoom() if config.zooms else None)


def make_ifam(config: Ifam, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    how, classes = PartSettings.of(config), len(rows.classes)
    check_hopeless_parts(config, accelerator, taught_by_answer=how.mask_gradient)
    check_hopeless_pixels(config)
    if config.mask_dropout is not None and not 0 <= config.mask_dropout < 1:
        raise UserError(f"--mask-dropout {config.mask_dropout}: must be at least 0 and below 1")
    vit, expects = open_backbone(config, 0)
    where = vit if config.where is None else load_backbone(config.where, classes=0, seed=config.seed)
    looked = look_size(config, where, expects)
    check_odd_look(looked, where, expects)
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        record_selector(run, None if where is vit else where)
        run.note(look_size=looked)
    what = predictor(vit, config, classes)
    return IFam(selector(where, config, classes, looked), what, how, Pixels.of(config)), expects


def look_size(config: Ifam, where: ViT, expects: Input) -> int | None:
    """The side of the pictures that parts are found in: twice that of coarse ones, if pixels are to be found."""
    (h, w), patch, said = expects.size, where.config.patch, config.look_size
    coarse = config.hides_pixels and h == w and h < FINE * patch and fits(h, 2 * h, patch)
    return 2 * h if said is None and coarse else said


def check_hopeless_pixels(config: Ifam) -> None:
    pixels = config.hides_pixels
    for wrong, complaint in (
        (config.soft and (pixels or config.zoom), "--soft: weighs whole patches; leave out --sight pixels and --zoom"),
        (config.look_again and not pixels, "--look-again: finds pixels, so it needs --sight pixels"),
        (
            config.look_size and not pixels,
            "--look-size: finer than the patches that answer, so it needs --sight pixels",
        ),
        (config.sure != Ifam.sure and not pixels, "--sure: draws the border of pixels, so it needs --sight pixels"),
        (config.guide != Ifam.guide and not pixels, "--guide: draws the border of pixels, so it needs --sight pixels"),
        (config.where and not pixels, "--where: another backbone's patches are not these, so it needs --sight pixels"),
        (not 0 < config.sure < 1, f"--sure {config.sure}: a share above 0 and below 1"),
        (config.guide < 0, f"--guide {config.guide}: must not be negative"),
    ):
        if wrong:
            raise UserError(complaint)


def build_ifam(vit_config: ViTConfig, config: Ifam, facts: dict[str, Any]) -> nn.Module:
    classes, vit, looked = len(facts["data"]["classes"]), ViT(vit_config), facts.get("look_size", config.look_size)
    where = selector(recorded_selector(facts) or vit, config, classes, looked)
    return IFam(where, predictor(vit, config, classes), PartSettings.of(config), Pixels.of(config))
