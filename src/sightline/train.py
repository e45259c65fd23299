"""`sightline train`: the only training loop, to be read from top to bottom.

    sightline train erm DATA                                                      # one GPU, or the CPU
    accelerate launch --num_processes 8 -m sightline train erm DATA               # eight GPUs
    accelerate launch --num_machines 2 --machine_rank R --main_process_ip HOST --num_processes 16 -m sightline train ...

Everything random in a step depends on the seed, the epoch and the positions of the images in it, and on nothing else:
not on the number of processes, not on interruptions. So a resumed run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from .config import Loop, Pdiscoformer, Train
from .console.checksums import write_json_with_checksum
from .console.terminal import is_main_process
from .data.rows import Rows, carve_validation, read_rows
from .errors import UserError
from .load import measure
from .methods import maker_of
from .metrics.coverage import predict_and_measure
from .sight import Method
from .training.baseline import compare_with_baseline
from .training.batches import class_log_prior, positions_in_epoch, split_batches, training_batches, training_view
from .training.checkpoint import CheckpointTimer, load_tensors, pack, save_tensors, unpack_optimizer, unpack_weights
from .training.checks import (
    check_copies,
    check_divisible,
    check_files_exist,
    check_processes,
    check_same_precision,
    suggesting_check,
    validate_config,
)
from .training.distributed import deterministic, make_accelerator, shard_parameters, whole
from .training.machine import micro_batch_count
from .training.progress import Progress, Speed, now
from .training.run_folder import RESUME, Run, begin_run, digests_of, read_run, run_ending
from .training.schedule import base_lr, cosine_decay, make_optimizer, set_learning_rate, update_ema, warmup_factor
from .training.state import LoopPosition, TrainState, own_sum
from .training.stopping import stopping_between_steps
from .training.trackers import epoch_logger
from .training.trainable import StepInfo, Trainable, TrainBatch, TrainContext
from .vit.blocks import Block
from .vit.model import Input

# ---- the whole run ---------------------------------------------------------------------------------------------------


def train(config: Train, make: Callable[..., tuple[Any, Input]] | None = None) -> Path:
    """Train a method on a dataset; returns the run folder. `make` replaces the method's own `make_NAME`."""
    rows = read_rows(config.data, layout=config.layout, seed=config.split_seed)
    validate_config(config, rows)
    used = carve_validation(rows, seed=config.split_seed) if config.select_on == "train-split" else rows
    with deterministic(config.deterministic), suggesting_check(config, rows), run_ending(config.folder):
        accelerator = make_accelerator(config.device, config.precision)
        check_processes(config, rows, accelerator.num_processes)
        run = begin_together(config, rows, accelerator)
        model, expects = (make or maker_of(config.method))(config, used, run, accelerator)
        context = TrainContext(model.with_masks(used), run, accelerator, expects)
        if isinstance(config, Loop):
            model.prepare(context, train)
            model = fit(model, context, config)
        method = cast(Method, model)
        final_evaluation(method, replace(context, rows=method.with_masks(rows)), config)
    return run.folder


def begin_together(config: Train, rows: Rows, accelerator: Accelerator) -> Run:
    """The main process creates the run folder, the others read it; if it cannot be created, all of them stop."""
    run, problem = None, None
    if accelerator.is_main_process:
        try:
            check_files_exist(rows)
            copies = check_copies(config, rows)
            run = begin_run(config, rows)
            precision = check_same_precision(run, accelerator)
            device = str(accelerator.device)
            run.note(copies=copies, processes=accelerator.num_processes, device=device, precision=precision)
        except UserError as error:
            problem = str(error)
    (problem,) = broadcast_object_list([problem])
    if problem is not None:
        raise UserError(problem)
    return run or read_run(config.folder)


