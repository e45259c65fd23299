"""Restore a trained method from its run folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..config import Train
from ..config.stored import stored_config
from ..errors import UserError
from ..sight import Method
from ..training.checkpoint import load_tensors
from ..training.run_folder import Run, read_run, vit_config_of
from ..vit.model import Input, ViTConfig
from ..vit.plausible import check_plausible, elements_of
from ..vit.weights import config_from_json
from . import METHODS, builder_of


@dataclass(frozen=True)
class Restored:
    """A method with its weights, its classes and its input format."""

    method: Method
    classes: tuple[str, ...]
    expects: Input
    run: Run


def restore(folder: str | Path, device: str = "cpu") -> Restored:
    run = read_run(folder)
    if missing := [fact for fact in ("method", "data", "vit") if not run.facts.get(fact)]:
        raise UserError(
            f"{run.folder}: this run was interrupted before it had a model (run.json has no {missing[0]!r}); "
            "train it again with the same command"
        )
    name, vit_config = run.facts["method"], vit_config_of(run)
    if name not in METHODS:
        raise UserError(f"{run.folder / 'run.json'}: unknown method {name!r}; known: {', '.join(METHODS)}")
    config = checked_config(run, name)
    tensors = load_tensors(run.best, checksum=run.has_checksums)[0]
    check_sizes(run, vit_config, elements_of(tensor.shape for tensor in tensors.values()))
    method = build(run, vit_config, config)
    try:
        method.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{run.best}: not the weights that run.json describes ({reason}); restore both") from None
    return Restored(method.to(device).eval(), tuple(run.facts["data"]["classes"]), vit_config.input, run)


def checked_config(run: Run, name: str) -> Train:
    try:
        return stored_config(METHODS[name].config, run.facts["config"])
    except (UserError, TypeError, AttributeError) as error:
        raise UserError(f"{run.folder / 'run.json'}: damaged ({error}); restore it, or train again") from None


def check_sizes(run: Run, vit_config: ViTConfig, elements: int) -> None:
    """Nothing that run.json describes may be larger than the file of its weights, before it is built."""
    path = run.folder / "run.json"
    check_plausible(vit_config, elements, path)
    if selector := (run.facts.get("where") or {}).get("vit"):
        check_plausible(config_from_json(json.dumps(selector), path), elements, path)
    remembered = run.facts.get("images")  # LfF: losses of so many images
    claimed = {
        "queue": math.prod(run.facts.get("queue") or ()),
        "images": remembered if isinstance(remembered, int) else 0,
    }
    for name, size in claimed.items():
        if size > elements:
            raise UserError(f"{path}: damaged ({name} needs {size:,} numbers, and {run.best.name} has {elements:,})")


def build(run: Run, vit_config: ViTConfig, config: Train) -> Method:
    """The method as it was made, without its weights."""
    try:
        return builder_of(run.facts["method"])(vit_config, config, run.facts)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{run.folder / 'run.json'}: damaged ({reason}); restore it, or train again") from error
