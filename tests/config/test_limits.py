"""Every number that a user can give has limits, declared with its type; Python and the command line share them."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin

import pytest

from sightline import config
from sightline.config.limits import Checked, Within, hints_of, misfit
from sightline.errors import UserError
from sightline.methods import METHODS

from ..commands import typed

KINDS = {getattr(config, name) for name in config.__all__} | {entry.config for entry in METHODS.values()}
CONFIGS = sorted((kind for kind in KINDS if is_dataclass(kind)), key=lambda kind: kind.__name__)


def numbers_in(hint: Any, limited: bool = False) -> Iterator[tuple[type, bool]]:
    """The number types inside a type, and whether each has limits."""
    if get_origin(hint) is Annotated:
        limited = limited or any(isinstance(mark, Within) for mark in hint.__metadata__)
        yield from numbers_in(get_args(hint)[0], limited)
    elif hint in (int, float):
        yield hint, limited
    elif get_origin(hint) is not ClassVar:
        for inner in get_args(hint):
            yield from numbers_in(inner, limited)


NUMBERS = [
    (kind, field) for kind in CONFIGS for field in fields(kind) if [*numbers_in(hints_of(kind)[field.name])]
]  # fmt: skip


def made(kind: type, **changes: Any):
    required = {f.name: f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    values = {name: example(hints_of(kind)[name]) for name in required}
    return kind(**values | changes)


def example(hint: Any) -> Any:
    candidates = (Path("x"), "x", ("x",), (Path("x"),), "waterbirds", "siim")
    return next(value for value in candidates if misfit(value, hint) is None)


def in_its_shape(value: float, hint: Any) -> Any:
    """The value, or a tuple of it where the setting takes several."""
    text = str(hint)
    return (value,) if "tuple[" in text.lower() else value


def test_every_configuration_is_checked():
    assert all(issubclass(kind, Checked) for kind in CONFIGS)
    assert len(CONFIGS) > 40
    assert len(NUMBERS) > 200


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_defaults_are_within_the_limits(kind):
    made(kind)


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_number_has_limits(kind):
    for field in fields(kind):
        for number, limited in numbers_in(hints_of(kind)[field.name]):
            assert limited, f"{kind.__name__}.{field.name}: {number.__name__} without limits (config/limits.py)"


# Numbers whose negative values mean something: blocks are counted from the end.
MEANINGFUL_NEGATIVES = {"layer"}


@pytest.mark.parametrize(("kind", "field"), NUMBERS, ids=[f"{kind.__name__}.{f.name}" for kind, f in NUMBERS])
def test_nan_infinity_text_and_negatives_are_refused(kind, field):
    hint = hints_of(kind)[field.name]
    refused = [math.nan, math.inf, -math.inf, "seven", True, 10.0**30, -1, -0.5]
    if field.name in MEANINGFUL_NEGATIVES:
        refused.remove(-1)
    if float in {number for number, _ in numbers_in(hint)}:
        refused.remove(10.0**30)  # large, but finite
    for value in refused:
        with pytest.raises(UserError, match=rf"^--(shaping\.)?{field.name.replace('_', '-')} .*: must "):
            made(kind, **{field.name: in_its_shape(value, hint)})


def zero_is_refused(kind: type, name: str) -> bool:
    try:
        made(kind, **{name: in_its_shape(0, hints_of(kind)[name])})
    except UserError:
        return True
    return False


# Where zero is accepted it means something: none of these, no limit, or the first of them. Everywhere else it is
# refused.
ZERO_MEANS = {
    "adjustment": "none", "background": "no such loss", "background_weight": "no such loss",
    "classification_weight": "no such loss", "classify_parts": "no such loss", "clip_grad": "no clipping",
    "concentration": "no such loss", "correlation": "background never matches", "deviations": "the mean",
    "displacement": "centred", "distance": "centred", "drop": "part 0", "entropy": "no such loss",
    "equivariance": "no such loss", "examples": "none shown", "force": "part 0", "foreground_weight": "no such loss",
    "full_size_fraction": "no such steps", "guide_radius": "no filter", "head_lr_factor": "frozen",
    "ibot": "no such loss", "koleo": "no such loss", "layer": "the first block", "limit": "all", "local_crops": "none",
    "loss_ema": "no average", "lr": "frozen", "mask_dropout": "never", "orthogonality": "no such loss",
    "part_dropout": "never", "penalty": "no such loss",
    "presence": "no such loss", "prototype_lr_factor": "frozen",
    "ramp": "full weight at once", "registers": "none",
    "relevance_weight": "no such loss", "save_minutes": "after every step", "seed": "a seed", "seeds": "a seed",
    "sigma": "no smoothing",
    "split_seed": "a seed", "step_size": "equal weights", "steps": "unadapted attention",
    "teacher_momentum": "no memory", "total_variation": "no such loss", "total_variation_grid": "any grid alike",
    "upweight": "no copies", "warmup": "none", "weight_decay": "none", "workers": "this process",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "field"), NUMBERS, ids=[f"{kind.__name__}.{f.name}" for kind, f in NUMBERS])
def test_zero_is_refused_or_means_something(kind, field):
    assert zero_is_refused(kind, field.name) or field.name in ZERO_MEANS, f"{kind.__name__}.{field.name}: what is zero?"


WRONG = [
    ("train erm DATA --seed -1", "--seed -1: must not be negative"),
    ("train erm DATA --save-minutes nan", "--save-minutes nan: must be a finite number"),
    ("train erm DATA --batch 0", "--batch 0: must be at least 1"),
    ("train erm DATA --epochs -3", "--epochs -3: must be at least 1"),
    ("train erm DATA --lr inf", "--lr inf: must be a finite number"),
    ("train erm DATA --size 1000000000", "--size 1000000000: must be at most 16,384"),
    ("train ifam DATA --shaping.entropy nan", "--shaping.entropy nan: must be a finite number"),
    ("train cvar DATA --worst-fraction 1.5", "--worst-fraction 1.5: must be above 0 and at most 1"),
    ("app RUN --port 99999999", "--port 99999999: must be at most 65,535"),
    ("toy OUT --train -4", "--train -4: must be at least 1"),
    ("toy OUT --size 1000000000", "--size 1000000000: must be at most 16,384"),
    ("toy OUT --correlation 2", "--correlation 2.0: must lie between 0 and 1"),
    ("predict RUN IMAGE --batch -5", "--batch -5: must be at least 1"),
    ("evaluate RUN --workers -1", "--workers -1: must not be negative"),
    (
        "train erm DATA --out s3://bucket/run",
        "--out s3://bucket/run: a URL, but it must be on a disk; URLs are RUN, INPUT and --out of `predict` "
        "and `embed`, and --cache",
    ),
    ("strips RUN --quantiles nan", "--quantiles nan: must be a finite number"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_the_command_line_refuses_in_one_line(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert typed(*line.split()) == (2, "", f"sightline: {message}\n")
    assert not [*tmp_path.iterdir()], "refused before anything is written"


def test_python_refuses_with_the_same_words():
    with pytest.raises(UserError, match=r"^--save-minutes nan: must be a finite number$"):
        config.Erm(Path("x"), save_minutes=math.nan)
    with pytest.raises(UserError, match=r"^--epochs 2.5: must be a whole number$"):
        config.Erm(Path("x"), epochs=2.5)
    with pytest.raises(UserError, match=r"^--select best: must be one of balanced, "):
        config.Erm(Path("x"), select="best")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "check: not enough memory (MemoryError); use smaller images or batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "check: not enough memory (DefaultCPU"),
        (OSError(28, "No space left on device", "a/b.csv"), "check: a/b.csv: No space left on device; free space"),
        (PermissionError(13, "Permission denied", "a"), "check: a: Permission denied; change its permissions"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, message, monkeypatch):
    from sightline.data import check

    def fails(_):
        raise error

    monkeypatch.setattr(check, "run_command", fails)
    code, out, err = typed("check", "x")
    assert (code, out) == (2, "")
    assert err.startswith(f"sightline: {message}")
    assert err.count("\n") == 1
