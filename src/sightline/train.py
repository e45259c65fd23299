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
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .answers import Answers
from .checkpoint import load_tensors, pack, save_tensors, save_text, unpack
from .config import Loop, Train
from .data.augment import PRESETS, Augment, Pictures
from .data.batches import Batch, Batches, balanced
from .data.cache import Cache
from .data.images import Canvas
from .data.rows import Rows, read_rows
from .errors import UserError
from .evaluate import evaluate, score
from .methods import trainer_of
from .predict import answer
from .progress import Progress, Speed
from .runs import Run, begin
from .sight import Method
from .vit import Input

CANVAS = 0.875  # pictures are decoded a little larger than they are used, so that crops have room


@dataclass(frozen=True)
class Lesson:
    """What a method learns from in one step."""

    images: Tensor  # float [b, 3, h, w] in [0, 1], augmented
    labels: Tensor  # int64 [b]
    groups: Tensor | None
    masks: Tensor | None  # bool [b, h, w], moved along with the images
    indices: Tensor  # int64 [b], into the rows


@dataclass(frozen=True)
class Group:
    """Parameters that are trained alike."""

    parameters: list[nn.Parameter]
    lr: float = 1.0  # times the learning rate
    decay: bool = True


class Learner(Protocol):
    """What a method adds to learn step by step. Its forward pass takes a Lesson and gives losses, `loss` among them."""

    learns_from_masks: bool

    def parameter_groups(self, head_lr: float) -> list[Group]: ...


@dataclass(frozen=True)
class Desk:
    """All that training needs at hand."""

    rows: Rows
    run: Run
    accelerator: Accelerator
    expects: Input


@dataclass
class State:
    """How far training has come."""

    epoch: int = 0
    step: int = 0  # in this epoch
    best: float | None = None
    best_epoch: int | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)  # of this epoch's losses so far; on the device, unasked for
    finished: bool = False


# ---- the whole run ---------------------------------------------------------------------------------------------------


def train(config: Train) -> Path:
    """Data in, run folder out."""
    rows = read_rows(config.data, layout=config.layout, seed=config.seed)
    for split in ("train", "val"):
        if not len(rows.where(split)):
            raise UserError(f"{config.data}: no pictures in the split {split!r}; `sightline check` says more")
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        run = begin(replace(config, resume=config.resume or not accelerator.is_main_process), rows)
    model, expects = trainer_of(config.method)(config, rows, run, accelerator)
    conclude(model, Desk(rows, run, accelerator, expects), config)
    return run.folder


def make_accelerator(config: Train) -> Accelerator:
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no GPU that torch can use")
    return Accelerator(cpu=config.device == "cpu", mixed_precision="bf16" if config.precision == "bf16" else "no")


def conclude(model: Method, desk: Desk, config: Train) -> None:
    """Answers and metrics of the chosen weights, on the validation data and, once, on the test data."""
    metrics = {}
    for split in ("val", "test"):
        indices = desk.rows.where(split)
        if not len(indices):
            continue
        answers = answer(
            model, desk.rows, indices, desk.expects, desk.accelerator, batch=config.batch, workers=config.workers
        )
        if desk.accelerator.is_main_process:
            (desk.run.folder / "predictions").mkdir(exist_ok=True)
            answers.save_csv(desk.run.folder / "predictions" / f"{split}.csv")
            metrics[split] = evaluate(answers, train_group_counts=train_counts(desk.rows)).to_dict()
    if desk.accelerator.is_main_process:
        chosen = {"selected_by": config.select, "selected_on": "val", "splits": metrics}
        save_text(desk.run.folder / "metrics.json", json.dumps(chosen, indent=1, ensure_ascii=False) + "\n")
        desk.run.note(state="finished")
    desk.accelerator.wait_for_everyone()


def train_counts(rows: Rows) -> dict[str, int] | None:
    if rows.groups is None:
        return None
    counts = np.bincount(rows.groups[rows.where("train")], minlength=len(rows.group_names))
    return dict(zip(rows.group_names, map(int, counts), strict=True))


# ---- the loop --------------------------------------------------------------------------------------------------------


