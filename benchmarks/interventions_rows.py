"""The rows of the tables on interventions and ablations: name -> arguments of `sightline train`, by set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import lanes
from sightline.config import Shaping
from waterbirds_rows import BRIEF, EXACT, LONG, PATCHES

BUILDS = {
    "cub": "cub-swapped",
    "object": "spurious-object",
    "pair": "spurious-object --objects post tag --correlation 1",
    "birds": "waterbirds",
    "mixed": "mixed",
}  # of `sightline data`
SETS, WITH_OBJECTS = tuple(BUILDS), ("object", "pair")
PICTURES = {"cub": 5194, "object": 4795, "pair": 4795, "birds": 4795, "mixed": 4795}  # of training
QUANTILES = (0.99, 0.97)
SEEDS = (0, 1, 2)

# Two hundred species have few pictures each: twice as many steps.
SPECIES = " --sight patches --batch 64 --balance none --average None"
WITHOUT_SHAPING = " ".join(
    f"--shaping.{name.replace('_', '-')} 0"
    for name in ("total_variation", "entropy", "equivariance", "orthogonality", "presence", "background")
)
NOT_AVERAGED = " --average None"
DROPOUTS = (0.0, 0.1, 0.5)  # and 0.3, the default
# The papers' Table 5, K = 4; without the second stage it is PDiscoFormer.
ABLATED = {
    "soft masks": "--soft",
    "no shaping": WITHOUT_SHAPING,
    "no stage-1 classification": "--classify-parts 0",
    "frozen stage 2": "--freeze-predictor",
    **{f"part dropout {share:g}": f"--part-dropout {share:g}" for share in DROPOUTS},
}
# Without the first, they are trained to the end, for their accuracy; and all are, briefly, for their speed.
PRECISIONS = {
    "bf16": "--precision bf16",
    "fp32": "--precision fp32",
    "bf16, averaged": "--precision bf16 --average 0.999",
    "fp32, averaged": "--precision fp32 --average 0.999",
}
BRIEFLY = 3  # epochs: the last one's speed counts
# Pictures per second of training and measuring, of a whole H200 with ViT-Ti: 40 s for 30 epochs of iFAM on 4,795.
RATES = {"ifam": 3600, "pixels": 1920, "pdiscoformer": 6000, "erm": 9000, "early-mask": 7000, "late-mask": 8000}
FP32_SLOWER, ALONE_SLOWER, START = 2.5, 2.5, 10  # times, times, seconds: of a run that has the GPU for itself
MEASURING = {"cub": 30, "object": 20, "pair": 20, "birds": 0, "mixed": 0}  # interventions, in seconds


@dataclass(frozen=True)
class Row(lanes.Row):
    interventions: bool = False  # are measured
    timed: bool = False  # alone on the GPU

    @property
    def seconds(self) -> int:
        """About what it takes of a whole H200."""
        method, epochs = self.line.split()[0], int((re.findall(r"--epochs (\d+)", self.line) or [30])[0])
        if method == "probe":
            return 10
        rate = RATES["pixels" if method == "ifam" and "patches" not in self.line else method]
        slower = (FP32_SLOWER if "fp32" in self.line else 1) * (ALONE_SLOWER if self.timed else 1)
        more = MEASURING[self.set] * self.interventions + START * self.timed
        return round(PICTURES[self.set] * epochs / rate * slower) + more


def assert_shaping_is_complete() -> None:
    left = [name for name, value in vars(Shaping()).items() if isinstance(value, float) and value]
    named = {name.replace("-", "_") for name in re.findall(r"--shaping\.(\S+)", WITHOUT_SHAPING)}
    assert set(left) == named, "a loss that shapes parts has come or gone"


def rows_of(kind: str) -> list[Row]:
    assert_shaping_is_complete()
    return {"cub": cub, "object": objects, "pair": pair, "birds": birds, "mixed": mixed}[kind]()


def each(kind: str, name: str, line: str, seeds: Iterable[int] = (0,), *, interventions: bool = False) -> list[Row]:
    return [Row(kind, name, line, seed, interventions) for seed in seeds]


def with_parts(kind: str, patches: str, thrice: int, once: Sequence[int] = (), rivals: Sequence[int] = ()) -> list[Row]:
    """iFAM with patches, as in the papers, of these many parts; PDiscoFormer of the first, and of `rivals`."""
    rows, measured = [], MEASURING[kind] > 0
    for k in (thrice, *once):
        seeds = SEEDS if k == thrice else (0,)
        rows += each(kind, f"iFAM K={k}", f"ifam --parts {k}{patches}", seeds, interventions=measured)
        if k in (thrice, *rivals):
            of_parts = f"pdiscoformer --parts {k}{' --batch 64' * (kind == 'cub')}"
            rows += each(kind, f"PDiscoFormer K={k}", of_parts, seeds, interventions=measured)
    return rows


def ablations(kind: str, patches: str) -> list[Row]:
    return [Row(kind, f"iFAM K=4, {how}", f"ifam --parts 4{patches} {flag}") for how, flag in ABLATED.items()]


def cub() -> list[Row]:
    erm = "--epochs 30 --lr 1e-4 --batch 64"
    rows = with_parts("cub", SPECIES, 4, (8, 16, 1), rivals=(8, 16))
    for k in (4, 8, 16, 1):
        rows += each("cub", f"iFAM K={k}, pixels", f"ifam --parts {k}", interventions=True)
    rows += each("cub", "ERM", f"erm {erm}", SEEDS)
    rows += each("cub", "probe", "probe")
    rows += each("cub", "early mask, true", f"early-mask {erm}")
    rows += each("cub", "early mask, true, pixels", f"early-mask {erm} {EXACT}")
    rows += each("cub", "late mask, true", f"late-mask {erm}")
    return rows + ablations("cub", SPECIES)


def objects() -> list[Row]:
    rows = with_parts("object", PATCHES, 8)
    rows += each("object", "iFAM K=8, pixels", "ifam --parts 8", SEEDS, interventions=True)
    return rows + each("object", "ERM", f"erm {LONG}")


def pair() -> list[Row]:
    """Each class has an object of its own, so that leaving out an object's part can help all groups."""
    rows = with_parts("pair", PATCHES, 8, (1, 2, 4, 16))
    rows += each("pair", "iFAM K=8, pixels", "ifam --parts 8", interventions=True)
    return rows + each("pair", "ERM", f"erm {LONG}") + each("pair", "probe", "probe")


def birds() -> list[Row]:
    rows = with_parts("birds", PATCHES, 4, (16,)) + ablations("birds", PATCHES)
    for how, flags in PRECISIONS.items():
        line = f"ifam --parts 4{PATCHES.replace(NOT_AVERAGED, '')} {flags}{NOT_AVERAGED * ('--average' not in flags)}"
        rows += [Row("birds", f"iFAM K=4, {how}", line)] * (how != "bf16")  # which is iFAM K=4
        rows.append(Row("birds", f"iFAM K=4, timed, {how}", f"{line} --epochs {BRIEFLY}", timed=True))
    return rows


def mixed() -> list[Row]:
    rows = each("mixed", "ERM", f"erm {BRIEF}", SEEDS)
    rows += each("mixed", "PDiscoFormer K=4", "pdiscoformer --parts 4", SEEDS)
    rows += each("mixed", "iFAM K=4", f"ifam --parts 4{PATCHES}", SEEDS)
    return rows + each("mixed", "iFAM K=1, pixels", "ifam", SEEDS)
