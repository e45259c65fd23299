"""`sightline pretrain`: pictures in, a backbone out. The learning itself is in methods/dino.py, the loop in train.py.

sightline pretrain DATA --size nano                                            # one GPU, or the CPU
accelerate launch --num_processes 8 -m sightline pretrain DATA --size s        # eight GPUs
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from .config import Pretrain
from .console.terminal import is_main_process, print_notes
from .data.rows import Rows
from .data.unlabelled import read_pictures
from .errors import UserError
from .methods.dino import Dino, geometry
from .train import begin_together, fit
from .training.context import TrainContext, check_even_split, deterministic
from .training.distributed import make_accelerator
from .vit.backbones import own_vit
from .vit.model import ViT
from .vit.weights import save_backbone


def pretrain(config: Pretrain) -> Path:
    """The run folder, with the teacher's weights in backbone.safetensors."""
    config = replace(config, cache=config.cache or config.folder / "cache")
    rows = read_pictures(config.data, layout=config.layout, seed=config.split_seed)
    with deterministic(config.deterministic):
        accelerator = make_accelerator(config.device, config.precision)
        validate_config(config, rows, accelerator.num_processes)
        run = begin_together(config, rows, accelerator)
        learner = new_learner(config)
        expects = learner.teacher.vit.config.input
        if accelerator.is_main_process:
            run.note(vit=asdict(learner.teacher.vit.config))
            print_notes(Console(highlight=False), rows.notes)
        learner = cast(Dino, fit(learner, TrainContext(rows, run, accelerator, expects), config))
    if accelerator.is_main_process:
        save_backbone(learner.teacher.vit, run.folder / "backbone.safetensors", torch.float16)
        run.note(state="finished")
    accelerator.wait_for_everyone()
    return run.folder


def new_learner(config: Pretrain) -> Dino:
    """With random weights, drawn from the seed."""
    patch, pixels, *_ = geometry(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Dino(ViT(own_vit(config.size, patch, pixels, config.registers)), config)


def validate_config(config: Pretrain, rows: Rows, processes: int) -> None:
    """Settings that cannot work, said before anything is begun."""
    patch, pixels, early, _ = geometry(config)
    count = len(rows.where("train"))
    batch = min(config.batch, count)
    for split in ("train", "val"):
        if not len(rows.where(split)):
            raise UserError(f"{config.data}: no pictures in the split {split!r}; `sightline check` says more")
    sides = {"pixels": pixels, "large": early.large, "small": early.small}
    wrong = next((name for name, side in sides.items() if side < patch or side % patch), None)
    complaints = [
        (wrong is not None, f"--{wrong} {sides.get(wrong or '')}: must be a multiple of the patch, {patch}"),
        (config.accumulate < 1, f"--accumulate {config.accumulate}: must be at least 1"),
        (config.workers < 0, f"--workers {config.workers}: must not be negative"),
        (batch < 2 * processes * config.accumulate, f"--batch {batch}: each part needs two pictures to tell apart"),
        (config.epochs < 1, f"--epochs {config.epochs}: must be at least 1"),
        (not 0 <= config.warmup <= config.epochs, f"--warmup {config.warmup:g}: must lie between 0 and --epochs"),
        (config.smalls < 0, f"--smalls {config.smalls}: must not be negative"),
        (config.registers < 0, f"--registers {config.registers}: must not be negative"),
        (config.prototypes < 2, f"--prototypes {config.prototypes}: must be at least 2"),
        (config.examine_every < 1, f"--examine-every {config.examine_every}: must be at least 1"),
        (config.keep_every is not None and config.keep_every < 1,
         f"--keep-every {config.keep_every}: must be at least 1"),
        (not 0 <= config.momentum < 1, f"--momentum {config.momentum}: must lie between 0 and 1, such as 0.994"),
        (not 0 <= config.finish <= 1, f"--finish {config.finish}: must lie between 0 and 1"),
        (min(config.koleo, config.masked, config.lr, config.weight_decay, config.clip) < 0,
         "--koleo, --masked, --lr, --weight-decay and --clip must not be negative"),
    ]  # fmt: skip
    for is_wrong, complaint in complaints:
        if is_wrong:
            raise UserError(complaint)
    check_even_split(batch, processes, config.accumulate)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Pretrain) -> int:
    from .training.progress import figures_of_pretraining
    from .training.run_folder import read_run

    folder = pretrain(command)
    if is_main_process():
        run = read_run(folder)
        last = json.loads(run.log_file.read_text(encoding="utf-8").splitlines()[-1])
        if found := figures_of_pretraining(last):
            print(", ".join(found))
        print(f"The backbone is {folder / 'backbone.safetensors'}: give that to --backbone.")
    return 0