def final_evaluation(model: Method, context: TrainContext, config: Train) -> None:
    """Predictions and metrics of the selected checkpoint, on the validation data and, once, on the test data."""
    metrics, seen, main, folder = {}, {}, context.accelerator.is_main_process, context.run.folder / "predictions"
    for split in ("val", "test"):
        if not len(context.rows.split_indices(split)):
            continue
        with closing(split_batches(context, split, config, masks=model.needs_masks)) as batches:
            predictions, summary = predict_and_measure(model, context.rows, batches, context.accelerator)
        if main:
            folder.mkdir(exist_ok=True)
            predictions.save_csv(folder / f"{split}.csv")
            metrics[split] = measure(predictions, context.run).to_dict()
        if summary is not None:
            seen[split] = summary.to_dict()
    if main:
        rule = context.run.facts["selection"]
        content = {"selected_by": rule["metric"], "selected_on": rule["on"], "splits": metrics}
        content |= {"sight": seen} if seen else {}
        content |= digests_of(context.run, context.run.folder) | {"copies": context.run.facts.get("copies", "")}
        write_json_with_checksum(context.run.folder / "metrics.json", content, remedy=RESUME)
        context.run.note(state="finished")
    context.accelerator.wait_for_everyone()


# ---- the loop --------------------------------------------------------------------------------------------------------


def fit(model: Trainable, context: TrainContext, config: Loop) -> Trainable:
    """Train `model`, and return it with the checkpoint that scored best on the validation data."""
    with ExitStack() as to_close:
        state = set_up(model, context, config, to_close)
        while state.position.epoch < config.epochs and not state.position.finished:
            speed = train_epoch(state)
            line = validate(state)
            state.progress.epoch(line, config.select, speed)
            if state.position.finished and context.accelerator.is_main_process:
                context.run.note(speed=speed.to_dict())
            state.log_line(line)
            if state.stopping.agreed():
                stop(state)
    context.accelerator.wait_for_everyone()
    for module in model.modules():
        module._compiled_call_impl = None  # as in `validate`
    best = state.replica or model
    best.load_state_dict(load_tensors(context.run.best, checksum=context.run.has_checksums)[0])
    return best.eval()


def set_up(model: Trainable, context: TrainContext, config: Loop, to_close: ExitStack) -> TrainState:
    accelerator = context.accelerator
    batches = training_batches(context, config, model)
    to_close.callback(batches.close)
    val_batches = split_batches(context, "val", config, masks=model.needs_masks)
    to_close.callback(val_batches.close)
    model.to(accelerator.device).class_log_prior = class_log_prior(context, config)
    ema, replica = (
        copy.deepcopy(model).eval().requires_grad_(False) if one else None for one in (config.ema, config.fsdp)
    )
    stored_on = torch.device("cpu") if config.fsdp else accelerator.device
    tensors, position = resume_state(context.run, model, ema, accelerator, config.resume, stored_on)
    if config.fsdp:
        check_divisible(model, config, accelerator.num_processes)
        shard_parameters(model, accelerator)
    optimizer = make_optimizer(model, config, batches, accelerator.device)
    unpack_optimizer(tensors, optimizer)
    if config.compile:
        compile_blocks(model)
    wrapped, optimizer = (model, optimizer) if config.fsdp else accelerator.prepare(model, optimizer)
    done, main = position.epoch * len(batches) + position.step, accelerator.is_main_process
    cheaper = cheaper_ways(config) if accelerator.device.type == "cpu" else ""
    steps = config.epochs * len(batches)
    processes, cached = accelerator.num_processes, config.cache is not None
    progress = Progress(steps, done, main, processes=processes, cheaper=cheaper, cached=cached)
    to_close.callback(progress.close)
    return TrainState(
        model=model, wrapped=wrapped, optimizer=optimizer, ema=ema, replica=replica, position=position, batches=batches,
        val_batches=val_batches, augment=training_view(config.augment, context.expects)[1], progress=progress,
        log_line=epoch_logger(context.run, config, main, to_close),
        timer=CheckpointTimer(config.save_minutes, accelerator),
        stopping=to_close.enter_context(stopping_between_steps(accelerator)), context=context, config=config,
    )  # fmt: skip


