"""Experiment trackers by accelerate, with --tracker: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from ..config import Loop
from ..errors import UserError
from .run_folder import Run

LogLine = Callable[[dict[str, Any]], object]  # takes a line of the log, with its epoch
PROJECT = "sightline"


def epoch_logger(run: Run, config: Loop, main: bool, to_close: ExitStack) -> LogLine:
    """Passes every line of the log on to the tracker. Call in all processes; only the main one logs."""
    if config.tracker is None:
        return lambda _: None
    if find_spec(config.tracker) is None:
        raise UserError(f"--tracker {config.tracker}: not installed; pip install 'sightline[{config.tracker}]'")
    if not main:
        return lambda _: None
    tracker = TRACKERS[config.tracker](run)
    tracker.start()
    to_close.callback(tracker.finish)
    if config.tracker != "tensorboard":  # which would make a run of its own for them
        tracker.store_init_configuration(json.loads(json.dumps(asdict(config), default=str)))
    return lambda line: tracker.log(line, step=line["epoch"])


def tensorboard(run: Run) -> GeneralTracker:
    return TensorBoardTracker("tensorboard", str(run.folder))


def wandb(run: Run) -> GeneralTracker:
    return WandBTracker(PROJECT, name=run.folder.name, dir=str(run.folder), id=identifier(run), resume="allow")


def trackio(run: Run) -> GeneralTracker:
    return TrackioTracker(PROJECT, name=identifier(run), resume="allow", auto_log_cpu=False)


def identifier(run: Run) -> str:
    """The same when the run is resumed."""
    return f"{run.folder.name}-{run.facts['data']['fingerprint'][:8]}"


TRACKERS: dict[str, Callable[[Run], GeneralTracker]] = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