def fit(model: nn.Module, desk: Desk, config: Loop) -> nn.Module:
    """Train `model`, and return it with the weights that scored best on the validation data."""
    accelerator, run = desk.accelerator, desk.run
    batches = training_batches(desk, config, masks=cast(Learner, model).learns_from_masks)
    augment = augmentation(config, desk.expects)
    optimizer = make_optimizer(model, config, steps=len(batches) * config.epochs)
    average = copy.deepcopy(model).eval().requires_grad_(False) if config.average else None
    model.to(accelerator.device)
    if average is not None:
        average.to(accelerator.device)
    state = go_on(run, model, optimizer, average, accelerator.device)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    progress = Progress(
        config.epochs * len(batches), state.epoch * len(batches) + state.step, accelerator.is_main_process
    )
    board = tensorboard(run, config, accelerator)
    saved = time.monotonic()

    for epoch in range(state.epoch, config.epochs if not state.finished else 0):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * cosine(epoch, config.epochs)
        model.train()
        began, waited = time.perf_counter(), batches.waited
        for batch in batches.epoch(epoch, start=state.step):
            places = places_in_epoch(state.step, len(batch), batches)
            lesson = prepare(batch, augment, config.seed, epoch, places, accelerator.device)
            losses = take_step(wrapped, lesson, optimizer, accelerator, config, state, batches.batch)
            if average is not None and config.average:
                follow(average, model, config.average, epoch * len(batches) + state.step)
            for name, value in losses.items():
                state.sums[name] = state.sums[name] + value if name in state.sums else value
            state.step += 1
            progress.step(lambda: float(state.sums["loss"]) / state.step)
            if time.monotonic() - saved > 60 * config.save_minutes:
                save(run, model, optimizer, average, state, accelerator)
                saved = time.monotonic()
        trained = time.perf_counter()
        line = {"epoch": epoch + 1, "lr": config.lr * cosine(epoch, config.epochs)} | mean_losses(state, accelerator)
        refuse_divergence(line, run)
        candidate = average if average is not None else model
        answers = validate(candidate, desk, config)
        line |= {config.select: score(answers, config.select), "accuracy": score(answers, "accuracy")}
        if state.best is None or line[config.select] > state.best:
            state.best, state.best_epoch = line[config.select], epoch + 1
            if accelerator.is_main_process:
                facts = {"epoch": epoch + 1, "score": state.best, "metric": config.select, "on": "val"}
                save_tensors(run.best, candidate.state_dict(), facts)
        state.epoch, state.step, state.sums = epoch + 1, 0, {}
        state.finished = config.patience is not None and epoch + 1 - (state.best_epoch or 0) >= config.patience
        if accelerator.is_main_process:
            run.log(line)
        save(run, model, optimizer, average, state, accelerator)
        speed = Speed(len(batches) * batches.batch, trained - began, batches.waited - waited)
        progress.epoch(line, config.select, speed)
        if accelerator.is_main_process:
            run.note(speed=speed.to_dict())
        for name, value in line.items():
            board(name, value, epoch + 1)
        if state.finished:
            break
    progress.close()
    batches.close()
    accelerator.wait_for_everyone()
    model.load_state_dict(load_tensors(run.best)[0])
    return model.eval()


def take_step(
    wrapped, lesson: Lesson, optimizer, accelerator, config: Loop, state: State, total: int
) -> dict[str, Tensor]:
    """One update from this process's share of a batch of `total`; the losses, each weighed by that share."""
    torch.manual_seed(step_seed(config.seed, state.epoch, state.step, accelerator.process_index))
    parts = split(lesson, min(config.accumulate, len(lesson.labels)))
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


