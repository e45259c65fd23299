"""Restore a trained method from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config.stored import stored_config
from ..errors import UserError
from ..sight import Method
from ..training.checkpoint import load_tensors
from ..training.run_folder import Run, read_run, vit_config_of
from ..vit.model import Input
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
    config = stored_config(METHODS[name].config, run.facts["config"])
    method = builder_of(name)(vit_config, config, run.facts)
    method.load_state_dict(load_tensors(run.best)[0])
    return Restored(method.to(device).eval(), tuple(run.facts["data"]["classes"]), vit_config.input, run)
