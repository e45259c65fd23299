"""Where to look: by a map, by masks, by crops that need neither, or everywhere.

A new kind is one line in `KINDS`: what opens it, given what was said after the colon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..data.cache import fingerprint as files_of
from ..data.cache import unpacked
from ..data.images import Canvas, open_file
from ..errors import UserError
from ..load import load_as_trained
from ..methods.a2 import Crops, check_crowds, check_layer, heads_of
from ..methods.given_mask import from_anywhere, masks_there, saliency
from ..sight import Look, Sight
from ..training.distributed import make_accelerator
from ..vit.model import Input
from ..vit.weights import HEAD, load_backbone, weights_sha256
from ..where.crops import CropSight
from ..where.mask_files import look_print, write_masks
from ..where.relevance import RelevanceSight
from ..where.saliency import Found, TokenCut
from .bench import Bench, short_print
from .ways import Most, Sees, Way, crop_ways, crops_on, mass_ways, most_of, only_map, showing, window_around
from .words import Word, attention_of

if TYPE_CHECKING:
    from ..data.rows import Rows
    from ..load import Model


@dataclass(frozen=True, eq=False)
class Where:
    """Shows something of every picture, and can make a sight of it in one way or several."""

    word: Word
    bench: Bench
    identity: str  # changes with all that it depends on, but for the pictures
    parameters: int | None = None
    note: str = ""
    truth: bool = False  # what it shows is part of the data

    def ways(self, sees: Sees) -> list[Way]:
        raise NotImplementedError

    def shown(self, expects: Input) -> Tensor | None:
        """[rows, ...]: for pictures of this kind, kept; None where nothing need be."""
        raise NotImplementedError

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:
        """Of some pictures, and what is shown of them."""
        raise NotImplementedError

    def masks(self, way: Way, expects: Input) -> str | None:
        """What `early-mask --masks` is to be told, to train with what is visible; None: all is."""
        raise NotImplementedError


def written(bench: Bench, look: nn.Module, expects: Input) -> Rows:
    """The rows with masks of what it looks at."""
    return write_masks(
        cast(Look, look), bench.rows, expects, bench.folder, make_accelerator(bench.config.device),
        batch=bench.config.batch, workers=bench.config.workers,
    )  # fmt: skip


def written_to(bench: Bench, look: nn.Module, expects: Input) -> str:
    """The folder they are in."""
    written(bench, look, expects)
    return str(bench.folder.resolve() / look_print(look, Canvas.of(expects), bench.device))


# ---- by a map --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ByMap(Where):
    """Something whose `maps` has one map, which weighs patches: they can be kept or not, or crops laid over them."""

    look: nn.Module

    def ways(self, sees: Sees) -> list[Way]:
        return crop_ways(self.bench.config) if sees == "crop" else mass_ways(self.bench.config)

    def shown(self, expects: Input) -> Tensor:
        bench, canvas = self.bench, Canvas.of(expects)

        def computed() -> dict[str, Tensor]:
            look = cast(Look, self.look.to(bench.device).eval())
            maps = bench.over(lambda images, _: only_map(look, images), bench.every, canvas, exact=True)
            return {"maps": maps}

        def found() -> Tensor:
            facts = f"{bench.files(canvas)} {self.identity} {bench.device.type}"
            return bench.kept("maps", facts, computed)["maps"].to(bench.device)

        return bench.once(("maps", self.identity, canvas), found)

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:  # noqa: ARG002
        assert shown is not None
        size = (images.shape[-2], images.shape[-1])
        return crops_on(shown, way.numbers, size) if way.mass is None else showing(most_of(shown, way.mass), size)

    def masks(self, way: Way, expects: Input) -> str:
        assert way.mass is not None
        return written_to(self.bench, Most(cast(Look, self.look), way.mass), expects)


def attention(word: Word, bench: Bench) -> Where:
    name, layer, heads = attention_of(word.of)
    vit = load_backbone(name, classes=0, seed=bench.config.seed)
    check_layer(name, vit.config, layer)
    return by_map(word, bench, CropSight(vit, layer=layer, heads=heads_of(heads, vit.config)))


def relevance(word: Word, bench: Bench) -> Where:
    """Where the answer of a run that sees everything comes from."""

    model = load_as_trained(word.of)
    return by_map(word, bench, RelevanceSight(cast(nn.Module, model.method)), learnt_elsewhere("it was", model, bench))


def by_map(word: Word, bench: Bench, look: nn.Module, note: str = "") -> ByMap:
    return ByMap(word, bench, module_print(look), count(look), note, look=look)


# ---- by masks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ByMasks(Where):
    """Pixels are visible or not: they can be seen where they are, or enlarged; or crops laid over them."""

    told: Callable[[Input], Rows]  # the rows with masks
    training: Callable[[Input], str]  # what `early-mask --masks` is told

    def ways(self, sees: Sees) -> list[Way]:
        crops = crop_ways(self.bench.config) if sees == "crop" else [Way()]
        return [*crops, Way(window=True)]

    def shown(self, expects: Input) -> Tensor:
        bench, canvas = self.bench, Canvas.of(expects)

        def found() -> Tensor:
            told = self.told(expects)
            facts = files_of(told, canvas, bench.every)
            return bench.kept("masks", facts, lambda: {"bits": bench.outlines(told, canvas)})["bits"].to(bench.device)

        return bench.once(("masks", self.identity, canvas), found)

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:
        assert shown is not None
        size = (images.shape[-2], images.shape[-1])
        visible = unpacked(shown, size)
        if sees == "mask":
            return Sight.of_pixels(visible, grid)
        return Sight(boxes=window_around(visible)) if way.window else crops_on(visible, way.numbers, size)

    def masks(self, way: Way, expects: Input) -> str:  # noqa: ARG002 (to be enlarged or not, they are the same)
        return self.training(expects)


def given(word: Word, bench: Bench) -> Where:
    """Masks that are there: the data's own, or in a folder."""
    told = masks_there(word.of)(bench.rows)
    said = masks_print(told)
    truth = said == bench.once("masks of the data", lambda: masks_print(bench.rows))
    return ByMasks(word, bench, said, truth=truth, told=lambda _: told, training=lambda _: from_anywhere(word.of))


