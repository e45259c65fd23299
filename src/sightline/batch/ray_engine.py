"""The engine past one machine: Ray Data sends chunks to copies of the model, each of which writes its own parts.

A chunk that was lost with its worker is sent again, and a part is written in one step, so that nothing is lost and
nothing is there twice. A copy computes a chunk exactly as the local engine does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import ToParts
from ..data.remote import is_url
from ..errors import UserError
from .parts import Summary
from .plan import Chunk
from .scoring import MakeScore, open_run
from .sources import Item

MOST_BLOCKS = 10_000  # that a plan is divided into for Ray's scheduler


class PartWriter:
    """On a worker: a copy of the model. Takes one chunk at a time, and returns its counts, or an error."""

    def __init__(self, settings: Mapping[str, Any], make: MakeScore, facts: Mapping[str, Any]):
        self.settings, self.make, self.facts, self.score = settings, make, facts, None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"result": [self.result(text) for text in batch["chunk"]]}

    def result(self, text: str) -> str:
        number, start, items = json.loads(text)
        try:
            summary = self.write(Chunk(number, start, [Item(*item) for item in items]))
        except UserError as error:
            return json.dumps({"problem": str(error)})
        return json.dumps(vars(summary))

    def write(self, chunk: Chunk) -> Summary:
        from ..training.distributed import make_accelerator
        from .engine import write_parts

        settings = self.settings
        if self.score is None:
            device = str(make_accelerator(settings["device"]).device)
            opened = open_run(settings["run"], device, intervention=settings["intervention"], announce=False)
            if (opened.weights, opened.intervention) != (self.facts["weights"], self.facts["intervention"]):
                raise UserError(
                    f"{settings['run']}: another model than where the command was given; use one that all see"
                )
            self.score = self.make(opened.model)
        (summary,) = write_parts(
            settings["folder"], [chunk], self.score, self.facts,
            batch=settings["batch"], workers=0, threads=settings["threads"],
        )  # fmt: skip
        return summary


def write_parts_with_ray(
    command: ToParts, folder: str, missing: list[Chunk], make: MakeScore, facts: Mapping[str, Any]
) -> Iterator[Summary]:
    for place in (folder, *map(str, command.images)):
        if place.startswith("memory://"):
            raise UserError(f"{place}: lies in the memory of this process, where Ray's workers cannot see it")
    if command.workers < 1:
        raise UserError(f"--workers {command.workers}: with --engine ray there must be at least one")
    with cluster() as ray:
        resources = resources_per_worker(ray, command)
        settings = {
            "run": anywhere(str(command.run)), "folder": anywhere(folder), "device": command.device,
            "intervention": command.intervention, "batch": command.batch, "threads": max(1, int(resources["num_cpus"])),
        }  # fmt: skip
        chunks = [{"chunk": shipped(chunk)} for chunk in missing]
        data = ray.data.from_items(chunks, override_num_blocks=min(len(chunks), MOST_BLOCKS))
        results = data.map_batches(
            PartWriter, batch_size=1, compute=ray.data.ActorPoolStrategy(size=min(command.workers, len(chunks))),
            fn_constructor_args=(settings, make, dict(facts)), **resources,
        )  # fmt: skip
        done = 0
        for row in results.iter_rows():
            result = json.loads(row["result"])
            if "problem" in result:
                raise UserError(result["problem"])
            done += 1
            yield Summary(**result)
        if done != len(missing):
            raise UserError(f"{folder}: {done:,} of {len(missing):,} parts were written; run the same command again")


def shipped(chunk: Chunk) -> str:
    """A chunk as text, with paths that do not depend on the folder a worker runs in."""
    items = [item._replace(place=anywhere(item.place)) for item in chunk.items]
    return json.dumps([chunk.number, chunk.start, items])


def anywhere(place: str) -> str:
    return place if is_url(place) or place.startswith("hf:") else str(Path(place).absolute())


def resources_per_worker(ray: Any, command: ToParts) -> dict[str, float]:
    """A GPU each, and its share of the cores to decode with; or one core each, where there is no GPU."""
    total = ray.cluster_resources()
    if command.device == "cpu" or not total.get("GPU"):
        if command.device == "cuda":
            raise UserError("--device cuda: the Ray cluster has no GPU; choose --device cpu")
        return {"num_cpus": 1}
    return {"num_gpus": 1, "num_cpus": max(1, int(total["CPU"] // max(command.workers, total["GPU"])))}


@contextmanager
def cluster() -> Generator[Any]:
    """Ray, connected to the cluster of RAY_ADDRESS or to one that is started here and ends with the work."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise UserError("--engine ray: not installed; pip install 'sightline[ray]'") from None
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        except ConnectionError as error:
            address = os.environ.get("RAY_ADDRESS", "")
            raise UserError(f"--engine ray: no Ray cluster answers at {address} ({error}); start it first") from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray").setLevel(logging.ERROR)  # Ray Data reports its plans and resources
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()
