"""Selectors of the matrix: by a map, by masks, by fixed or random crops, or everything.

A new kind is one line in `KINDS`: the function that opens it, given its spec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..data.cache import cache_fingerprint, unpack_masks
from ..data.images import Preprocess, open_file
from ..errors import UserError
from ..load import load_as_trained
from ..methods.a2 import CropPlan, check_crops_fit, check_layer, parse_heads
from ..methods.given_mask import absolute_mask_source, mask_loader, saliency
from ..sight import Look, Sight
from ..training.distributed import make_accelerator
from ..vit.model import Input
from ..vit.weights import HEAD_PREFIXES, load_backbone, weights_sha256
from ..where.crops import CropSight
from ..where.mask_files import saliency_fingerprint, write_masks
from ..where.relevance import RelevanceSight
from ..where.saliency import Found, TokenCut, U2Net
from .bench import MatrixContext, short_hash
from .ways import (
    Sees,
    TopMass,
    Way,
    crop_ways,
    crops_on,
    keep_mass,
    mass_ways,
    only_map,
    sight_from_patches,
    window_around,
)
from .words import Spec, parse_attention

if TYPE_CHECKING:
    from ..data.rows import Rows
    from ..load import Model


@dataclass(frozen=True, eq=False)
class Where:
    """A selector: its output for every image, and the ways to turn that into a sight."""

    spec: Spec
    context: MatrixContext
    identity: str  # hash of everything it depends on except the images
    parameters: int | None = None
    note: str = ""
    truth: bool = False  # it uses the data's own masks

    def ways(self, sees: Sees) -> list[Way]:
        raise NotImplementedError

    def shown(self, expects: Input) -> Tensor | None:
        """The selector's output [rows, ...] for images of this input size, cached; None if it has none."""
        raise NotImplementedError

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:
        """The sight of a batch of images, from the selector's output for them."""
        raise NotImplementedError

    def masks(self, way: Way, expects: Input) -> str | None:
        """The value of `early-mask --masks` for training on the visible pixels; None if everything is visible."""
        raise NotImplementedError


def write_rows(context: MatrixContext, look: nn.Module, expects: Input) -> Rows:
    """The rows with the selector's sight as masks, written to files."""
    return write_masks(
        cast(Look, look), context.rows, expects, context.folder, make_accelerator(context.config.device),
        batch=context.config.batch, workers=context.config.workers,
    )  # fmt: skip


def write_masks_folder(context: MatrixContext, look: nn.Module, expects: Input) -> str:
    """The folder of these masks."""
    write_rows(context, look, expects)
    return str(context.folder.resolve() / saliency_fingerprint(look, Preprocess.of(expects), context.device))


# ---- by a map --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ByMap(Where):
    """A selector with one map over patches: the patches with most of its mass are kept, or crops placed on them."""

    look: nn.Module

    def ways(self, sees: Sees) -> list[Way]:
        return crop_ways(self.context.config) if sees == "crop" else mass_ways(self.context.config)

    def shown(self, expects: Input) -> Tensor:
        context, preprocess = self.context, Preprocess.of(expects)

        def computed() -> dict[str, Tensor]:
            look = cast(Look, self.look.to(context.device).eval())
            maps = context.over(lambda images, _: only_map(look, images), context.every, preprocess, exact=True)
            return {"maps": maps}

        def found() -> Tensor:
            facts = f"{context.files(preprocess)} {self.identity} {context.device.type}"
            return context.kept("maps", facts, computed)["maps"].to(context.device)

        return context.once(("maps", self.identity, preprocess), found)

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:  # noqa: ARG002
        assert shown is not None
        size = (images.shape[-2], images.shape[-1])
        if way.mass is None:
            return crops_on(shown, way.numbers, size)
        return sight_from_patches(keep_mass(shown, way.mass), size)

    def masks(self, way: Way, expects: Input) -> str:
        assert way.mass is not None
        return write_masks_folder(self.context, TopMass(cast(Look, self.look), way.mass), expects)


def attention(spec: Spec, context: MatrixContext) -> Where:
    name, layer, heads = parse_attention(spec.of)
    vit = load_backbone(name, classes=0, seed=context.config.seed)
    check_layer(name, vit.config, layer)
    return by_map(spec, context, CropSight(vit, layer=layer, heads=parse_heads(heads, vit.config)))


def relevance(spec: Spec, context: MatrixContext) -> Where:
    """Relevance of the prediction of a run that sees everything."""
    model = load_as_trained(spec.of)
    return by_map(spec, context, RelevanceSight(model.method), other_data_note("it was", model, context))


def by_map(spec: Spec, context: MatrixContext, look: nn.Module, note: str = "") -> ByMap:
    return ByMap(spec, context, module_fingerprint(look), count_parameters(look), note, look=look)


# ---- by masks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ByMasks(Where):
    """A selector of pixels: they are kept where they are, zoomed into, or crops are placed on them."""

    with_masks: Callable[[Input], Rows]  # the rows with masks
    training: Callable[[Input], str]  # the value of `early-mask --masks`

    def ways(self, sees: Sees) -> list[Way]:
        crops = crop_ways(self.context.config) if sees == "crop" else [Way()]
        return [*crops, Way(window=True)]

    def shown(self, expects: Input) -> Tensor:
        context, preprocess = self.context, Preprocess.of(expects)

        def found() -> Tensor:
            rows = self.with_masks(expects)
            facts = cache_fingerprint(rows, preprocess, context.every)
            packed = context.kept("masks", facts, lambda: {"bits": context.packed_masks(rows, preprocess)})
            return packed["bits"].to(context.device)

        return context.once(("masks", self.identity, preprocess), found)

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:
        assert shown is not None
        size = (images.shape[-2], images.shape[-1])
        visible = unpack_masks(shown, size)
        if sees == "mask":
            return Sight.of_pixels(visible, grid)
        return Sight(boxes=window_around(visible)) if way.window else crops_on(visible, way.numbers, size)

    def masks(self, way: Way, expects: Input) -> str:  # noqa: ARG002 (the same with and without zoom)
        return self.training(expects)


