"""A²: a small ViT's attention chooses crops, a large frozen one embeds them, logistic regression answers.

Centre and random crops, its controls, differ only in where they look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..config import A2, CentreCrop, RandomCrop, Train
from ..errors import UserError
from ..sight import Look
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.features import kept_features
from ..what.probe import BoxProbe
from ..where.attention import AGGREGATES, Heads
from ..where.crops import CentreSight, CropSight, RandomSight, in_pixels
from .base import open_backbone, record_backbone, record_selector, recorded_selector
from .pair import Pair
from .probe import Fit, Fitted, fit_probe, keep_fitted, seen_at_once, set_head

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class Crops:
    """Where to look; the validation data may choose among several."""

    sides: tuple[str, ...]  # as they were said: shares of the picture's side, or pixels
    layer: int | None = None  # of the attention that chooses, where it does
    heads: Heads | None = None
    seed: int | None = None  # of chance, where that chooses

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(float(Fraction(side)) for side in self.sides)

    @property
    def words(self) -> str:
        attention = "" if self.layer is None else f", block {self.layer}, heads {self.heads}"
        return f"crops {'+'.join(self.sides)}{attention}"

    def first(self, count: int) -> Crops:
        return replace(self, sides=self.sides[:count])

    @property
    def export_graph(self) -> str:
        """Crops at random are drawn from a hash of each image, which no graph computes."""
        return "crops" if self.layer is not None or self.seed is None else ""

    def sight(self, vit: ViT | None) -> nn.Module:
        """What looks there; `vit` is the one that attends."""
        if vit is not None:
            assert self.layer is not None
            assert self.heads is not None
            return CropSight(vit, self.numbers, self.layer, self.heads)
        return CentreSight(self.numbers[0]) if self.seed is None else RandomSight(self.numbers, self.seed)


# ---- what is asked for -----------------------------------------------------------------------------------------------


def plans(config: CentreCrop) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Sides of as many crops as are ever wanted, and which numbers of them are."""
    found, asked = [], config.crops if isinstance(config, RandomCrop) else ()
    for plan in config.crop:
        sides = tuple(plan.split("+"))
        if not all(map(is_side, sides)):
            raise UserError(f"--crop {plan}: a side is a share of the picture's (0.5, 2/7) or pixels (64, or 64+32)")
        if len(sides) > 1 and not isinstance(config, RandomCrop):
            raise UserError(f"--crop {plan}: there is only one crop in the centre; give one side")
        if asked and min(asked) < 1:
            raise UserError(f"--crops {min(asked)}: must be at least 1")
        counts = asked or (len(sides),)
        endless = sides + max(counts) * sides[-1:]
        found.append((endless[: max(counts)], counts))
    return found


def is_side(text: str) -> bool:
    try:
        side = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return False
    return 0 < side <= 1 or (side > 1 and side.denominator == 1)


def heads_of(text: str, config: ViTConfig) -> Heads:
    if text in AGGREGATES:
        return cast(Heads, text)
    if text.isdecimal() and int(text) < config.heads:
        return int(text)
    raise UserError(f"--heads {text}: {', '.join(AGGREGATES)}, or the number of a head, 0 to {config.heads - 1}")


def check_layer(name: str, config: ViTConfig, layer: int) -> None:
    if not -config.depth <= layer < config.depth:
        raise UserError(f"--layer {layer}: {name} has {config.depth} blocks, 0 to {config.depth - 1}")


def crowded(crops: Crops, size: tuple[int, int]) -> str | None:
    """Why crops never fit into the picture. Where they merely may not, the one before is taken once more."""
    pixels = sorted(in_pixels(side, size) for side in crops.numbers)
    if pixels[-1] > min(size):
        return f"--crop {'+'.join(crops.sides)}: larger than the picture, {min(size)} pixels"
    if sum(pixels[-2:]) > max(size) and len(pixels) > 1:
        return f"--crop {'+'.join(crops.sides)}: two of {pixels[-2]} and {pixels[-1]} pixels would overlap"
    return None


def check_crowds(crops: Crops, size: tuple[int, int]) -> None:
    if complaint := crowded(crops, size):
        raise UserError(f"{complaint}; name smaller sides{', or fewer of them' if len(crops.sides) > 1 else ''}")


