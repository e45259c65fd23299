"""The rows of the relevance tables: name -> arguments of `sightline train`, and what is measured of each run.

In a line, @ERM stands for the run of that row with the same seed, TI and SELF for backbones, RATE for the learning rate
that validation data chose.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import lanes

SEEN = 5600  # pictures, with repetitions, that everything with few masks learns from: as many however few there are
MOST_EPOCHS, LEAST_EPOCHS = 150, 6
RATES = {"robustvit": ("1.2e-5", "5e-5", "2e-4"), "rrr": ("1e-5", "5e-5"), "gradmask": ("1e-5", "5e-5")}
COST = 0.02  # how much class-balanced validation accuracy a rate may cost
RULE = (
    "the rate with the lowest RobustViT loss on validation pictures with masks, of those that cost at most 2 points of "
    "class-balanced validation accuracy against ERM (if all cost more, the smallest); of RRR and GradMask the rate "
    "with the highest class-balanced validation accuracy, and of equal ones the smaller; with seed 0 and the masks of "
    "the headline row, set by set"
)
CURVES, MASKS = ("curves", "masks", "neighbours"), ("masks", "neighbours")
ALONE = ("curves",)  # of ImageNet's photographs: one of each class, so that no neighbour is of its class; without masks
HEADLINES = ("RobustViT", "RRR", "GradMask", "MaskTune")
SELF_SUPERVISED = ", S"  # ends the names of rows that begin with the self-supervised ViT-S
STARTS = {"birds": ("", SELF_SUPERVISED), "cub": ("", SELF_SUPERVISED), "si": ("",), "imagenet": ("",)}
SEEDS_OF = {"birds": (0, 1, 2), "cub": (0, 1), "si": (0,), "imagenet": (0, 1)}


@dataclass(frozen=True)
class Masks:
    """How many pictures with a mask are learnt from."""

    per_class: int
    classes: int  # that the data have
    of: int | None = None  # classes that are learnt from

    @property
    def epochs(self) -> int:
        pictures = self.per_class * (self.of or self.classes)
        return min(MOST_EPOCHS, max(LEAST_EPOCHS, round(SEEN / pictures)))

    @property
    def flags(self) -> str:
        return f"--per-class {self.per_class}" + (f" --classes {self.of}" if self.of else "")

    @property
    def words(self) -> str:
        return f"{self.per_class} masks" + (f" of {self.of} classes" if self.of else "")


@dataclass(frozen=True)
class Row(lanes.Row):
    tests: tuple[str, ...] = MASKS


# One thing other than published, each.
ABLATIONS = {
    "rollout": "--relevance rollout",
    "attention": "--relevance attention",
    "no background": "--background 0",
    "no foreground": "--foreground 0",
    "no answer": "--answering 0",
    "only background": "--foreground 0 --answering 0",
    "only foreground": "--background 0 --answering 0",
    "label": "--answer label",
    "second order": "--second-order",
}
ABLATED = {
    "birds": tuple(ABLATIONS),
    "cub": ("rollout", "attention", "no background", "no foreground", "only background", "only foreground", "label"),
}
HEADLINE = {
    "birds": Masks(30, 2),
    "cub": Masks(3, 200, 100),
    "si": Masks(30, 4),
}
BIRDS_COUNTS = tuple(Masks(count, 2) for count in (3, 30, 300))
CUB_COUNTS = (
    Masks(1, 200, 100), Masks(3, 200, 50), Masks(3, 200, 100), Masks(3, 200), Masks(10, 200, 100), Masks(10, 200),
)  # fmt: skip
ERM = {
    "birds": "erm --epochs 14 --lr 5e-5 --backbone TI",
    "cub": "erm --epochs 30 --lr 1e-4 --batch 64 --backbone TI",
    "si": "erm --epochs 20 --lr 5e-5 --backbone TI",
}
BEFORE = "robustvit --lr 0 --epochs 1 --masks tokencut:SELF --backbone TI"  # the weights as they are, as a run
IMAGENET = "robustvit --epochs 25 --masks tokencut:SELF --backbone TI"


def robustvit(masks: Masks, how: str = "", start: str = "ERM", rate: str = "RATE") -> str:
    flags = f" {how}" if how else ""
    return f"robustvit --from '@{start}' {masks.flags} --epochs {masks.epochs} --lr {rate}{flags}"


def penalised(method: str, masks: Masks, rate: str = "RATE", start: str = "ERM") -> str:
    return f"{method} --from {shlex.quote(f'@{start}')} {masks.flags} --epochs {masks.epochs} --batch 8 --lr {rate}"


# ---- what each set has -----------------------------------------------------------------------------------------------


def beginnings(kind: str) -> list[Row]:
    """What the others go on with."""
    if kind == "imagenet":
        return [Row(kind, "before", BEFORE, tests=(*ALONE, "subsets"))]
    rows = each(kind, "ERM", ERM[kind], SEEDS_OF[kind], CURVES)
    if SELF_SUPERVISED in STARTS[kind]:
        rows += each(kind, f"ERM{SELF_SUPERVISED}", ERM[kind].replace("TI", "SELF"), (0,), CURVES)
    return rows


def rates(kind: str) -> list[Row]:
    """With seed 0, for validation data to choose from."""
    if kind == "imagenet":
        lines = {rate: f"{IMAGENET} --lr {rate}" for rate in RATES["robustvit"]}
        return [Row(kind, f"RobustViT, rate {rate}", line, tests=()) for rate, line in lines.items()]
    masks, rows = HEADLINE[kind], []
    for of in STARTS[kind]:
        start = f"ERM{of}"
        rows += [
            Row(kind, f"RobustViT, rate {rate}{of}", robustvit(masks, start=start, rate=rate))
            for rate in RATES["robustvit"]
        ]
        for method, name in (("rrr", "RRR"), ("gradmask", "GradMask")):
            rows += [
                Row(kind, f"{name}, rate {rate}{of}", penalised(method, masks, rate, start)) for rate in RATES[method]
            ]
    return rows


def chosen(kind: str) -> list[Row]:
    """With the rate that was chosen; the headline rows first, with several seeds."""
    if kind == "imagenet":
        return [
            *each(kind, "RobustViT", f"{IMAGENET} --lr RATE", SEEDS_OF[kind], ALONE),
            Row(kind, "RobustViT, attention", f"{IMAGENET} --lr RATE --relevance attention", tests=()),
            Row(kind, "RobustViT, label", f"{IMAGENET} --lr RATE --answer label", tests=()),
        ]
    masks, seeds = HEADLINE[kind], SEEDS_OF[kind] if kind == "birds" else (0,)
    rows = each(kind, "RobustViT", robustvit(masks), SEEDS_OF[kind], CURVES)
    rows += each(kind, "RRR", penalised("rrr", masks), seeds)
    rows += each(kind, "GradMask", penalised("gradmask", masks), seeds)
    rows += each(kind, "MaskTune", "masktune --from @ERM", seeds)
    if kind == "si":
        return rows
    counts = BIRDS_COUNTS if kind == "birds" else CUB_COUNTS
    for count in (count for count in counts if count != masks):
        rows += each(kind, f"RobustViT, {count.words}", robustvit(count), seeds)
    rows.append(Row(kind, "RobustViT, TokenCut", robustvit(masks, "--masks tokencut:SELF")))
    rows += [Row(kind, f"RobustViT, {how}", robustvit(masks, ABLATIONS[how])) for how in ABLATED[kind]]
    return rows + from_self_supervised(kind, counts if kind == "birds" else (masks,))


def from_self_supervised(kind: str, counts: Sequence[Masks]) -> list[Row]:
    of, masks = SELF_SUPERVISED, HEADLINE[kind]
    start, rows = f"ERM{of}", []
    for count in counts:
        how = "" if count == masks else f", {count.words}"
        rows += each(kind, f"RobustViT{how}{of}", robustvit(count, start=start), (0,), CURVES if not how else MASKS)
    for method, name in (("rrr", "RRR"), ("gradmask", "GradMask")):
        rows += each(kind, f"{name}{of}", penalised(method, masks, start=start), (0,), CURVES)
    return rows + each(kind, f"MaskTune{of}", f"masktune --from {shlex.quote(f'@{start}')}", (0,), CURVES)


def same_as(row: Row) -> Row | None:
    """The run that a rate was chosen by, if it is this one: it need not be trained again."""
    tried = (other for other in rates(row.set) if (other.line, other.seed) == (row.line, row.seed))
    return next((other for other in tried if other.name != row.name), None)


def each(kind: str, name: str, line: str, seeds: Iterable[int], tests: tuple[str, ...] = MASKS) -> list[Row]:
    return [Row(kind, name, line, seed, tests) for seed in seeds]
