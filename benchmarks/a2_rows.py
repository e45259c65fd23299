"""The rows of the A² tables: name -> arguments of `sightline train`, with @NAME for a backbone.

Rows come in two goes: the first has everything that needs no choice, and every way for a backbone to look; what it says
on validation data chooses the look that the second go takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import lanes

CROP = "2/7"  # 64 of 224 pixels, as in the paper
COUNTS = (2, 3, 4)
SIZES = ("1/7", "3/7", "4/7", "2/7+1/7")
MASSES = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4)  # of a true mask that was moved: how much of it still lies on the bird
OTHER_BLOCKS = (-2, -3, -4)
AGGREGATES = ("mean", "entropy", "lowest", "max")
ADAPTER_SEEDS = (0, 1, 2)
STEPS = 1000  # of the adapter
RULE = (
    "highest class-balanced accuracy on validation data, without group labels or masks, the backbone that looks also "
    "answering; the first where they tie, which is the last block with the mean of its heads"
)


@dataclass(frozen=True)
class Look:
    layer: int = -1
    heads: str = "mean"

    @property
    def words(self) -> str:
        return f"block {self.layer}, {f'head {self.heads}' if self.heads.isdecimal() else self.heads}"

    @property
    def flags(self) -> str:
        return f"--layer {self.layer} --heads {self.heads}"


PLAIN_LOOK = Look()


@dataclass(frozen=True)
class Backbone:
    name: str
    file: str
    heads: int
    depth: int
    side: int

    @property
    def looks(self) -> list[Look]:
        """The plain rule comes first."""
        last = [Look(heads=heads) for heads in (*AGGREGATES, *map(str, range(self.heads)))]
        return last + [Look(layer) for layer in OTHER_BLOCKS if -layer <= self.depth]


@dataclass(frozen=True)
class Row(lanes.Row):
    moved: bool = False  # answer the set with displaced birds, too


Lines = dict[str, str]


def full(what: str) -> Lines:
    return {f"full, {what}": f"probe --backbone @{what}", f"full, {what}, plain": f"probe --plain --backbone @{what}"}


def larger(backbone: Backbone) -> Lines:
    side, what = 2 * backbone.side, backbone.name
    return {
        f"full at twice the size, {what}": f"probe --size {side} --backbone @{what}",
        f"full at twice the size, {what}, plain": f"probe --plain --size {side} --backbone @{what}",
    }


def crops_without_attention(what: str) -> Lines:
    return {
        f"centre, {what}": f"centre-crop --crop 4/7 --backbone @{what}",
        f"centre 2/7, {what}": f"centre-crop --crop {CROP} --backbone @{what}",
        f"random, {what}": f"random-crop --crop {CROP} --backbone @{what}",
    }


def scales(what: str) -> Lines:
    return {f"S2, {what}": f"s2 --backbone @{what}"}


def dfr(what: str) -> Lines:
    return {f"DFR {kind}, {what}": f"dfr --kind {kind} --backbone @{what}" for kind in ("val", "train")}


def a2(
    where: str, what: str, look: Look, how: str = "", *, method: str = "a2", crop: str = CROP, flags: str = ""
) -> Lines:
    """`how` names what is other than usual; without it, the look is the chosen one."""
    name = f"A2 {where}>{what}{f', {how}' * bool(how)}"
    return {name: f"{method} --where @{where} {look.flags} --crop {crop}{f' {flags}' * bool(flags)} --backbone @{what}"}


def looks(backbone: Backbone) -> Lines:
    return joined(a2(backbone.name, backbone.name, look, look.words) for look in backbone.looks)


def plain_rule(pairs: Iterable[tuple[str, str]]) -> Lines:
    return joined(a2(*pair, PLAIN_LOOK, PLAIN_LOOK.words) for pair in pairs)


def chosen(pairs: Iterable[tuple[str, str]], by: Mapping[str, Look]) -> Lines:
    return joined(a2(where, what, by[where]) for where, what in pairs)


def chosen_otherwise(where: str, what: str, look: Look) -> Lines:
    return a2(where, what, look, "plain", flags="--plain") | joined(
        a2(where, what, look, f"DFR {kind}", method="a2-dfr", flags=f"--kind {kind}") for kind in ("val", "train")
    )


def counts(where: str, what: str, look: Look) -> Lines:
    return joined(a2(where, what, look, f"{count} crops", flags=f"--crops {count}") for count in COUNTS)


def sizes(where: str, what: str, look: Look) -> Lines:
    return joined(a2(where, what, look, f"crops {crop}", crop=crop) for crop in SIZES)


def oracle(what: str) -> Lines:
    return {f"oracle {mass:g}, {what}": f"oracle --mass {mass:g} --crop {CROP} --backbone @{what}" for mass in MASSES}


def adapter(name: str, look: Look, how: str, seeds: Sequence[int] = ADAPTER_SEEDS) -> list[tuple[str, str, int]]:
    """Untrained, to compare with, and with several seeds."""
    line = f"a2-adapter --where @{name} {look.flags} --steps STEPS --backbone @{name}"
    found = [(f"adapter {name}, {how}, untrained", line.replace("STEPS", "0"), 0)]
    return found + [(f"adapter {name}, {how}", line.replace("STEPS", str(STEPS)), seed) for seed in seeds]


def joined(parts: Iterable[Lines]) -> Lines:
    return {name: line for part in parts for name, line in part.items()}


# ---- what each set has -----------------------------------------------------------------------------------------------


def every_pair(backbones: Sequence[Backbone]) -> list[tuple[str, str]]:
    return [(where.name, what.name) for where in backbones for what in backbones]


def first_go(kind: str, backbones: Sequence[Backbone]) -> list[Row]:
    names, pairs, lines = [b.name for b in backbones], every_pair(backbones), {}
    if kind == "turned":
        head = names[0]
        rows = [Row(kind, *one) for one in adapter(head, PLAIN_LOOK, "plain rule", ())]
        lines = full(head) | a2(head, head, PLAIN_LOOK, PLAIN_LOOK.words)
        return [*rows, *rows_of(kind, lines)]
    lines |= joined(map(full, names))
    if kind != "toy":
        lines |= joined(map(crops_without_attention, names))
        lines |= joined(map(larger, backbones)) | joined(map(scales, names)) | joined(map(dfr, names))
    lines |= plain_rule(pairs) | joined(map(looks, backbones))
    rows = rows_of(kind, lines)
    if kind == "birds":
        rows += [Row(kind, f"attention {name}", f"attention --backbone @{name}") for name in names]
        rows += [Row(kind, "distances", "distances")]
    return rows


def second_go(kind: str, backbones: Sequence[Backbone], by: Mapping[str, Look], birds: Look | None = None) -> list[Row]:
    """`by` says how each backbone looks; `birds`, for the task turned round, how it looks at birds."""
    names, pairs = [b.name for b in backbones], every_pair(backbones)
    head = names[0]
    if kind == "turned":
        rows = [Row(kind, *one) for one in adapter(head, PLAIN_LOOK, "plain rule")[1:]]
        return rows + ([Row(kind, *one) for one in adapter(head, birds, "look at birds")] if birds else [])
    lines = chosen(pairs, by)
    if kind != "toy":
        lines |= joined(chosen_otherwise(where, what, by[where]) for where, what in pairs)
        lines |= joined(counts(head, what, by[head]) for what in names)
    if kind == "birds":
        lines |= joined(map(oracle, names)) | joined(sizes(head, what, by[head]) for what in names)
    return rows_of(kind, lines)


def rows_of(kind: str, lines: Lines) -> list[Row]:
    return [
        Row(kind, name, line, moved=kind == "birds" and is_compared_off_centre(name)) for name, line in lines.items()
    ]


def is_compared_off_centre(name: str) -> bool:
    """Of the rows that are one per backbone, or one per pair: whole pictures, crops that do not look, and A²."""
    kind, _, rest = name.partition(", ")
    if kind.startswith("A2 "):
        return not rest
    return kind in ("full", "centre", "centre 2/7", "random") and "," not in rest