def cheaper_ways(config: Loop) -> str:
    """What takes less time on a machine without a GPU."""
    smaller = "" if config.backbone == "sightline-nano" else ", or --backbone sightline-nano"
    data, backbone = shlex.quote(str(config.data)), shlex.quote(config.backbone)
    return f"Cheaper: `sightline train probe {data} --backbone {backbone}`, `train a2`{smaller}; Ctrl+C stops."


def train_epoch(state: TrainState) -> Speed:
    """The steps of one epoch, or the remaining ones after a resume."""
    position, config, batches, model = state.position, state.config, state.batches, state.model
    accelerator, device = state.context.accelerator, state.context.accelerator.device
    model.train()
    began, waited, first, settings = now(device), batches.wait_seconds, position.step, None
    try:
        for batch in batches.epoch(position.epoch, start=position.step):
            positions = positions_in_epoch(position.step, len(batch), batches)
            info = StepInfo(config.seed, position.epoch, position.step, config.epochs, len(batches), positions)
            set_learning_rate(state.optimizer, info, config.warmup)
            torch.manual_seed(step_seed(info, accelerator.process_index))
            train_batch = model.make_train_batch(batch.to(device), state.augment, info)
            position.micro_batches = position.micro_batches or micro_batch_count(state, train_batch)
            settings = settings or replace(config, grad_accum=position.micro_batches)
            losses = train_step(state.wrapped, train_batch, state.optimizer, accelerator, settings, batches.batch)
            model.after_step(info)
            if state.ema is not None and config.ema:
                update_ema(state.ema, model, config.ema, info.number)
            for name, value in losses.items():
                position.sums[name] = position.sums[name] + value if name in position.sums else value
            position.step += 1
            share = len(batch) / batches.batch
            state.progress.step(lambda loss=losses["loss"], share=share: float(loss) / share)
            if state.timer.due():
                save(state)
            if state.stopping.after_step():
                stop(state)
    except UserError:  # a second signal may have ended the data-loading processes
        if state.stopping.alone and state.stopping.requested.is_set():
            stop(state)
        raise
    return Speed((position.step - first) * batches.batch, now(device) - began, batches.wait_seconds - waited)


def validate(state: TrainState) -> dict[str, Any]:
    """Validate after an epoch, with EMA weights if there are any, and remember the best checkpoint; returns the log
    line."""
    position, config, context = state.position, state.config, state.context
    epoch, main = position.epoch + 1, context.accelerator.is_main_process
    lr = base_lr(config, state.batches)
    lr *= cosine_decay(position.epoch, config.epochs) * warmup_factor(epoch, config.warmup)
    sums = position.by_process(context.accelerator)
    losses = {name: sum(values) / max(1, position.step) for name, values in sums.items()}
    check_divergence(losses, state)
    candidate = (undivided(state) if state.ema is None else state.ema).eval()
    # Not compiled: batches that hide different numbers of patches would be compiled again and again.
    with torch.compiler.set_stance("force_eager") if config.compile else nullcontext():
        metrics = candidate.validate(state.val_batches, context, config.select)
    score = metrics[config.select]
    line = {"epoch": epoch, "lr": lr, "batch": state.batches.batch} | losses | metrics
    if position.best is None or score > position.best:
        position.best, position.best_epoch = score, epoch
        position.unsaved = {name: w.to("cpu", copy=True) for name, w in candidate.state_dict().items() if main}
    position.epoch, position.step, position.sums = epoch, 0, {}
    lost_patience = config.patience is not None and epoch - (position.best_epoch or 0) >= config.patience
    position.finished = lost_patience or epoch >= config.epochs
    if main:
        context.run.log(line)
    if state.timer.due_after_epoch() or position.finished:
        save(state)
    return line


def undivided(state: TrainState) -> Trainable:
    """The model; with FSDP the copy that is on every process, with the present weights."""
    if state.replica is None:
        return state.model
    copies = state.replica.state_dict()
    for name, tensor in state.model.state_dict().items():  # one at a time: no second copy in memory
        copies[name].copy_(whole(tensor))
    return state.replica