def split(lesson: Lesson, parts: int) -> list[Lesson]:
    if parts == 1:
        return [lesson]
    chunks = {name: value.chunk(parts) for name, value in vars(lesson).items() if value is not None}
    count = len(chunks["labels"])
    return [replace(lesson, **{name: chunk[k] for name, chunk in chunks.items()}) for k in range(count)]


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """For dropout and the like: a number of its own for every step of every process."""
    return int(np.random.SeedSequence([seed, epoch, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def places_in_epoch(step: int, count: int, batches: Batches) -> Tensor:
    """int64 [count]: where this process's pictures stand in the epoch, whoever else shares the batch."""
    each, longer = divmod(batches.batch, batches.world)
    start = step * batches.batch + batches.rank * each + min(batches.rank, longer)
    return torch.arange(start, start + count)


def prepare(batch: Batch, augment: Augment, seed: int, epoch: int, places: Tensor, device: torch.device) -> Lesson:
    """Each place has a view of its own, so that a picture drawn twice in an epoch is not seen twice alike."""
    batch = batch.to(device)
    seen = augment(Pictures(batch.images, batch.masks), seed=seed, epoch=epoch, indices=places)
    return Lesson(seen.images, batch.labels, batch.groups, seen.masks, batch.indices)


def cosine(epoch: int, epochs: int) -> float:
    """The share of the learning rate in this epoch (from 0): constant within it, from 1 towards 0."""
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def make_optimizer(model: nn.Module, config: Loop, steps: int) -> torch.optim.Optimizer:
    """AdamW; the rate grows with the root of the batch, the decay falls with the root of the number of steps."""
    lr = config.lr * math.sqrt(config.batch / 128)
    decay = config.weight_decay / math.sqrt(max(1, steps))
    groups = [
        {
            "params": group.parameters,
            "lr": lr * group.lr,
            "initial_lr": lr * group.lr,
            "weight_decay": decay * group.decay,
        }
        for group in cast(Learner, model).parameter_groups(config.head_lr)
        if group.parameters
    ]
    return torch.optim.AdamW(groups, fused=torch.cuda.is_available() and config.device != "cpu")


def follow(average: nn.Module, model: nn.Module, decay: float, steps: int) -> None:
    """The moving average, with a warm-up so that it does not start from untrained weights."""
    decay = min(decay, (1 + steps) / (10 + steps))
    with torch.no_grad():
        for kept, current in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(current, 1 - decay)
        for kept, current in zip(average.buffers(), model.buffers(), strict=True):
            kept.copy_(current)


# ---- data ------------------------------------------------------------------------------------------------------------


def training_batches(desk: Desk, config: Loop, masks: bool) -> Batches:
    rows, accelerator = desk.rows, desk.accelerator
    indices = rows.where("train")
    h, w = desk.expects.size
    canvas = Canvas((round(h / CANVAS), round(w / CANVAS)), resample=desk.expects.resample)
    cache = open_cache(rows, canvas, indices, config, accelerator)
    codes = {"none": None, "classes": rows.labels, "groups": rows.groups}[config.balance]
    if config.balance == "groups" and codes is None:
        raise UserError("--balance groups: these data have no groups; give them a group column")
    return Batches(
        rows, indices, canvas, min(config.batch, len(indices)), shuffle=True, seed=config.seed, workers=config.workers,
        cache=cache, rank=accelerator.process_index, world=accelerator.num_processes, drop_last=True,
        weights=None if codes is None else balanced(codes, indices), pin=accelerator.device.type == "cuda", masks=masks,
    )  # fmt: skip


def open_cache(
    rows: Rows, canvas: Canvas, indices: np.ndarray, config: Train, accelerator: Accelerator
) -> Cache | None:
    if config.cache is None:
        return None
    with accelerator.main_process_first():
        cache = Cache.open(rows, canvas, config.cache, indices, workers=max(1, config.workers))
    return cache.to(accelerator.device) if accelerator.device.type == "cuda" else cache


def augmentation(config: Loop, expects: Input) -> Augment:
    return replace(PRESETS[config.augment], size=expects.size, crop=CANVAS, fill=expects.mean)


def validate(model: nn.Module, desk: Desk, config: Loop) -> Answers:
    model.eval()
    indices = desk.rows.where("val")
    cache = open_cache(desk.rows, Canvas.of(desk.expects), indices, config, desk.accelerator)
    return answer(
        cast(Method, model), desk.rows, indices, desk.expects, desk.accelerator,
        batch=config.batch, workers=config.workers, cache=cache,
    )  # fmt: skip


# ---- coming back -----------------------------------------------------------------------------------------------------


def save(run: Run, model, optimizer, average, state: State, accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        plain = getattr(optimizer, "optimizer", optimizer)
        facts = asdict(state) | {"sums": {name: float(value) for name, value in state.sums.items()}}
        save_tensors(run.last, pack(model, plain, average), facts)


def go_on(run: Run, model, optimizer, average, device: torch.device) -> State:
    """The state to start from: of the last checkpoint, if there is one."""
    if not run.last.exists():
        run.cut_log(0)
        return State()
    tensors, facts = load_tensors(run.last)
    unpack({name: tensor.to(device) for name, tensor in tensors.items()}, model, optimizer, average)
    run.cut_log(facts["epoch"])
    facts["sums"] = {name: torch.tensor(value, device=device) for name, value in facts["sums"].items()}
    return State(**facts)


def mean_losses(state: State, accelerator: Accelerator) -> dict[str, float]:
    names = sorted(state.sums)
    sums = torch.stack([state.sums[name].float() for name in names])
    means = accelerator.reduce(sums, "sum") / max(1, state.step)
    return dict(zip(names, means.tolist(), strict=True))


def refuse_divergence(line: dict[str, Any], run: Run) -> None:
    if not math.isfinite(line["loss"]):
        raise UserError(
            f"{run.folder}: the loss is no longer a number in epoch {line['epoch']}; train again with a lower --lr. "
            "The weights of the epochs before are intact"
        )


def tensorboard(run: Run, config: Loop, accelerator: Accelerator):
    if not config.tensorboard or not accelerator.is_main_process:
        return lambda *_: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard: install it first, with `pip install tensorboard`") from None
    return SummaryWriter(str(run.folder / "tensorboard")).add_scalar
