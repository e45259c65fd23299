"""RobustViT, RRR, GradMask and MaskTune: the rows of each dataset, and the datasets with few validation images.

In a line, @ERM is the run of that row with the same seed, and RATE the learning rate that validation data selected.
Of ImageNet there is one photograph per class: half of the classes train, with masks of TokenCut, the others test.
"""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rows import Row

SETS = {"birds": "waterbirds", "cub": "cub-swapped", "si": "si-score", "imagenet": ""}  # of `sightline data`
IMAGENET_TRAINS, IMAGENET_TESTS = 420, 500
SEEN = 5600  # images, with repetitions, of each training with few masks: the same however few there are
MOST_EPOCHS, LEAST_EPOCHS = 150, 6
RATES = {"robustvit": ("1.2e-5", "5e-5", "2e-4"), "rrr": ("1e-5", "5e-5"), "gradmask": ("1e-5", "5e-5")}
COST = 0.02  # class-balanced validation accuracy that a learning rate may lose
RULE = (
    "the rate with the lowest RobustViT loss on validation pictures with masks, of those that cost at most 2 points of "
    "class-balanced validation accuracy against ERM (if all cost more, the smallest); of RRR and GradMask the rate "
    "with the highest class-balanced validation accuracy, and of equal ones the smaller; with seed 0 and the masks of "
    "the headline row, set by set"
)
CURVES, MASKS = ("curves", "masks", "neighbours"), ("masks", "neighbours")
ALONE = ("curves",)  # ImageNet: one photograph per class has no neighbour of its class, and no mask
PENALISED = {"rrr": "RRR", "gradmask": "GradMask"}
HEADLINES = ("RobustViT", "RRR", "GradMask", "MaskTune")
SELF_SUPERVISED = ", S"  # ends the names of rows that start from the self-supervised ViT-S
STARTS = {"birds": ("", SELF_SUPERVISED), "cub": ("", SELF_SUPERVISED), "si": ("",), "imagenet": ("",)}
SEEDS_OF = {"birds": (0, 1, 2), "cub": (0, 1), "si": (0,), "imagenet": (0, 1)}


@dataclass(frozen=True)
class Masks:
    """How many images have a mask to train with."""

    per_class: int
    classes: int  # of the dataset
    of: int | None = None  # classes with masks

    @property
    def epochs(self) -> int:
        images = self.per_class * (self.of or self.classes)
        return min(MOST_EPOCHS, max(LEAST_EPOCHS, round(SEEN / images)))

    @property
    def flags(self) -> str:
        return f"--masks-per-class {self.per_class}" + (f" --mask-classes {self.of}" if self.of else "")

    @property
    def words(self) -> str:
        return f"{self.per_class} masks" + (f" of {self.of} classes" if self.of else "")


