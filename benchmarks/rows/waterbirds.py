"""Waterbirds rebuilt (WB-R): name -> arguments of `sightline train`, and which rows are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rows import SEEDS, Row
from sightline.errors import UserError

BRIEF = "--epochs 14 --lr 5e-5"  # whole images and given masks
LONG = "--epochs 30 --lr 3e-5"  # the epochs and learning rate of iFAM; head and its learning rate are their own
EXACT = "--sight pixels --patch-threshold 0.1"
PLAIN = "--batch 128 --balance none --ema None"  # the papers' recipe, which is not iFAM's default here
PATCHES = f" --sight patches {PLAIN}"  # iFAM as in the papers
LEARNED = "--selector learned"  # these rows were measured before stage 1 was found by clustering
COARSE = f" {LEARNED} --selector-size 224 {PLAIN}"  # pixel-exact, all else as in the papers

SALIENCY = {"U2-Net": "u2net:U2NET", "FOUND": "found:SELF", "TokenCut": "tokencut:SELF"}
FILLS = ("black", "white", "grey", "noise")
# One option changed from the default, each.
OTHERWISE = {
    "look 224": "--selector-size 224",
    "look once": "--refine False",
    "no zoom": "--refine False --zoom False",
    "unguided": "--guide-radius 0",
    "threshold 0.7": "--pixel-threshold 0.7",
    "mask gradient": "--mask-gradient True",
    "never hidden": "--mask-dropout 0",
    "frozen selector": "--tune-selector none",
    "whole selector": "--tune-selector all",
    "unbalanced": "--balance none",
    "balanced draws": "--balance classes",
    "not averaged": "--ema None",
    "selected by groups": "--select worst-group",
}

PAPERS_ROWS: dict[str, str] = {
    "probe": "probe",
    "ERM": f"erm {BRIEF}",
    "ERM, 30 epochs": f"erm {LONG}",
    "late mask, true": f"late-mask {BRIEF}",
    "early mask, true": f"early-mask {BRIEF}",
    "early mask, true, 30 epochs": f"early-mask {LONG}",
    "early mask, true, pixels": f"early-mask {BRIEF} {EXACT}",
    "early mask, U2-Net (supervised)": f"early-mask {BRIEF} --masks {SALIENCY['U2-Net']}",
    "early mask, FOUND": f"early-mask {BRIEF} --masks {SALIENCY['FOUND']}",
    "early mask, TokenCut": f"early-mask {BRIEF} --masks {SALIENCY['TokenCut']}",
    "PDiscoFormer K=4": "pdiscoformer --parts 4",
    "PDiscoFormer K=8": "pdiscoformer --parts 8",
    **{f"iFAM K={k}": f"ifam --parts {k}{PATCHES}" for k in (1, 4, 8)},
    "iFAM K=4, soft": f"ifam --parts 4{PATCHES} --soft-mask",
    **{f"iFAM K={k}, no mask gradient": f"ifam --parts {k}{PATCHES} --mask-gradient False" for k in (1, 4, 8)},
    **{f"iFAM K={k}, published": f"ifam --parts {k}{PATCHES} --preset published" for k in (1, 4, 8)},
    # Twice as many steps.
    "iFAM K=1, batch 64": f"ifam --parts 1{PATCHES} --batch 64",
    **{f"iFAM K={k}, published, batch 64": f"ifam --parts {k}{PATCHES} --preset published --batch 64" for k in (1, 4)},
}

# Pixel-exact sight and its controls. FOUND and TokenCut mask whole patches: with a backbone of the same patch size,
# `--sight pixels` changes nothing.
PIXEL_ROWS: dict[str, str] = {
    "early mask, true": PAPERS_ROWS["early mask, true"],
    "early mask, true, balanced": f"early-mask {BRIEF} --balance classes",
    "early mask, true, zoom": f"early-mask {BRIEF} --zoom",
    "early mask, true, 448 px": f"early-mask {BRIEF} --size 448",
    "early mask, true, 90 % inside": f"early-mask {BRIEF} --patch-threshold 0.9",
    "early mask, true, pixels": PAPERS_ROWS["early mask, true, pixels"],
    "early mask, true, pixels, zoom": f"early-mask {BRIEF} {EXACT} --zoom",
    "early mask, true, pixels, 448 px": f"early-mask {BRIEF} {EXACT} --size 448",
    **{f"early mask, true, pixels, {fill}": f"early-mask {BRIEF} {EXACT} --fill {fill}" for fill in FILLS},
    **{f"early mask, {name}, pixels": f"early-mask {BRIEF} {EXACT} --masks {how}" for name, how in SALIENCY.items()},
    "early mask, true, pixels, 30 epochs": f"early-mask {LONG} {EXACT}",
    "early mask, true, pixels, balanced loss": f"early-mask {BRIEF} {EXACT} --balance logit-adjustment",
    "ERM, balanced loss": f"erm {BRIEF} --balance logit-adjustment",
    **{f"iFAM K={k}": PAPERS_ROWS[f"iFAM K={k}"] for k in (1, 4, 8)},
    "iFAM K=1, our recipe": "ifam --parts 1 --sight patches",
    "iFAM K=1, zoom": f"ifam --parts 1{PATCHES} --zoom True",
    **{f"iFAM K={k}, pixels": f"ifam --parts {k} {LEARNED}" for k in (1, 4, 8)},
    **{f"iFAM K=1, pixels, {how}": f"ifam --parts 1 {LEARNED} {flag}" for how, flag in OTHERWISE.items()},
    "iFAM K=4, pixels, look 224": f"ifam --parts 4 {LEARNED} --selector-size 224",
    **{f"iFAM K={k}, plain pixels": f"ifam --parts {k}{COARSE}" for k in (1, 4, 8)},
    **{
        f"iFAM K={k}, plain pixels, balanced loss": f"ifam --parts {k}{COARSE} --balance logit-adjustment"
        for k in (1, 4)
    },
    "iFAM K=1, plain pixels, look 448": f"ifam --parts 1 {LEARNED} --selector-size 448 {PLAIN}",
    "iFAM K=4, plain pixels, no mask dropout": f"ifam --parts 4{COARSE} --mask-dropout 0",
    "iFAM K=4, plain pixels, DINO looks": f"ifam --parts 4{COARSE} --where SELF",
}
# Baselines that see everything: attentive probes and reweighting, the checkpoint selected by validation groups.
BY_GROUPS = f"{BRIEF} --select worst-group"
RIVAL_ROWS: dict[str, str] = {
    "ERM": PAPERS_ROWS["ERM"],
    "AIM probe": "aim",
    "EP probe": "ep",
    "ERM, selected by groups": f"erm {BY_GROUPS}",
    "ERM, balanced groups": f"erm {BY_GROUPS} --balance groups",
    "GroupDRO": f"groupdro {BY_GROUPS}",
    "GroupDRO, adjusted": f"groupdro {BY_GROUPS} --adjustment 2",
    **{f"JTT, {more} times": f"jtt {BY_GROUPS} --upweight {more}" for more in (5, 20, 50)},
    **{f"CVaR, worst {worst}": f"cvar {BY_GROUPS} --worst-fraction {worst}" for worst in (0.1, 0.2, 0.5)},
    "LfF": f"lff {BY_GROUPS}",
}
ROWS = PAPERS_ROWS | PIXEL_ROWS | RIVAL_ROWS

TRUE, TRUE_PIXELS = "early mask, true", "early mask, true, pixels"
# For datasets with a shift of backgrounds between training and test: `sightline data scenes-o2o`, `cub-swapped`, ...
SHIFTED = (*(f"{row}, 30 epochs" for row in ("ERM", TRUE, TRUE_PIXELS)), "iFAM K=1", "iFAM K=1, pixels")
SHIFT_ROWS = {row: ROWS[row] for row in SHIFTED}
TABLES = {"papers": PAPERS_ROWS, "pixels": PIXEL_ROWS, "shifts": SHIFT_ROWS, "rivals": RIVAL_ROWS}

CONTROLS = tuple(f"{TRUE}, {how}" for how in ("balanced", "zoom", "448 px", "90 % inside"))
OTHER_FILLS = tuple(f"{TRUE_PIXELS}, {fill}" for fill in FILLS)
SELECTED_BY_A_NET = {
    "early mask, U2-Net, pixels": "early mask, U2-Net (supervised)",
    "early mask, FOUND, pixels": "early mask, FOUND",
    "early mask, TokenCut, pixels": "early mask, TokenCut",
}

# Trained with every seed; the others with the first one.
HEADLINE = frozenset(
    {
        "ERM", "late mask, true", TRUE, TRUE_PIXELS, f"{TRUE_PIXELS}, balanced loss", "PDiscoFormer K=4",
        "iFAM K=1", "iFAM K=4", "iFAM K=1, published", "iFAM K=1, pixels",
    }
)  # fmt: skip

# Rows that are compared on the same images.
PAIRS: tuple[tuple[str, str], ...] = (
    *((f"iFAM K={k}", f"iFAM K={k}, {how}") for how in ("published", "no mask gradient") for k in (1, 4, 8)),
    *((f"iFAM K={k}", rival) for rival in ("ERM", "ERM, 30 epochs", TRUE, f"{TRUE}, 30 epochs") for k in (1, 4, 8)),
    *((f"iFAM K={k}", f"PDiscoFormer K={k}") for k in (4, 8)),
    ("iFAM K=4", "iFAM K=4, soft"),
    (TRUE, "late mask, true"),
    *((TRUE_PIXELS, rival) for rival in (TRUE, *CONTROLS)),
    (f"{TRUE_PIXELS}, 30 epochs", f"{TRUE}, 30 epochs"),
    ("iFAM K=1, pixels", f"{TRUE_PIXELS}, 30 epochs"),
    *((row, TRUE) for row in OTHER_FILLS),
    *((f"{TRUE_PIXELS}, {how}", f"{TRUE}, {how}") for how in ("zoom", "448 px")),
    *SELECTED_BY_A_NET.items(),
    *(
        (f"iFAM K={k}, pixels", rival)
        for k in (1, 4, 8)
        for rival in (f"iFAM K={k}", f"iFAM K={k}, published", "ERM", "ERM, 30 epochs", TRUE, TRUE_PIXELS)
    ),
    *(
        ("iFAM K=1, pixels", rival)
        for rival in ("iFAM K=1, batch 64", "iFAM K=1, published, batch 64", "iFAM K=1, our recipe")
    ),
    *(("iFAM K=1, pixels", f"iFAM K=1, pixels, {how}") for how in OTHERWISE),
    ("iFAM K=4, pixels", "iFAM K=4, pixels, look 224"),
    ("iFAM K=1, pixels", f"{TRUE_PIXELS}, balanced loss"),
    *((f"{row}, balanced loss", row) for row in ("ERM", TRUE_PIXELS)),
    *((f"iFAM K={k}, plain pixels", f"iFAM K={k}") for k in (1, 4, 8)),
    *((f"iFAM K={k}, plain pixels, balanced loss", f"iFAM K={k}, plain pixels") for k in (1, 4)),
    ("iFAM K=1, plain pixels, look 448", "iFAM K=1, plain pixels"),
    *((f"iFAM K=4, plain pixels, {how}", "iFAM K=4, plain pixels") for how in ("no mask dropout", "DINO looks")),
    ("iFAM K=1, zoom", "iFAM K=1"),
    *((row, "ERM") for row in RIVAL_ROWS if row != "ERM"),
)


def rows_of(
    kind: str, table: str = "papers", *, seeds: Sequence[int] = (), every: bool = False, file: Path | None = None
) -> list[Row]:
    """The first seed of every row first. `every`: rows of all tables, with all seeds, which is for
    rows that are named; `file`: JSON, name -> arguments of `sightline train`, in place of the table."""
    if table not in TABLES:
        raise UserError(f"--table {table}: known are {', '.join(TABLES)}")
    seeds = tuple(seeds) or ((0,) if table == "shifts" else SEEDS)
    lines = json.loads(file.read_text(encoding="utf-8")) if file else ROWS if every else TABLES[table]
    found = []
    for number, seed in enumerate(seeds):
        for name, line in lines.items():
            method = line.split()[0]
            thrice = name in HEADLINE or every or file is not None
            if number == 0 or (thrice and method != "probe"):
                measures = () if method in ("erm", "probe") else ("localize", "shape", "certify")
                found.append(Row(kind, name, line, seed, measures))
    return found