def train_step(wrapped, batch: TrainBatch, optimizer, accelerator, config: Loop, total: int) -> dict[str, Tensor]:
    """One optimiser step on this process's share of a batch of `total` images, with gradient accumulation and clipping;
    returns the losses, weighted by that share."""
    pieces = batch.micro_batches(min(config.grad_accum or 1, len(batch.labels)))
    sums: dict[str, Tensor] = {}
    for k, piece in enumerate(pieces):
        last = k == len(pieces) - 1
        with nullcontext() if last else accelerator.no_sync(wrapped):
            losses = wrapped(piece)
            # Gradients are averaged over the processes, so each piece is weighted by its share of the whole batch.
            weight = len(piece.labels) * accelerator.num_processes / total
            accelerator.backward(losses["loss"] * weight)
        for name, value in losses.items():
            sums[name] = sums.get(name, 0) + value.detach() * weight / accelerator.num_processes
    if config.clip_grad:
        accelerator.clip_grad_norm_(wrapped.parameters(), config.clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    return sums


def step_seed(info: StepInfo, rank: int) -> int:
    """The seed of dropout and the like: a different one for every step of every process."""
    return int(np.random.SeedSequence([info.seed, info.epoch, info.step, rank]).generate_state(1, np.uint64)[0] >> 1)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks one by one: they share their code, so that compile time does not grow with depth."""
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()


# ---- checkpoints and resuming ----------------------------------------------------------------------------------------


def save(state: TrainState) -> None:
    """Save the training state, unless the loss has diverged. All processes must call this."""
    accelerator = state.context.accelerator
    sums = state.position.by_process(accelerator)
    check_divergence({name: sum(values) for name, values in sums.items()}, state)
    save_best(state)
    main = accelerator.is_main_process
    if main or state.config.fsdp:
        tensors = pack(state.model, getattr(state.optimizer, "optimizer", state.optimizer), state.ema, keep=main)
        if main:
            save_tensors(state.context.run.last, tensors, state.position.stored(sums), RESUME)


def save_best(state: TrainState) -> None:
    """Saved together with the training state: otherwise a resumed run could not tell where the best weights came
    from."""
    position = state.position
    if position.unsaved:
        facts = {"epoch": position.best_epoch, "score": position.best, "metric": state.config.select}
        facts["on"] = state.config.select_on
        save_tensors(state.context.run.best, position.unsaved, facts, RESUME)
        position.unsaved = {}


def resume_state(
    run: Run, model, ema, accelerator: Accelerator, resume: bool, stored_on: torch.device
) -> tuple[dict[str, Tensor], LoopPosition]:
    """Load the weights of the last checkpoint, if the run is resumed and there is one; returns all its tensors, on
    `stored_on`, and where to start from."""
    tensors, position, device, main = {}, LoopPosition(), accelerator.device, accelerator.is_main_process
    if resume and run.last.exists():
        tensors, facts = load_tensors(run.last, checksum=run.has_checksums)
        tensors = {name: tensor.to(stored_on) for name, tensor in tensors.items()}
        unpack_weights(tensors, model, ema)
        sums = {name: own_sum(value, accelerator) for name, value in facts["sums"].items()}
        facts["sums"] = {name: torch.tensor(value, device=device) for name, value in sums.items()}
        position = LoopPosition(**facts)
        position.micro_batches = position.micro_batches or run.facts["config"].get("grad_accum") or 0
    if main:
        run.cut_log(position.epoch)
    accelerator.wait_for_everyone()
    return tensors, position


def check_divergence(losses: dict[str, float], state: TrainState) -> None:
    if not math.isfinite(losses.get("loss", 0.0)):
        save_best(state)
        raise UserError(
            f"{state.context.run.folder}: the loss diverged (NaN or infinite) in epoch {state.position.epoch + 1}; "
            "train again with a lower --lr. Earlier checkpoints are intact"
        )


def stop(state: TrainState) -> None:
    save(state)
    raise KeyboardInterrupt


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Train) -> int:
    from .evaluate import print_result

    folder, main = train(command), is_main_process()
    if isinstance(command, Pdiscoformer) and command.baseline:
        compare_with_baseline(command, train, main)
    if main:
        print_result(command, folder, "test")
    return 0