def masks_print(told: Rows) -> str:
    """Changes with what is in the masks' files, and with nothing else: they may lie, or be called, otherwise."""
    digest = hashlib.sha256()
    for mask in told.masks or ():
        try:
            file = open_file(told.root, mask)
            content = file.read_bytes() if isinstance(file, Path) else file.read()
        except (OSError, UserError):
            content = b""  # to be complained of when it is needed
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def salient(word: Word, bench: Bench) -> Where:
    """Masks that a saliency method makes."""
    look = saliency(str(word), bench.config.seed)
    assert isinstance(look, nn.Module)
    identity = getattr(look, "sha256", None) or module_print(look)
    own = look.vit.config.input if isinstance(look, (Found, TokenCut)) else None  # what it was made for
    return ByMasks(
        word, bench, identity, count(look) or None,
        told=lambda expects: written(bench, look, own or expects),
        training=lambda expects: written_to(bench, look, own or expects),
    )  # fmt: skip


def parts(word: Word, bench: Bench) -> Where:
    """The parts that a run discovered, all of them, as it was trained."""

    model = load_as_trained(word.of)
    look = model.method
    if not look.part_count:
        raise UserError(f"{word.of}: a run of {model.run.facts['method']!r} discovers no parts; train ifam")
    return ByMasks(  # it sees pictures as it did in training, whoever answers
        word, bench, module_print(look), count(look.where), learnt_elsewhere("its parts were", model, bench),
        told=lambda _: written(bench, look, model.expects),
        training=lambda _: written_to(bench, look, model.expects),
    )  # fmt: skip


# ---- by neither ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ByCrops(Where):
    """Crops from the centre, or by chance; what hides can hide all around them."""

    seed: int | None

    def ways(self, sees: Sees) -> list[Way]:  # noqa: ARG002
        found = crop_ways(self.bench.config)
        if self.seed is not None:
            return found
        alone = [way for way in found if len(way.sides) == 1]
        if not alone:
            raise UserError("--crop: there is only one crop in the centre; name a single side, too")
        return alone

    def shown(self, expects: Input) -> None:
        pass

    def looking(self, way: Way) -> nn.Module:
        return Crops(way.sides, seed=self.seed).sight(None)

    def sight(self, way: Way, sees: Sees, images: Tensor, shown: Tensor | None, grid: tuple[int, int]) -> Sight:  # noqa: ARG002
        return cast(Look, self.looking(way)).look(images)

    def masks(self, way: Way, expects: Input) -> str:
        return written_to(self.bench, self.looking(way), expects)


def centre(word: Word, bench: Bench) -> Where:
    return ByCrops(word, bench, "centre", seed=None)


def random(word: Word, bench: Bench) -> Where:
    return ByCrops(word, bench, f"random {bench.config.seed}", seed=bench.config.seed)


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


def everything(word: Word, bench: Bench) -> Where:
    return Everywhere(word, bench, "everything")


KINDS: dict[str, Callable[[Word, Bench], Where]] = {
    "attention": attention,
    "relevance": relevance,
    "parts": parts,
    "masks": given,
    "found": salient,
    "tokencut": salient,
    "u2net": salient,
    "centre": centre,
    "random": random,
    "everything": everything,
}


def learnt_elsewhere(what: str, model: Model, bench: Bench) -> str:
    """A note, where a run was trained on other data than these."""
    data = model.run.facts["data"]
    return "" if data["fingerprint"] == bench.data else f"{what} learnt on other data, {data['name']}"


def fitting(ways: list[Way], size: tuple[int, int]) -> list[Way]:
    for way in ways:
        check_crowds(Crops(way.sides or ("1",)), size)
    return ways


def module_print(module: nn.Module) -> str:
    return short_print(f"{module!r} {weights_sha256(module)}")


def count(module: nn.Module) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if not name.split("vit.")[-1].startswith(HEAD))
