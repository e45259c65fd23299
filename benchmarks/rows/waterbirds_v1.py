"""Waterbirds v1.0, the published images: every method with the same augmentation, image size and number of epochs.

Ten epochs each, fewer than the papers', so that all methods fit into an hour of a GPU. A method that starts from
another one's weights (`@ERM`), or trains a first model, trains for ten epochs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rows import Row

SETS = {
    "birds": "Waterbirds v1.0 (benchmarks/packs.py)",
    "wbr": "Waterbirds rebuilt (sightline data waterbirds)",
    "o2o": "a scene for each class, swapped in the test set (sightline data scenes-o2o)",
    "cubwb": "photographs of CUB: landbird or waterbird",
    "cub200": "photographs of CUB: 200 species",
}

BRIEF = "--epochs 10 --lr 5e-5"
BY_GROUPS = f"{BRIEF} --select worst-group"
RECIPE = "--epochs 10 --lr 3e-5 --batch 64 --ema 0.999 --balance logit-adjustment --head-lr-factor 1000"  # iFAM's here
PAPERS = "--epochs 10 --sight patches --batch 128 --balance none --ema None"  # iFAM as in the papers
EXACT = "--sight pixels --patch-threshold 0.1"
TUNED = "--init-from @ERM --epochs 10 --batch 128"

# Hyperparameters of rivals, chosen by worst-group accuracy on the validation data with the first seed.
GRIDS: dict[str, dict[str, str]] = {
    "GroupDRO": {f"adjusted {c}": f"groupdro {BRIEF} --adjustment {c}" for c in (0, 2)},
    "JTT": {f"{copies} copies": f"jtt {BY_GROUPS} --upweight {copies}" for copies in (5, 20)},
    "CVaR": {f"worst {part}": f"cvar {BY_GROUPS} --worst-fraction {part}" for part in (0.1, 0.2)},
    "IRM": {f"penalty {weight}": f"irm {BY_GROUPS} --penalty {weight}" for weight in (1, 100)},
    "CORAL": {f"penalty {weight}": f"coral {BY_GROUPS} --penalty {weight}" for weight in (0.1, 1)},
}

# With three seeds, unless something else is said.
HEADLINE: dict[str, str] = {
    "ERM": f"erm {BRIEF}",
    **{f"iFAM K={k}": f"ifam --parts {k} --epochs 10" for k in (1, 2, 4, 8)},
    "ERM, our recipe": f"erm {RECIPE}",
    **{f"iFAM K={k}, papers": f"ifam --parts {k} {PAPERS}" for k in (4, 1, 8)},
    "iFAM K=4, whole patches, our recipe": "ifam --parts 4 --epochs 10 --sight patches",
    "iFAM K=4, whole patches, our selector": (
        "ifam --parts 4 --epochs 10 --sight patches --selector clusters --zoom True"
    ),
    "early mask, true": f"early-mask {BRIEF}",
    "early mask, true, pixels": f"early-mask {BRIEF} {EXACT}",
    **{f"iFAM K={k}, published": f"ifam --parts {k} {PAPERS} --preset published" for k in (4, 1, 8)},
    "LfF": f"lff {BY_GROUPS}",
    "GEORGE": f"george {BRIEF} --first-epochs 10",
    "PDiscoFormer K=4": "pdiscoformer --parts 4 --epochs 10",
}
# Without randomness in training, or nearly so.
FROZEN: dict[str, str] = {
    "probe": "probe",
    "centre crop": "centre-crop",
    "random crop": "random-crop",
    "S2": "s2",
    **{f"A2 {where}>{what}": f"a2 --where {where} --backbone {what}"
       for where in ("TI", "SELF") for what in ("TI", "SELF")},
    "A2 TI>TI, untuned": "a2 --where TI --backbone TI --untuned",
    "A2 SELF>TI, DFR": "a2-dfr --where SELF --backbone TI",
    "A2 TI>TI, DFR": "a2-dfr --where TI --backbone TI",
    "DFR val": "dfr",
    "DFR train": "dfr --fit-on train",
    "probe SELF": "probe --backbone SELF",
}  # fmt: skip
FIVE_SEEDS = ("DFR val", "DFR train")
BESIDE: dict[str, str] = {
    "ERM, balanced groups": f"erm {BY_GROUPS} --balance groups",
    "PDiscoFormer K=8": "pdiscoformer --parts 8 --epochs 10",
    "late mask, true": f"late-mask {BRIEF}",
    "early mask, true, zoom": f"early-mask {BRIEF} --zoom",
    "early mask, true, pixels, zoom": f"early-mask {BRIEF} {EXACT} --zoom",
    "early mask, true, pixels, zoom, our recipe": f"early-mask {RECIPE} {EXACT} --zoom",
    "early mask, FOUND": f"early-mask {BRIEF} --masks found:SELF",
    "late mask, FOUND": f"late-mask {BRIEF} --masks found:SELF",
    "AIM": "aim --epochs 10",
    "EP": "ep --epochs 10",
    "MaskTune": "masktune --init-from @ERM",
    "RobustViT, 3 masks": "robustvit --init-from @ERM --masks-per-class 3",
    "RobustViT, 30 masks": "robustvit --init-from @ERM --masks-per-class 30",
    "RRR": f"rrr {TUNED}",
    "GradMask": f"gradmask {TUNED}",
}
# Last: U2-Net runs on the CPU, and makes the masks of all images before the first step.
SLOW: dict[str, str] = {
    **{f"{when} mask, U2-Net (supervised)": f"{when}-mask {BRIEF} --masks u2net:U2NET" for when in ("early", "late")},
    "early mask, U2-Net (supervised), pixels": f"early-mask {BRIEF} {EXACT} --masks u2net:U2NET",
}
# The same, but selected on a split carved from the training data, whose groups are as unequal as those of training.
CARVED = ("ERM", "ERM, our recipe", "iFAM K=4", "iFAM K=1", "iFAM K=4, papers", "early mask, true, pixels")
FROM_TRAIN = ", selected on train"

NOTED: dict[str, Any] = {"cost": None, "sees": None}

TRIED = {f"{name}, {how}": line for name, grid in GRIDS.items() for how, line in grid.items()}
ALL = HEADLINE | TRIED | FROZEN | BESIDE | SLOW
ALL |= {f"{name}{FROM_TRAIN}": f"{HEADLINE[name]} --select-on train-split" for name in CARVED}
SEES_EVERYTHING = frozenset(
    "erm probe dfr s2 aim ep masktune robustvit rrr gradmask lff george groupdro jtt cvar irm coral".split()  # noqa: SIM905
)


def row(kind: str, name: str, seed: int = 0) -> Row:
    measures = () if ALL[name].split()[0] in SEES_EVERYTHING else ("sight",)
    return Row(kind, name, ALL[name], seed, measures)


def first_rows(kind: str) -> list[Row]:
    """One seed of every row but the slow ones, the headline first; what starts from ERM's weights comes late."""
    carved = [name for name in ALL if name.endswith(FROM_TRAIN)]
    return [row(kind, name) for name in (*HEADLINE, *TRIED, *FROZEN, *BESIDE, *carved)]