# One option changed from the published recipe, each.
ABLATIONS = {
    "rollout": "--relevance rollout",
    "attention": "--relevance attention",
    "no background": "--background-weight 0",
    "no foreground": "--foreground-weight 0",
    "no classification loss": "--classification-weight 0",
    "only background": "--foreground-weight 0 --classification-weight 0",
    "only foreground": "--background-weight 0 --classification-weight 0",
    "label": "--classification-target label",
    "second order": "--double-backward",
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
BEFORE = "robustvit --lr 0 --epochs 1 --masks tokencut:SELF --backbone TI"  # the pretrained weights, as a run
IMAGENET = "robustvit --epochs 25 --masks tokencut:SELF --backbone TI"


def robustvit(masks: Masks, how: str = "", start: str = "ERM", rate: str = "RATE") -> str:
    flags = f" {how}" if how else ""
    return f"robustvit --init-from '@{start}' {masks.flags} --epochs {masks.epochs} --lr {rate}{flags}"


def penalised(method: str, masks: Masks, rate: str = "RATE", start: str = "ERM") -> str:
    return (
        f"{method} --init-from {shlex.quote(f'@{start}')} {masks.flags} --epochs {masks.epochs} --batch 8 --lr {rate}"
    )


# ---- rows by dataset -------------------------------------------------------------------------------------------------


def rows_with(
    kind: str, name: str, line: str, seeds: Iterable[int] = (0,), measures: tuple[str, ...] = MASKS
) -> list[Row]:
    """All methods but ERM validate on few images."""
    file = "" if line.startswith("erm ") else "few.csv"
    return [Row(kind, name, line, seed, measures, file=file) for seed in seeds]


def starting_rows(kind: str) -> list[Row]:
    """The runs that the others fine-tune."""
    if kind == "imagenet":
        return rows_with(kind, "before", BEFORE, measures=(*ALONE, "subsets"))
    rows = rows_with(kind, "ERM", ERM[kind], SEEDS_OF[kind], CURVES)
    if SELF_SUPERVISED in STARTS[kind]:
        rows += rows_with(kind, f"ERM{SELF_SUPERVISED}", ERM[kind].replace("TI", "SELF"), measures=CURVES)
    return rows


def rate_rows(kind: str) -> list[Row]:
    """Candidates of the learning rate, with seed 0."""
    rows = []
    if kind == "imagenet":
        for rate in RATES["robustvit"]:
            rows += rows_with(kind, f"RobustViT, rate {rate}", f"{IMAGENET} --lr {rate}", measures=())
        return rows
    for of in STARTS[kind]:
        masks, start = HEADLINE[kind], f"ERM{of}"
        for rate in RATES["robustvit"]:
            rows += rows_with(kind, f"RobustViT, rate {rate}{of}", robustvit(masks, start=start, rate=rate))
        for method, name in PENALISED.items():
            for rate in RATES[method]:
                rows += rows_with(kind, f"{name}, rate {rate}{of}", penalised(method, masks, rate, start))
    return rows


def selected_rows(kind: str) -> list[Row]:
    """With the selected learning rate; the headline rows first, with several seeds."""
    if kind == "imagenet":
        line = f"{IMAGENET} --lr RATE"
        return [
            *rows_with(kind, "RobustViT", line, SEEDS_OF[kind], ALONE),
            *rows_with(kind, "RobustViT, attention", f"{line} --relevance attention", measures=()),
            *rows_with(kind, "RobustViT, label", f"{line} --classification-target label", measures=()),
        ]
    masks, seeds = HEADLINE[kind], SEEDS_OF[kind] if kind == "birds" else (0,)
    rows = rows_with(kind, "RobustViT", robustvit(masks), SEEDS_OF[kind], CURVES)
    for method, name in PENALISED.items():
        rows += rows_with(kind, name, penalised(method, masks), seeds)
    rows += rows_with(kind, "MaskTune", "masktune --init-from @ERM", seeds)
    if kind == "si":
        return rows
    counts = BIRDS_COUNTS if kind == "birds" else CUB_COUNTS
    for count in (count for count in counts if count != masks):
        rows += rows_with(kind, f"RobustViT, {count.words}", robustvit(count), seeds)
    rows += rows_with(kind, "RobustViT, TokenCut", robustvit(masks, "--masks tokencut:SELF"))
    for how in ABLATED[kind]:
        rows += rows_with(kind, f"RobustViT, {how}", robustvit(masks, ABLATIONS[how]))
    return rows + from_self_supervised(kind, counts if kind == "birds" else (masks,))


def from_self_supervised(kind: str, counts: Sequence[Masks]) -> list[Row]:
    of, masks = SELF_SUPERVISED, HEADLINE[kind]
    start, rows = f"ERM{of}", []
    for count in counts:
        how = "" if count == masks else f", {count.words}"
        rows += rows_with(kind, f"RobustViT{how}{of}", robustvit(count, start=start), measures=MASKS if how else CURVES)
    for method, name in PENALISED.items():
        rows += rows_with(kind, f"{name}{of}", penalised(method, masks, start=start), measures=CURVES)
    line = f"masktune --init-from {shlex.quote(f'@{start}')}"
    return rows + rows_with(kind, f"MaskTune{of}", line, measures=CURVES)


def same_as(row: Row) -> Row | None:
    """The candidate of the learning rate that is this very run: it need not be trained again."""
    tried = (other for other in rate_rows(row.set) if (other.line, other.seed) == (row.line, row.seed))
    return next((other for other in tried if other.name != row.name), None)


# ---- datasets -------------------------------------------------------------------------------------------------------


def write_datasets(source: Path, home: Path, kind: str, val: int) -> Path:
    """The folder with rows.csv, and with few.csv, which has so many validation images."""
    lines = imagenet_lines(source, home) if kind == "imagenet" else lines_of(source, home)
    write_lines(home / "rows.csv", lines)
    write_lines(home / "few.csv", lines if kind == "imagenet" else few_to_validate(lines, val))
    return home


def lines_of(source: Path, home: Path) -> list[dict[str, str]]:
    """The rows of a dataset, with paths relative to `home`, so that both files name images alike."""
    file = source / "rows.csv" if source.is_dir() else source
    with file.open(newline="", encoding="utf-8") as opened:
        lines = list(csv.DictReader(opened))
    kept = [k for k in lines[0] if k in ("image", "label", "split", "mask") or k.startswith("group")]
    return [
        {k: relative_to(file.parent / line[k], home) if k in ("image", "mask") else line[k] for k in kept}
        for line in lines
    ]


def imagenet_lines(source: Path, home: Path) -> list[dict[str, str]]:
    """Classes are named by wnid, which sort as the outputs of the head; the half that trains is drawn once."""
    with (source / "samples.csv").open(newline="", encoding="utf-8") as opened:
        lines = list(csv.DictReader(opened))
    order, split = np.random.default_rng(0).permutation(len(lines)), {}
    tests = IMAGENET_TESTS if len(lines) > IMAGENET_TESTS + IMAGENET_TRAINS else len(lines) // 2
    trains = IMAGENET_TRAINS if len(lines) > tests + IMAGENET_TRAINS else len(lines) // 4
    for rank, i in enumerate(order):
        split[i] = "test" if rank < tests else "train" if rank < tests + trains else "val"
    return [
        {"image": relative_to(source / line["path"], home), "label": line["wnid"], "split": split[i]}
        for i, line in enumerate(lines)
    ]


def relative_to(path: Path, home: Path) -> str:
    return Path(os.path.relpath(path.resolve(), home.resolve())).as_posix()


def few_to_validate(lines: Sequence[dict[str, str]], count: int) -> list[dict[str, str]]:
    """With so many validation images, the classes in turn; the other splits are unchanged."""
    generator = np.random.default_rng(0)
    val = [i for i in generator.permutation(len(lines)).tolist() if lines[i]["split"] == "val"]
    turns: dict[str, int] = {}
    turn = {}
    for i in val:
        turn[i] = turns[lines[i]["label"]] = turns.get(lines[i]["label"], -1) + 1
    kept = set(sorted(val, key=lambda i: turn[i])[:count])
    return [line for i, line in enumerate(lines) if line["split"] != "val" or i in kept]


def write_lines(path: Path, lines: Sequence[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if not path.exists() or path.read_text(encoding="utf-8") != text.getvalue():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.getvalue(), encoding="utf-8")