def given_masks(spec: Spec, context: MatrixContext) -> Where:
    """Existing masks: the data's own, or those in a folder."""
    rows = mask_loader(spec.of)(context.rows)
    identity = masks_fingerprint(rows)
    truth = identity == context.once("masks of the data", lambda: masks_fingerprint(context.rows))
    source = absolute_mask_source(spec.of)
    return ByMasks(spec, context, identity, truth=truth, with_masks=lambda _: rows, training=lambda _: source)


def masks_fingerprint(rows: Rows) -> str:
    """Of the content of the mask files, whatever their names and folders."""
    digest = hashlib.sha256()
    for mask in rows.masks or ():
        try:
            file = open_file(rows.root, mask)
            content = file.read_bytes() if isinstance(file, Path) else file.read()
        except (OSError, UserError):
            content = b""  # reported when the mask is needed
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def saliency_masks(spec: Spec, context: MatrixContext) -> Where:
    """Masks created by a saliency method."""
    look = saliency(str(spec), context.config.seed)
    assert look is not None, "the kinds of masks that are computed"
    identity = look.sha256 if isinstance(look, U2Net) else module_fingerprint(look)
    own = look.vit.config.input if isinstance(look, (Found, TokenCut)) else None  # the input size it was made for
    return ByMasks(
        spec, context, identity, count_parameters(look) or None,
        with_masks=lambda expects: write_rows(context, look, own or expects),
        training=lambda expects: write_masks_folder(context, look, own or expects),
    )  # fmt: skip


def parts(spec: Spec, context: MatrixContext) -> Where:
    """All discovered parts of a run, without its intervention."""
    model = load_as_trained(spec.of)
    look = model.method
    if not look.part_count:
        raise UserError(f"{spec.of}: a run of {model.run.facts['method']!r} has no discovered parts; train ifam")
    return ByMasks(  # at the run's own input size, whatever the predictor's
        spec, context, module_fingerprint(look), count_parameters(cast(nn.Module, look.where)),
        other_data_note("its parts were", model, context),
        with_masks=lambda _: write_rows(context, look, model.expects),
        training=lambda _: write_masks_folder(context, look, model.expects),
    )  # fmt: skip


# ---- by crops, and everything ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ByCrops(Where):
    """Centre crops or random crops; a masking predictor hides everything around them."""

    seed: int | None

    def ways(self, sees: Sees) -> list[Way]:  # noqa: ARG002
        found = crop_ways(self.context.config)
        if self.seed is not None:
            return found
        alone = [way for way in found if len(way.sides) == 1]
        if not alone:
            raise UserError("--crop-size: `centre` takes a single crop; name at least one single side, such as 2/7")
        return alone

    def shown(self, expects: Input) -> None:
        pass

    def crop_selector(self, way: Way) -> nn.Module:
        return CropPlan(way.sides, seed=self.seed).selector(None)

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:  # noqa: ARG002
        return cast(Look, self.crop_selector(way)).look(images)

    def masks(self, way: Way, expects: Input) -> str:
        return write_masks_folder(self.context, self.crop_selector(way), expects)


def crops(spec: Spec, context: MatrixContext) -> Where:
    seed = context.config.seed if spec.kind == "random" else None
    return ByCrops(spec, context, "centre" if seed is None else f"random {seed}", seed=seed)


class Everywhere(Where):
    def ways(self, sees: Sees) -> list[Way]:  # noqa: ARG002
        return [Way()]

    def shown(self, expects: Input) -> None:
        pass

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:  # noqa: ARG002
        if sees == "mask":
            return Sight.everything(images)
        h, w = images.shape[-2:]
        return Sight(boxes=torch.tensor([0, 0, w, h], device=images.device).expand(len(images), 1, 4))

    def masks(self, way: Way, expects: Input) -> None:
        pass


def everything(spec: Spec, context: MatrixContext) -> Where:
    return Everywhere(spec, context, "everything")


KINDS: dict[str, Callable[[Spec, MatrixContext], Where]] = {
    "attention": attention,
    "relevance": relevance,
    "parts": parts,
    "masks": given_masks,
    "found": saliency_masks,
    "tokencut": saliency_masks,
    "u2net": saliency_masks,
    "centre": crops,
    "random": crops,
    "everything": everything,
}


def other_data_note(what: str, model: Model, context: MatrixContext) -> str:
    """A note if the run was trained on other data than these."""
    data = model.run.facts["data"]
    return "" if data["fingerprint"] == context.data else f"{what} trained on other data, {data['name']}"


def check_crops(ways: list[Way], size: tuple[int, int]) -> list[Way]:
    for way in ways:
        check_crops_fit(CropPlan(way.sides or ("1",)), size)
    return ways


def module_fingerprint(module: nn.Module) -> str:
    return short_hash(f"{module!r} {weights_sha256(module)}")


def count_parameters(module: nn.Module) -> int:
    return sum(
        p.numel() for name, p in module.named_parameters() if not name.split("vit.")[-1].startswith(HEAD_PREFIXES)
    )
