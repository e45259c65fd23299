"""The only training loop, read from top to bottom.

    sightline train erm DATA                                                      # one GPU, or the CPU
    accelerate launch --num_processes 8 -m sightline train erm DATA               # eight GPUs
    accelerate launch --num_machines 2 --machine_rank R --main_process_ip HOST --num_processes 16 -m sightline train ...

What happens in a step depends on the seed, the epoch and the pictures' places in it, and on nothing else: not on
how many processes share the batch, not on whether the run was interrupted. So a resumed run ends with the same bits.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from .config import Loop, Train
from .console.files import save_text
from .console.terminal import is_main_process
from .data.augment import Augment
from .data.batches import Batches
from .data.rows import Rows, read_rows
from .errors import UserError
from .methods import maker_of
from .metrics.groups import evaluate
from .metrics.inference import predict_batches
from .sight import Method
from .training.checkpoint import Clock, load_tensors, pack, save_tensors, unpack
from .training.context import (
    StepInfo,
    Trainable,
    TrainBatch,
    TrainContext,
    check_files_exist,
    check_processes,
    class_log_prior,
    deterministic,
    positions_in_epoch,
    split_batches,
    suggesting_check,
    training_batches,
    validate_config,
    view,
)
from .training.distributed import make_accelerator
from .training.progress import Progress, Speed, stopping_between_steps
from .training.run_folder import Run, begin, read_run, train_counts
from .training.trackers import Board, tensorboard
from .vit.model import Block

# ---- the whole run ---------------------------------------------------------------------------------------------------


def train(config: Train) -> Path:
    """Data in, run folder out."""
    rows = read_rows(config.data, layout=config.layout, seed=config.split_seed)
    validate_config(config, rows)
    with deterministic(config.deterministic), suggesting_check(config, rows):
        accelerator = make_accelerator(config.device, config.precision)
        check_processes(config, rows, accelerator.num_processes)
        run = begin_together(config, rows, accelerator)
        model, expects = maker_of(config.method)(config, rows, run, accelerator)
        desk = TrainContext(model.with_masks(rows), run, accelerator, expects)
        if isinstance(config, Loop):
            model.prepare(desk, train)
            model = fit(model, desk, config)
        final_evaluation(cast(Method, model), desk, config)
    return run.folder


def begin_together(config: Train, rows: Rows, accelerator: Accelerator) -> Run:
    """The main process begins the run, the others read it; if it cannot be begun, all of them stop."""
    run, problem = None, None
    if accelerator.is_main_process:
        try:
            check_files_exist(rows)
            run = begin(config, rows)
            run.note(processes=accelerator.num_processes, device=str(accelerator.device))
        except UserError as error:
            problem = str(error)
    (problem,) = broadcast_object_list([problem])
    if problem is not None:
        raise UserError(problem)
    return run or read_run(config.folder)


def final_evaluation(model: Method, desk: TrainContext, config: Train) -> None:
    """Answers and metrics of the chosen weights, on the validation data and, once, on the test data."""
    metrics, main, folder = {}, desk.accelerator.is_main_process, desk.run.folder / "predictions"
    for split in ("val", "test"):
        if not len(desk.rows.where(split)):
            continue
        with closing(split_batches(desk, split, config, masks=model.needs_masks)) as batches:
            answers = predict_batches(model, desk.rows, batches, desk.accelerator)
        if main:
            folder.mkdir(exist_ok=True)
            answers.save_csv(folder / f"{split}.csv")
            metrics[split] = evaluate(answers, train_group_counts=train_counts(desk.run)).to_dict()
    if main:
        rule = desk.run.facts["selection"]
        content = {"selected_by": rule["metric"], "selected_on": rule["on"], "splits": metrics}
        save_text(desk.run.folder / "metrics.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        desk.run.note(state="finished")
    desk.accelerator.wait_for_everyone()


# ---- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """How far training has come."""

    epoch: int = 0
    step: int = 0  # in this epoch
    best: float | None = None
    best_epoch: int | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)  # of this epoch's losses so far, this process's share of them
    finished: bool = False
    unsaved: dict[str, Tensor] = field(default_factory=dict)  # the best weights, on the main process, until a save


@dataclass(frozen=True)
class TrainState:
    """A model in training and everything that takes."""

    model: Trainable
    wrapped: nn.Module  # the same, for several processes
    optimizer: Any
    average: Trainable | None
    state: State
    batches: Batches
    exam: Batches
    augment: Augment
    progress: Progress
    board: Board
    clock: Clock
    stopping: threading.Event
    desk: TrainContext
    config: Loop


def fit(model: Trainable, desk: TrainContext, config: Loop) -> Trainable:
    """Train `model`, and return it with the weights that scored best on the validation data."""
    with ExitStack() as to_close:
        course = set_up(model, desk, config, to_close)
        while course.state.epoch < config.epochs and not course.state.finished:
            speed = train_epoch(course)
            line = validate(course)
            course.progress.epoch(line, config.select, speed)
            if course.state.finished and desk.accelerator.is_main_process:
                desk.run.note(speed=speed.to_dict())
            for name, value in line.items():
                course.board(name, value, line["epoch"])
            if course.stopping.is_set():
                stop(course)
    desk.accelerator.wait_for_everyone()
    for module in model.modules():
        module._compiled_call_impl = None  # as in `validate`
    model.load_state_dict(load_tensors(desk.run.best)[0])
    return model.eval()


def set_up(model: Trainable, desk: TrainContext, config: Loop, to_close: ExitStack) -> TrainState:
    accelerator = desk.accelerator
    batches = training_batches(desk, config, model)
    to_close.callback(batches.close)
    exam = split_batches(desk, "val", config, masks=model.needs_masks)
    to_close.callback(exam.close)
    model.to(accelerator.device).class_log_prior = class_log_prior(desk, config)
    average = copy.deepcopy(model).eval().requires_grad_(False) if config.average else None
    optimizer = make_optimizer(model, config, batches, accelerator.device)
    state = go_on(desk.run, model, optimizer, average, accelerator)
    if config.compile:
        compile_blocks(model)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    done, main = state.epoch * len(batches) + state.step, accelerator.is_main_process
    progress = Progress(config.epochs * len(batches), done, main, processes=accelerator.num_processes)
    to_close.callback(progress.close)
    return TrainState(
        model, wrapped, optimizer, average, state, batches, exam, view(config.augment, desk.expects)[1], progress,
        tensorboard(desk.run, config.tensorboard and main, to_close), Clock(config.save_minutes, accelerator),
        to_close.enter_context(stopping_between_steps(accelerator)), desk, config,
    )  # fmt: skip


def train_epoch(course: TrainState) -> Speed:
    """The steps of one epoch, or those that are left of it."""
    state, config, batches, learner = course.state, course.config, course.batches, course.model
    accelerator, device = course.desk.accelerator, course.desk.accelerator.device
    learner.train()
    began, waited, first = now(device), batches.waited, state.step
    try:
        for batch in batches.epoch(state.epoch, start=state.step):
            places = positions_in_epoch(state.step, len(batch), batches)
            when = StepInfo(config.seed, state.epoch, state.step, config.epochs, len(batches), places)
            set_learning_rate(course.optimizer, when, config.warmup)
            torch.manual_seed(step_seed(when, accelerator.process_index))
            lesson = learner.lesson(batch.to(device), course.augment, when)
            losses = train_step(course.wrapped, lesson, course.optimizer, accelerator, config, batches.batch)
            learner.after_step(when)
            if course.average is not None and config.average:
                update_ema(course.average, learner, config.average, when.number)
            for name, value in losses.items():
                state.sums[name] = state.sums[name] + value if name in state.sums else value
            state.step += 1
            share = len(batch) / batches.batch
            course.progress.step(lambda loss=losses["loss"], share=share: float(loss) / share)
            if course.clock.due():
                save(course)
            if course.stopping.is_set():
                stop(course)
    except UserError:  # the same Ctrl-C may have ended the processes that decode
        if course.stopping.is_set():
            stop(course)
        raise
    return Speed((state.step - first) * batches.batch, now(device) - began, batches.waited - waited)


def validate(course: TrainState) -> dict[str, Any]:
    """What the epoch has come to: the line for the log. The best weights so far are kept."""
    state, config, desk = course.state, course.config, course.desk
    epoch, main = state.epoch + 1, desk.accelerator.is_main_process
    rate = base_lr(config, course.batches) * cosine(state.epoch, config.epochs) * warmup_factor(epoch, config.warmup)
    losses = {name: total / max(1, state.step) for name, total in summed(state, desk.accelerator).items()}
    check_divergence(losses, course)
    candidate = course.model if course.average is None else course.average
    candidate.eval()
    # Not compiled: pictures that hide different shares would be compiled anew again and again.
    with torch.compiler.set_stance("force_eager") if config.compile else nullcontext():
        found = candidate.validate(course.exam, desk, config.select)
    result = found[config.select]
    line = {"epoch": epoch, "lr": rate, "batch": course.batches.batch} | losses | found
    if state.best is None or result > state.best:
        state.best, state.best_epoch = result, epoch
        state.unsaved = {name: each.to("cpu", copy=True) for name, each in candidate.state_dict().items() if main}
    state.epoch, state.step, state.sums = epoch, 0, {}
    lost_patience = config.patience is not None and epoch - (state.best_epoch or 0) >= config.patience
    state.finished = lost_patience or epoch >= config.epochs
    if main:
        desk.run.log(line)
    if course.clock.due_after_epoch() or state.finished:
        save(course)
    return line


def train_step(wrapped, lesson: TrainBatch, optimizer, accelerator, config: Loop, total: int) -> dict[str, Tensor]:
    """One update from this process's share of a batch of `total`; the losses, each weighed by that share."""
    parts = lesson.in_parts(min(config.accumulate, len(lesson.labels)))
    sums: dict[str, Tensor] = {}
    for k, part in enumerate(parts):
        last = k == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(wrapped):
            losses = wrapped(part)
            # Processes average their gradients, so each weighs its part by its share of the whole batch.
            weight = len(part.labels) * accelerator.num_processes / total
            accelerator.backward(losses["loss"] * weight)
        for name, value in losses.items():
            sums[name] = sums.get(name, 0) + value.detach() * weight / accelerator.num_processes
    if config.clip:
        accelerator.clip_grad_norm_(wrapped.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()
    return sums


def step_seed(when: StepInfo, rank: int) -> int:
    """For dropout and the like: a number of its own for every step of every process."""
    return int(np.random.SeedSequence([when.seed, when.epoch, when.step, rank]).generate_state(1, np.uint64)[0] >> 1)


def set_learning_rate(optimizer, when: StepInfo, warmup: float) -> None:
    """A cosine per epoch; in the first `warmup` epochs also a line from 0, per step."""
    share = cosine(when.epoch, when.epochs) * warmup_factor((when.number + 1) / when.steps, warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def warmup_factor(done: float, warmup: float) -> float:
    """The share of the learning rate that warming up allows at the end of `done` epochs."""
    return min(1.0, done / warmup) if warmup else 1.0


def cosine(epoch: int, epochs: int) -> float:
    """The share of the learning rate in this epoch (from 0): constant within it, from 1 towards 0."""
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def base_lr(config: Loop, batches: Batches) -> float:
    """It grows with the root of the batch that is really used, which a small data set may limit."""
    return config.lr * math.sqrt(batches.batch / 128)


def make_optimizer(model: Trainable, config: Loop, batches: Batches, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; the decay falls with the root of the number of steps."""
    lr = base_lr(config, batches)
    decay = config.weight_decay / math.sqrt(max(1, len(batches) * config.epochs))
    groups = [
        {"params": g.parameters, "lr": lr * g.lr, "initial_lr": lr * g.lr, "weight_decay": decay * g.decay}
        for g in model.parameter_groups(config.head_lr)
        if g.parameters
    ]
    return torch.optim.AdamW(groups, fused=device.type == "cuda")


def compile_blocks(model: nn.Module) -> None:
    """One block's code serves them all, so that waiting does not grow with depth."""
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()


def update_ema(average: nn.Module, model: nn.Module, decay: float, updates: int) -> None:
    """The moving average after `updates` earlier ones; the first is a copy, so untrained weights are forgotten."""
    decay = min(decay, 1 - (1 + updates) ** (-2 / 3))
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        for kept, current in zip(average.buffers(), model.buffers(), strict=True):
            kept.copy_(current)


def now(device: torch.device) -> float:
    """Once the device has done what it was asked for so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- coming back -----------------------------------------------------------------------------------------------------


def save(course: TrainState) -> None:
    """Never the weights that a loss which is no number has led to. All processes must take part."""
    state, accelerator = course.state, course.desk.accelerator
    sums = summed(state, accelerator)
    check_divergence(sums, course)
    save_best(course)
    if accelerator.is_main_process:
        plain = getattr(course.optimizer, "optimizer", course.optimizer)
        facts = {name: value for name, value in vars(state).items() if name not in ("sums", "unsaved")} | {"sums": sums}
        save_tensors(course.desk.run.last, pack(course.model, plain, course.average), facts)


def save_best(course: TrainState) -> None:
    """Together with the rest: a run that goes on from before would not know where they came from."""
    state = course.state
    if state.unsaved:
        facts = {"epoch": state.best_epoch, "score": state.best, "metric": course.config.select, "on": "val"}
        save_tensors(course.desk.run.best, state.unsaved, facts)
        state.unsaved = {}


def go_on(run: Run, model, optimizer, average, accelerator: Accelerator) -> State:
    """The state to start from: of the last checkpoint, if there is one."""
    state, device, main = State(), accelerator.device, accelerator.is_main_process
    if run.last.exists():
        tensors, facts = load_tensors(run.last)
        unpack({name: tensor.to(device) for name, tensor in tensors.items()}, model, optimizer, average)
        # The sums are of all processes; one of them carries them on.
        facts["sums"] = {name: torch.tensor(value * main, device=device) for name, value in facts["sums"].items()}
        state = State(**facts)
    if main:
        run.cut_log(state.epoch)
    accelerator.wait_for_everyone()
    return state


def summed(state: State, accelerator: Accelerator) -> dict[str, float]:
    """This epoch's losses so far, over the steps and the processes."""
    if not state.sums:
        return {}
    names = sorted(state.sums)
    sums = torch.stack([state.sums[name].float() for name in names])
    return dict(zip(names, accelerator.reduce(sums, "sum").tolist(), strict=True))


def check_divergence(losses: dict[str, float], course: TrainState) -> None:
    if not math.isfinite(losses.get("loss", 0.0)):
        save_best(course)
        raise UserError(
            f"{course.desk.run.folder}: the loss is no longer a number in epoch {course.state.epoch + 1}; train again "
            "with a lower --lr. The weights saved before are intact"
        )


def stop(course: TrainState) -> None:
    save(course)
    raise KeyboardInterrupt


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Train) -> int:
    from .evaluate import show_metrics

    folder = train(command)
    if is_main_process():
        show_metrics(folder, "test")
        print(f"The run is in {folder}.")
    return 0