def those_that_fit(
    todo: list[tuple[Crops, tuple[int, ...]]], size: tuple[int, int]
) -> tuple[list[tuple[Crops, tuple[int, ...]]], list[str]]:
    """Of the crops and their numbers those that fit into the picture; and why others do not."""
    several = [crops.first(count) for crops, counts in todo for count in counts]
    complaints = {crops: complaint for crops in several if (complaint := crowded(crops, size))}
    found = [(crops, tuple(n for n in counts if crops.first(n) not in complaints)) for crops, counts in todo]
    found = [(crops.first(max(counts)), counts) for crops, counts in found if counts]
    if not found:
        check_crowds(several[0], size)
    return found, list(dict.fromkeys(complaints.values()))


# ---- making ----------------------------------------------------------------------------------------------------------


def make_centre_crop(config: CentreCrop, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make(config, [Crops(())], None, rows, run, accelerator)


def make_random_crop(config: RandomCrop, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make(config, [Crops((), seed=config.seed)], None, rows, run, accelerator)


def make_a2(
    config: A2, rows: Rows, run: Run, accelerator: Accelerator, fit: Fit = fit_probe
) -> tuple[nn.Module, Input]:
    name = config.where or config.backbone
    vit = load_backbone(name, classes=0, seed=config.seed)
    for layer in config.layer:
        check_layer(name, vit.config, layer)
    looks = [Crops((), layer, heads_of(heads, vit.config)) for layer in config.layer for heads in config.heads]
    return make(config, looks, vit, rows, run, accelerator, fit)


def make(
    config: CentreCrop, looks: list[Crops], where: ViT | None, rows: Rows, run: Run, accelerator: Accelerator,
    fit: Fit = fit_probe,
) -> tuple[nn.Module, Input]:  # fmt: skip
    """Every way of looking with every plan of crops; the one that scores best on validation data is kept."""
    vit, expects = open_backbone(config, 0)
    size = seen_at_once(vit, expects)
    todo = [(replace(look, sides=sides), counts) for look in looks for sides, counts in plans(config)]
    if not todo:
        raise UserError("--crop, --layer, --heads: name at least one of each")
    todo, left_out = those_that_fit(todo, expects.size)
    for why in left_out if accelerator.is_main_process else ():
        print(f"Left out: {why}.")
    best, tried = None, {}
    for crops, counts in todo:
        what = BoxProbe(vit, size, len(crops.sides))
        for count, fitted in fits(config, crops.sight(where), what, counts, expects, rows, run, accelerator, fit):
            tried[crops.first(count).words] = fitted.score
            if best is None or fitted.score > best[1].score:
                best = crops.first(count), fitted
    assert best is not None, "there is always a plan"
    crops, fitted = best
    what = BoxProbe(vit, size, len(crops.sides), len(rows.classes))
    set_head(cast(nn.Linear, what.head), fitted.linear)
    model = Pair(cast(Look, crops.sight(where)), what, export_graph=crops.export_graph).to(accelerator.device).eval()
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        record_selector(run, where)
        rule = f"highest {config.select} on {config.chooses_on}, the first where they tie"
        run.note(crops=asdict(crops) | {"size": list(size), "rule": rule})
        keep_fitted(run, model, fitted, config, {"crops": crops.words, "tried_crops": tried})
        if len(tried) > 1:
            found = f"{config.select} {fitted.score:.1%} on {config.chooses_on}"
            print(f"Looking by {crops.words}: {found}, the best of {len(tried)}.")
    return model, expects


def fits(
    config: CentreCrop, where: nn.Module, what: BoxProbe, counts: tuple[int, ...], expects: Input, rows: Rows, run: Run,
    accelerator: Accelerator, fit: Fit,
) -> Iterator[tuple[int, Fitted]]:  # fmt: skip
    """A logistic regression for each number of crops. Earlier crops do not depend on later ones, nor do features."""
    looking = cast(Look, where)
    features = {
        split: kept_features(
            lambda images: what.embed(images, looking.look(images)), [where, what], rows, rows.where(split), expects,
            accelerator, config.cache or run.folder / "features",
            decoded=config.cache, batch=config.batch, workers=config.workers,
        )
        for split in config.uses
    }  # fmt: skip
    width = what.vit.config.width
    for count in counts:
        yield count, fit(config, rows, {split: each[:, : count * width] for split, each in features.items()})


def build_a2(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    said = facts["crops"]
    crops = Crops(tuple(said["sides"]), said["layer"], said["heads"], said["seed"])
    what = BoxProbe(ViT(vit_config), tuple(said["size"]), len(crops.sides), len(facts["data"]["classes"]))
    return Pair(cast(Look, crops.sight(recorded_selector(facts))), what, export_graph=crops.export_graph)


build_centre_crop = build_random_crop = build_a2
