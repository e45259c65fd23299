"""A²: a small ViT's attention selects crops, a large frozen ViT embeds them, and logistic regression predicts.

Its controls, centre and random crops, differ only in where they look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..config import A2, CentreCrop, RandomCrop, Train
from ..errors import UserError
from ..sight import Look
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.features import cached_features
from ..what.probe import BoxProbe
from ..where.attention import AGGREGATES, Heads
from ..where.crops import CentreSight, CropSight, RandomSight, side_in_pixels, vit_input_size
from .base import open_backbone, record_backbone, record_selector, recorded_selector
from .pair import Pair
from .probe import Fit, FittedProbe, fit_probe, save_fitted, set_head

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class CropPlan:
    """One way to select crops; among several, the validation data decide."""

    sides: tuple[str, ...]  # as configured: fractions of the image's shorter side, or pixels
    layer: int | None = None  # block of the attention map, for attention crops
    heads: Heads | None = None
    seed: int | None = None  # for random crops

    @classmethod
    def recorded(cls, facts: dict[str, Any]) -> CropPlan:
        """As run.json has it."""
        return cls(tuple(facts["sides"]), facts["layer"], facts["heads"], facts["seed"])

    @property
    def side_values(self) -> tuple[float, ...]:
        return tuple(float(Fraction(side)) for side in self.sides)

    @property
    def description(self) -> str:
        attention = "" if self.layer is None else f", block {self.layer}, heads {self.heads}"
        return f"crops {'+'.join(self.sides)}{attention}"

    def first(self, count: int) -> CropPlan:
        """The same plan with the first `count` crops only."""
        return replace(self, sides=self.sides[:count])

    @property
    def export_graph(self) -> str:
        """Random crops depend on a hash of each image, which no graph computes."""
        return "crops" if self.layer is not None or self.seed is None else ""

    def selector(self, vit: ViT | None) -> nn.Module:
        """The selector of these crops; `vit` computes the attention."""
        if vit is not None:
            assert self.layer is not None
            assert self.heads is not None
            return CropSight(vit, self.side_values, self.layer, self.heads)
        return CentreSight(self.side_values[0]) if self.seed is None else RandomSight(self.side_values, self.seed)


PlanWithCounts = tuple[CropPlan, tuple[int, ...]]  # a plan with the most crops, and the numbers of crops to try


# ---- flags -----------------------------------------------------------------------------------------------------------


def parse_crop_sizes(config: CentreCrop) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """For each `--crop-size`: the sides of the largest number of crops, and the numbers of crops to try."""
    parsed, given = [], config.crop_count if isinstance(config, RandomCrop) else ()
    for text in config.crop_size:
        sides = tuple(text.split("+"))
        if not all(map(is_crop_side, sides)):
            raise UserError(
                f"--crop-size {text}: a side is a fraction of the image's (0.5, 2/7) or pixels (64, or 64+32)"
            )
        if len(sides) > 1 and not isinstance(config, RandomCrop):
            raise UserError(f"--crop-size {text}: there is only one centre crop; give one side")
        counts = given or (len(sides),)
        extended = sides + max(counts) * sides[-1:]
        parsed.append((extended[: max(counts)], counts))
    return parsed


def is_crop_side(text: str) -> bool:
    try:
        side = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return False
    return 0 < side <= 1 or (side > 1 and side.denominator == 1)


def parse_heads(text: str, config: ViTConfig) -> Heads:
    if text in AGGREGATES:
        return cast(Heads, text)
    if text.isdecimal() and int(text) < config.heads:
        return int(text)
    raise UserError(f"--heads {text}: {', '.join(AGGREGATES)}, or the number of a head, 0 to {config.heads - 1}")


def check_layer(name: str, config: ViTConfig, layer: int) -> None:
    if not -config.depth <= layer < config.depth:
        raise UserError(f"--layer {layer}: {name} has {config.depth} blocks, 0 to {config.depth - 1}")


def overlap_problem(plan: CropPlan, size: tuple[int, int]) -> str | None:
    """Why the crops can never fit into the image. Where they merely may not, the previous crop is repeated."""
    pixels, flag = (
        sorted(side_in_pixels(side, size) for side in plan.side_values),
        f"--crop-size {'+'.join(plan.sides)}",
    )
    if pixels[-1] > min(size):
        return f"{flag}: larger than the image, {min(size)} pixels"
    if sum(pixels[-2:]) > max(size) and len(pixels) > 1:
        return f"{flag}: two crops of {pixels[-2]} and {pixels[-1]} pixels would overlap"
    return None


def check_crops_fit(plan: CropPlan, size: tuple[int, int]) -> None:
    if problem := overlap_problem(plan, size):
        raise UserError(f"{problem}; give smaller sides{', or fewer of them' if len(plan.sides) > 1 else ''}")


def crops_that_fit(plans: Sequence[PlanWithCounts], size: tuple[int, int]) -> tuple[list[PlanWithCounts], list[str]]:
    """The plans and counts whose crops fit into the image, and why the others do not."""
    every = [plan.first(count) for plan, counts in plans for count in counts]
    problems = {plan: problem for plan in every if (problem := overlap_problem(plan, size))}
    fitting = [(plan, tuple(n for n in counts if plan.first(n) not in problems)) for plan, counts in plans]
    fitting = [(plan.first(max(counts)), counts) for plan, counts in fitting if counts]
    if not fitting:
        check_crops_fit(every[0], size)
    return fitting, list(dict.fromkeys(problems.values()))


# ---- making ----------------------------------------------------------------------------------------------------------


def make_centre_crop(config: CentreCrop, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make_crop_probe(config, [CropPlan(())], None, rows, run, accelerator)


def make_random_crop(config: RandomCrop, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    return make_crop_probe(config, [CropPlan((), seed=config.seed)], None, rows, run, accelerator)


def make_a2(
    config: A2, rows: Rows, run: Run, accelerator: Accelerator, fit: Fit = fit_probe
) -> tuple[nn.Module, Input]:
    name = config.where or config.backbone
    vit = load_backbone(name, classes=0, seed=config.seed)
    for layer in config.layer:
        check_layer(name, vit.config, layer)
    plans = [CropPlan((), layer, parse_heads(heads, vit.config)) for layer in config.layer for heads in config.heads]
    return make_crop_probe(config, plans, vit, rows, run, accelerator, fit)


def make_crop_probe(
    config: CentreCrop, plans: list[CropPlan], where: ViT | None, rows: Rows, run: Run, accelerator: Accelerator,
    fit: Fit = fit_probe,
) -> tuple[nn.Module, Input]:  # fmt: skip
    """Fits a probe for every plan with every `--crop-size` and keeps the one with the best validation score."""
    vit, expects = open_backbone(config, 0)
    size = vit_input_size(vit, expects.size)
    todo = [(replace(plan, sides=sides), counts) for plan in plans for sides, counts in parse_crop_sizes(config)]
    if not todo:
        raise UserError("--crop-size, --layer, --heads: give at least one of each")
    todo, skipped = crops_that_fit(todo, expects.size)
    for problem in skipped if accelerator.is_main_process else ():
        print(f"Skipped: {problem}.")
    best, tried = None, {}
    for plan, counts in todo:
        what = BoxProbe(vit, size, len(plan.sides))
        for count, fitted in fit_each_count(
            config, plan.selector(where), what, counts, expects, rows, run, accelerator, fit
        ):
            tried[plan.first(count).description] = fitted.score
            if best is None or fitted.score > best[1].score:
                best = plan.first(count), fitted
    assert best is not None, "there is always a plan"
    plan, fitted = best
    what = BoxProbe(vit, size, len(plan.sides), len(rows.classes))
    set_head(cast(nn.Linear, what.head), fitted.linear)
    model = Pair(cast(Look, plan.selector(where)), what, export_graph=plan.export_graph)
    model = model.to(accelerator.device).eval()
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        record_selector(run, where)
        rule = f"highest {config.select} on {config.chooses_on}, the first where they tie"
        run.note(crops=asdict(plan) | {"size": list(size), "rule": rule})
        save_fitted(run, model, fitted, config, {"crops": plan.description, "tried_crops": tried})
        if len(tried) > 1:
            result = f"{config.select} {fitted.score:.1%} on {config.chooses_on}"
            print(f"Selected {plan.description}: {result}, the best of {len(tried)}.")
    return model, expects


def fit_each_count(
    config: CentreCrop, where: nn.Module, what: BoxProbe, counts: tuple[int, ...], expects: Input, rows: Rows, run: Run,
    accelerator: Accelerator, fit: Fit,
) -> Iterator[tuple[int, FittedProbe]]:  # fmt: skip
    """A logistic regression for each number of crops. Greedy crops do not depend on later ones, nor do their
    features."""
    selector = cast(Look, where)
    features = {
        split: cached_features(
            lambda images: what.embed(images, selector.look(images)), [where, what], rows, rows.split_indices(split),
            expects, accelerator, config.cache or run.folder / "features",
            decoded=config.cache, batch=config.batch, workers=config.workers,
        )
        for split in config.uses
    }  # fmt: skip
    width = what.vit.config.width
    for count in counts:
        yield count, fit(config, rows, {split: values[:, : count * width] for split, values in features.items()})


def build_a2(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    plan, size = CropPlan.recorded(facts["crops"]), tuple(facts["crops"]["size"])
    what = BoxProbe(ViT(vit_config), size, len(plan.sides), len(facts["data"]["classes"]))
    return Pair(cast(Look, plan.selector(recorded_selector(facts))), what, export_graph=plan.export_graph)


build_centre_crop = build_random_crop = build_a2
