"""`sightline pretrain`: a backbone from unlabelled images. The loss is in methods/dino.py, the loop in train.py.

sightline pretrain DATA --arch nano                                            # one GPU, or the CPU
accelerate launch --num_processes 8 -m sightline pretrain DATA --arch s        # eight GPUs
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from .config import Pretrain
from .console.terminal import is_main_process, present, print_notes
from .data.rows import Rows
from .data.unlabelled import read_pretraining_rows
from .errors import UserError
from .methods.dino import Dino, crop_geometry
from .train import begin_together, fit
from .training.checks import check_even_split, raise_first
from .training.distributed import deterministic, make_accelerator
from .training.progress import pretraining_metrics
from .training.run_folder import read_run, run_ending
from .training.trainable import TrainContext
from .vit.backbones import sightline_vit_config
from .vit.model import ViT
from .vit.weights import save_backbone


def pretrain(config: Pretrain) -> Path:
    """Pretrain a backbone; returns the run folder, with the teacher's weights in backbone.safetensors."""
    config = replace(config, cache=config.cache or config.folder / "cache")
    rows = read_pretraining_rows(config.data, layout=config.layout, seed=config.split_seed)
    with deterministic(config.deterministic), run_ending(config.folder):
        accelerator = make_accelerator(config.device, config.precision)
        validate_config(config, rows, accelerator.num_processes)
        run = begin_together(config, rows, accelerator)
        model = new_model(config)
        expects = model.teacher.vit.config.input
        if accelerator.is_main_process:
            run.note(vit=asdict(model.teacher.vit.config))
            print_notes(Console(highlight=False), rows.notes)
        model = cast(Dino, fit(model, TrainContext(rows, run, accelerator, expects), config))
    if accelerator.is_main_process:
        save_backbone(model.teacher.vit, run.folder / "backbone.safetensors", torch.float16)
        run.note(state="finished")
    accelerator.wait_for_everyone()
    return run.folder


def new_model(config: Pretrain) -> Dino:
    """With random weights, drawn from the seed."""
    patch, pixels, *_ = crop_geometry(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Dino(ViT(sightline_vit_config(config.arch, patch, pixels, config.registers)), config)


def validate_config(config: Pretrain, rows: Rows, processes: int) -> None:
    """Reject settings that cannot work, before anything is written."""
    patch, pixels, early, _ = crop_geometry(config)
    batch = min(config.batch, len(rows.split_indices("train")))
    for split in ("train", "val"):
        if not len(rows.split_indices(split)):
            raise UserError(f"{config.data}: no images in the split {split!r}; `sightline check` shows the splits")
    sides = {"size": pixels, "global-size": early.large, "local-size": early.small}
    wrong = next((name for name, side in sides.items() if side < patch or side % patch), None)
    raise_first([
        (wrong is not None, f"--{wrong} {sides.get(wrong or '')}: must be a multiple of the patch side, {patch}"),
        (batch < 2 * processes * config.grad_accum, f"--batch {batch}: each micro-batch needs two images; raise it"),
        (config.warmup > config.epochs, f"--warmup {config.warmup:g}: must lie between 0 and --epochs"),
        (config.teacher_momentum == 1, "--teacher-momentum 1.0: must be below 1, such as 0.994"),
    ])  # fmt: skip
    check_even_split(batch, processes, config.grad_accum)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Pretrain) -> int:
    folder = pretrain(command)
    if is_main_process():
        last = json.loads(read_run(folder).log_file.read_text(encoding="utf-8").splitlines()[-1])

        def show() -> None:
            if metrics := pretraining_metrics(last):
                print(", ".join(metrics))
            print(f"Backbone, for --backbone: {folder / 'backbone.safetensors'}")

        present(command, {"backbone": str(folder / "backbone.safetensors")} | last, show)
    return 0
