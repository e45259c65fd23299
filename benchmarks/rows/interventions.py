"""Interventions, ablations and background gaps: the rows of each dataset."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rows import SEEDS, Row, with_seeds
from rows.waterbirds import BRIEF, EXACT, LONG, PATCHES
from sightline.config import Shaping

SETS = {
    "cub": "cub-swapped",
    "object": "spurious-object",
    "pair": "spurious-object --objects post tag --correlation 1",
    "birds": "waterbirds",
    "mixed": "mixed",
}  # of `sightline data`
WITH_OBJECTS = ("object", "pair")
QUANTILES = (0.99, 0.97)
MEASURED = ("interventions",)
NOISE_ROWS = ("iFAM K=8", "PDiscoFormer K=8")  # searched with shuffled labels, too

# 200 species have few images each: twice as many steps.
SPECIES = " --sight patches --batch 64 --balance none --ema None"
WITHOUT_SHAPING = " ".join(
    f"--shaping.{name.replace('_', '-')} 0"
    for name in ("total_variation", "entropy", "equivariance", "orthogonality", "presence", "background")
)
NOT_AVERAGED = " --ema None"
DROPOUTS = (0.0, 0.1, 0.5)  # and 0.3, the default
# The paper's Table 5, K = 4; without the second stage it is PDiscoFormer.
ABLATED = {
    "soft masks": "--soft-mask",
    "no shaping": WITHOUT_SHAPING,
    "no stage-1 classification": "--classify-parts 0",
    "frozen stage 2": "--freeze-predictor",
    **{f"part dropout {share:g}": f"--part-dropout {share:g}" for share in DROPOUTS},
}
# All but the first are trained to the end for accuracy; all are trained briefly for speed.
PRECISIONS = {
    "bf16": "--precision bf16",
    "fp32": "--precision fp32",
    "bf16, averaged": "--precision bf16 --ema 0.999",
    "fp32, averaged": "--precision fp32 --ema 0.999",
}
TIMED_EPOCHS = 3  # the speed is that of the last one


def assert_shaping_is_complete() -> None:
    left = [name for name, value in vars(Shaping()).items() if isinstance(value, float) and value]
    named = {name.replace("-", "_") for name in re.findall(r"--shaping\.(\S+)", WITHOUT_SHAPING)}
    assert set(left) == named, "the list of shaping losses is out of date"


def rows_of(kind: str) -> list[Row]:
    assert_shaping_is_complete()
    return {"cub": cub, "object": objects, "pair": pair, "birds": birds, "mixed": mixed}[kind]()


def with_parts(kind: str, patches: str, thrice: int, once: Sequence[int] = (), rivals: Sequence[int] = ()) -> list[Row]:
    """iFAM with patch masks and PDiscoFormer: with `thrice` parts and all seeds, with `once` parts and one seed."""
    rows, measures = [], MEASURED * (kind in ("cub", *WITH_OBJECTS))
    for k in (thrice, *once):
        seeds = SEEDS if k == thrice else (0,)
        rows += with_seeds(kind, f"iFAM K={k}", f"ifam --parts {k}{patches}", seeds, measures)
        if k in (thrice, *rivals):
            of_parts = f"pdiscoformer --parts {k}{' --batch 64' * (kind == 'cub')}"
            rows += with_seeds(kind, f"PDiscoFormer K={k}", of_parts, seeds, measures)
    return rows


def ablations(kind: str, patches: str) -> list[Row]:
    return [Row(kind, f"iFAM K=4, {how}", f"ifam --parts 4{patches} {flag}") for how, flag in ABLATED.items()]


def cub() -> list[Row]:
    erm = "--epochs 30 --lr 1e-4 --batch 64"
    rows = with_parts("cub", SPECIES, 4, (8, 16, 1), rivals=(8, 16))
    for k in (4, 8, 16, 1):
        rows += with_seeds("cub", f"iFAM K={k}, pixels", f"ifam --parts {k} --selector learned", measures=MEASURED)
    rows += with_seeds("cub", "ERM", f"erm {erm}", SEEDS)
    rows += with_seeds("cub", "probe", "probe")
    rows += with_seeds("cub", "early mask, true", f"early-mask {erm}")
    rows += with_seeds("cub", "early mask, true, pixels", f"early-mask {erm} {EXACT}")
    rows += with_seeds("cub", "late mask, true", f"late-mask {erm}")
    return rows + ablations("cub", SPECIES)


def objects() -> list[Row]:
    rows = with_parts("object", PATCHES, 8)
    rows += with_seeds("object", "iFAM K=8, pixels", "ifam --parts 8 --selector learned", SEEDS, measures=MEASURED)
    return rows + with_seeds("object", "ERM", f"erm {LONG}")


def pair() -> list[Row]:
    """Each class has an object of its own, so that leaving out an object's part can help all groups."""
    rows = with_parts("pair", PATCHES, 8, (1, 2, 4, 16))
    rows += with_seeds("pair", "iFAM K=8, pixels", "ifam --parts 8 --selector learned", measures=MEASURED)
    return rows + with_seeds("pair", "ERM", f"erm {LONG}") + with_seeds("pair", "probe", "probe")


def birds() -> list[Row]:
    rows = with_parts("birds", PATCHES, 4, (16,)) + ablations("birds", PATCHES)
    for how, flags in PRECISIONS.items():
        line = f"ifam --parts 4{PATCHES.replace(NOT_AVERAGED, '')} {flags}{NOT_AVERAGED * ('--ema' not in flags)}"
        rows += [Row("birds", f"iFAM K=4, {how}", line)] * (how != "bf16")  # which is iFAM K=4
        rows.append(Row("birds", f"iFAM K=4, timed, {how}", f"{line} --epochs {TIMED_EPOCHS}", timed=True))
    return rows


def mixed() -> list[Row]:
    rows = with_seeds("mixed", "ERM", f"erm {BRIEF}", SEEDS)
    rows += with_seeds("mixed", "PDiscoFormer K=4", "pdiscoformer --parts 4", SEEDS)
    rows += with_seeds("mixed", "iFAM K=4", f"ifam --parts 4{PATCHES}", SEEDS)
    return rows + with_seeds("mixed", "iFAM K=1, pixels", "ifam --parts 1 --selector learned", SEEDS)
