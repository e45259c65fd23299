"""A² on birds: the rows of each dataset, with @NAME for a backbone; `A2 X>Y` crops where X attends, Y embeds the crops.

Rows come in two stages. The first has everything that needs no selection, and every block and head that a backbone can
attend with; its validation accuracy selects the look of the second stage.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rows import SEEDS, Row
from sightline.errors import UserError

SETS = {
    "birds": "waterbirds", "o2o": "scenes-o2o", "m2m": "scenes-m2m", "disjoint": "scenes-disjoint",
    "displaced": "displaced", "turned": "", "toy": "", "family": "",
}  # fmt: skip
CROP = "2/7"  # 64 of 224 pixels, as in the paper
COUNTS = (2, 3, 4)
CROP_SIZES = ("1/7", "3/7", "4/7", "2/7+1/7")
MASSES = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4)  # of a shifted true mask: the share that still lies on the object
OTHER_BLOCKS = (-2, -3, -4)
AGGREGATES = ("mean", "entropy", "lowest", "max")
ADAPTER_STEPS = 1000
RULE = (
    "highest class-balanced accuracy on validation data, without group labels or masks, the backbone that looks also "
    "answering; the first where they tie, which is the last block with the mean of its heads"
)
FAMILY_SIZES = ("nano", "ti", "s", "b")
Lines = dict[str, str]


@dataclass(frozen=True)
class Look:
    """The block and the heads whose attention is taken."""

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
        """The plain look comes first."""
        last = [Look(heads=heads) for heads in (*AGGREGATES, *map(str, range(self.heads)))]
        return last + [Look(layer) for layer in OTHER_BLOCKS if -layer <= self.depth]


# ---- lines -----------------------------------------------------------------------------------------------------------


def without_attention(backbone: Backbone) -> Lines:
    """Whole images at two sizes, crops that do not look, several scales and DFR."""
    what, larger = backbone.name, f"--size {2 * backbone.side}"
    lines = {
        f"centre, {what}": "centre-crop --crop-size 4/7",
        f"centre 2/7, {what}": f"centre-crop --crop-size {CROP}",
        f"random, {what}": f"random-crop --crop-size {CROP}",
        f"full at twice the size, {what}": f"probe {larger}",
        f"full at twice the size, {what}, plain": f"probe --untuned {larger}",
        f"S2, {what}": "s2",
        f"DFR val, {what}": "dfr --fit-on val",
        f"DFR train, {what}": "dfr --fit-on train",
    }
    return {name: f"{line} --backbone @{what}" for name, line in lines.items()}


def full(what: str) -> Lines:
    return {f"full, {what}": f"probe --backbone @{what}", f"full, {what}, plain": f"probe --untuned --backbone @{what}"}


def a2(
    where: str, what: str, look: Look, how: str = "", *, method: str = "a2", crop: str = CROP, flags: str = ""
) -> Lines:
    """`how` names the change from the default; without it, the look is the selected one."""
    name = f"A2 {where}>{what}{f', {how}' * bool(how)}"
    return {
        name: f"{method} --where @{where} {look.flags} --crop-size {crop}{f' {flags}' * bool(flags)} --backbone @{what}"
    }


def with_selected_look(where: str, what: str, look: Look, *, more: bool) -> Lines:
    lines = a2(where, what, look)
    if more:
        lines |= a2(where, what, look, "plain", flags="--untuned")
        for kind in ("val", "train"):
            lines |= a2(where, what, look, f"DFR {kind}", method="a2-dfr", flags=f"--fit-on {kind}")
    return lines


def counts_and_sizes(where: str, what: str, look: Look, *, sizes: bool) -> Lines:
    lines = joined(a2(where, what, look, f"{count} crops", flags=f"--crop-count {count}") for count in COUNTS)
    if sizes:
        lines |= {f"oracle {mass:g}, {what}": f"oracle --mass {mass:g} --crop-size {CROP} --backbone @{what}"
                  for mass in MASSES}  # fmt: skip
        lines |= joined(a2(where, what, look, f"crops {crop}", crop=crop) for crop in CROP_SIZES)
    return lines


def joined(parts: Iterable[Lines]) -> Lines:
    return {name: line for part in parts for name, line in part.items()}


def adapter(kind: str, name: str, look: Look, how: str, *, trained: bool, untrained: bool) -> list[Row]:
    line = f"a2-adapter --where @{name} {look.flags} --steps STEPS --backbone @{name}"
    rows = [Row(kind, f"adapter {name}, {how}, untrained", line.replace("STEPS", "0"))] if untrained else []
    steps = line.replace("STEPS", str(ADAPTER_STEPS))
    return rows + [Row(kind, f"adapter {name}, {how}", steps, seed) for seed in SEEDS if trained]


# ---- rows by dataset -------------------------------------------------------------------------------------------------


def first_rows(kind: str, backbones: Sequence[Backbone]) -> list[Row]:
    names = [backbone.name for backbone in backbones]
    if kind == "turned":
        head = names[0]
        rows = adapter(kind, head, PLAIN_LOOK, "plain rule", trained=False, untrained=True)
        return [*rows, *rows_of(kind, full(head) | a2(head, head, PLAIN_LOOK, PLAIN_LOOK.words))]
    lines = joined(map(full, names))
    if kind != "toy":
        lines |= joined(map(without_attention, backbones))
    lines |= joined(a2(where, what, PLAIN_LOOK, PLAIN_LOOK.words) for where in names for what in names)
    lines |= joined(a2(one.name, one.name, look, look.words) for one in backbones for look in one.looks)
    rows = rows_of(kind, lines)
    if kind == "birds":
        rows += [Row(kind, f"attention {name}", f"attention --backbone @{name}") for name in names]
        rows += [Row(kind, "distances", "distances")]
    return rows


def second_rows(
    kind: str, backbones: Sequence[Backbone], looks: Mapping[str, Look], birds: Look | None = None
) -> list[Row]:
    """`looks`: the selected look of each backbone; `birds`: of the first one, on birds, for the task turned round."""
    names = [backbone.name for backbone in backbones]
    head = names[0]
    if kind == "turned":
        rows = adapter(kind, head, PLAIN_LOOK, "plain rule", trained=True, untrained=False)
        return rows + (adapter(kind, head, birds, "look at birds", trained=True, untrained=True) if birds else [])
    pairs = [(where, what) for where in names for what in names]
    lines = joined(with_selected_look(*pair, looks[pair[0]], more=kind != "toy") for pair in pairs)
    if kind != "toy":
        lines |= joined(counts_and_sizes(head, what, looks[head], sizes=kind == "birds") for what in names)
    return rows_of(kind, lines)


def rows_of(kind: str, lines: Lines) -> list[Row]:
    return [
        Row(kind, name, line, measures=("displaced",) if kind == "birds" and is_compared_off_centre(name) else ())
        for name, line in lines.items()
    ]


def is_compared_off_centre(name: str) -> bool:
    """Rows that are one per backbone or one per pair: whole images, crops that do not look, and A²."""
    kind, _, rest = name.partition(", ")
    if kind.startswith("A2 "):
        return not rest
    return kind in ("full", "centre", "centre 2/7", "random") and "," not in rest


def turned_round(data: Path, out: Path) -> Path:
    """The same images with the background as label, in groups of bird and background."""
    file = data / "rows.csv" if data.is_dir() else data
    out.mkdir(parents=True, exist_ok=True)
    with (
        file.open(newline="", encoding="utf-8") as before,
        (out / "rows.csv").open("w", newline="", encoding="utf-8") as after,
    ):
        writer = csv.writer(after, lineterminator="\n")
        writer.writerow(["image", "label", "split", "group_bird", "mask"])
        for line in csv.DictReader(before):
            image, mask = (os.path.relpath(file.parent / line[name], out) for name in ("image", "mask"))
            writer.writerow([image, line["group_place"], line["split"], line["label"], mask])
    return out


# ---- sizes that were pretrained alike --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Files in a folder of `pretrain.py family --keep-every 3 --runs FOLDER`, smallest size first."""

    final: list[tuple[str, str]] = field(default_factory=list)  # size, file
    kept: list[tuple[str, int, str]] = field(default_factory=list)  # size, epoch, file
    supervised: list[tuple[str, str]] = field(default_factory=list)  # size, run folder

    @property
    def sizes(self) -> list[str]:
        return [size for size, _ in self.final]

    @property
    def files(self) -> dict[str, str]:
        """By name in a row."""
        files = dict(self.final) | {f"{size}@{epoch}": file for size, epoch, file in self.kept}
        return files | {f"supervised_{size}": file for size, file in self.supervised}

    @classmethod
    def in_folder(cls, folder: Path | None) -> Family:
        if folder is None:
            return cls()
        sizes = [size for size in FAMILY_SIZES if (folder / size / "backbone.safetensors").exists()]
        if not sizes:
            raise UserError(f"{folder}: no backbones; run `pretrain.py family --keep-every 3 --runs {folder}`")
        kept = [
            (size, int(file.stem.removeprefix("backbone-")), str(file))
            for size in sizes
            for file in (folder / size).glob("backbone-*.safetensors")
        ]
        return cls(
            [(size, str(folder / size / "backbone.safetensors")) for size in sizes],
            sorted(kept, key=lambda one: (FAMILY_SIZES.index(one[0]), one[1])),
            [(size, str(run)) for size in sizes if ((run := folder / f"erm-{size}") / "metrics.json").exists()],
        )

    def rows(self) -> list[Row]:
        """Where each of them attends."""
        return [
            Row("family", f"attention {name.replace('_', ' ')}", f"attention --neighbours --backbone @{name}")
            for name in self.files
        ]