def next_rows(kind: str, selected: Sequence[str]) -> list[Row]:
    """Further seeds: of the headline and of the selected hyperparameters, of DFR, of all others; then slow rows."""
    early = [row(kind, name, seed) for seed in (1, 2) for name in (*HEADLINE, *selected)]
    five = [row(kind, name, seed) for name in FIVE_SEEDS for seed in (1, 2, 3, 4)]
    carved = [row(kind, name, seed) for seed in (1, 2) for name in ALL if name.endswith(FROM_TRAIN)]
    late = [row(kind, name, seed) for seed in (1, 2) for name in BESIDE]
    slow = [row(kind, name, seed) for seed in (0, 1, 2) for name in SLOW]
    return [*early, *five, *carved, *late, *slow]


def selected_of_grids(score_of: Callable[[str], float | None]) -> list[str]:
    """Of every grid the row with the best validation score, where all of its rows have one."""
    found = []
    for name, grid in GRIDS.items():
        scores = {f"{name}, {how}": score_of(f"{name}, {how}") for how in grid}
        if all(score is not None for score in scores.values()):
            found.append(max(scores, key=lambda one: scores[one] or 0.0))
    return found


def method_and_recipe(name: str) -> tuple[str, str]:
    """The parts of a row's name: `iFAM K=4, papers` is iFAM K=4 with the recipe `papers`."""
    method, _, recipe = name.removesuffix(FROM_TRAIN).partition(", ")
    return method, recipe or "default"
