"""A whole result: the plan, the parts that are there already, and the engine that computes the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ..config import ToParts
from ..console.files import make_folder
from ..console.terminal import counted, fail, watched
from ..data.remote import filesystem, is_url
from ..errors import UserError
from .engine import write_parts
from .parts import Summary, finished_part, pyarrow_needed
from .plan import FORMAT, Chunk, Chunks, Shard, check_plan, inputs_digest, write_plan
from .scoring import MakeScore, OpenedRun, open_run, scorer_maker
from .sources import Item, list_items


def write_result(command: ToParts, accelerator: Accelerator, *, distance: bool = False) -> Summary:
    """Write the parts of `command.out` that are missing; returns the counts of all parts of this shard."""
    folder = str(command.out)
    check_settings(command, folder)
    items = list_items(command.images)
    main = accelerator.is_main_process
    opened = open_run(command.run, str(accelerator.device), intervention=command.intervention, announce=main)
    facts = plan_facts(command, opened, items)
    begin_together(folder, facts, accelerator)
    make = scorer_maker(
        opened, accelerator, kind=command.kind, distance=distance, batch=command.batch, workers=command.workers
    )
    chunks = Chunks(items, command.chunk)
    shard = Shard.parse(command.shard).among_processes(accelerator.process_index, accelerator.num_processes)
    own = [chunks[number] for number in shard.numbers(len(chunks))]
    total, missing = Summary(), []
    for chunk in own:
        there = finished_part(folder, chunk, facts)
        if there is None:
            missing.append(chunk)
        else:
            total += there
    if main and total.parts:
        verb = "is" if total.parts == 1 else "are"
        print(f"sightline: {counted(total.parts, 'part')} {verb} finished already", file=sys.stderr)
    for done in watched(compute(command, folder, missing, opened, make, facts), len(missing), "parts"):
        total += done
    return sum(gather_object([total]), Summary())


def report(what: str, place: str, summary: Summary) -> int:
    """Print what was made; the exit code of the command."""
    print(f"{what}: {place} ({counted(summary.parts, 'part')}, {counted(summary.images)})")
    if summary.unseen:
        print(f"note: empty sight for {counted(summary.unseen)}: these carry no information", file=sys.stderr)
    if summary.unreadable:
        return fail(f"{summary.unreadable:,} of {summary.images:,} images could not be read (column error)", 1)
    return 0


def check_settings(command: ToParts, folder: str) -> None:
    pyarrow_needed(f"--out {folder}")
    Shard.parse(command.shard)
    if is_url(folder):
        filesystem(folder)


def plan_facts(command: ToParts, opened: OpenedRun, items: list[Item]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": command.kind,
        "weights": opened.weights,
        "intervention": opened.intervention,
        "inputs": inputs_digest(items),
        "images": len(items),
        "chunk": command.chunk,
        "size": list(opened.model.expects.size),
        "classes": list(opened.model.classes),
    }


def begin_together(folder: str, facts: dict[str, Any], accelerator: Accelerator) -> None:
    """The main process writes the plan; then every process checks that it is its own, too."""
    problem = None
    if accelerator.is_main_process:
        try:
            if not is_url(folder):
                make_folder(Path(folder))
            if not check_plan(folder, facts):
                write_plan(folder, facts)
        except UserError as error:
            problem = str(error)
    (problem,) = broadcast_object_list([problem])
    if problem is not None:
        raise UserError(problem)
    check_plan(folder, facts)


def compute(
    command: ToParts, folder: str, missing: list[Chunk], opened: OpenedRun, make: MakeScore, facts: dict[str, Any]
) -> Iterator[Summary]:
    if not missing:
        return
    if command.engine == "ray":
        from .ray_engine import write_parts_with_ray

        yield from write_parts_with_ray(command, folder, missing, make, facts)
    else:
        score = make(opened.model)
        yield from write_parts(folder, missing, score, facts, batch=command.batch, workers=command.workers)
