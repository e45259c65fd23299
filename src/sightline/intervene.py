"""`sightline intervene`: what a user says of a run, or validation data do, done and kept with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from .console.terminal import is_main_process, print_notes
from .data.batches import Batches
from .data.rows import Rows
from .errors import UserError
from .interventions.apply import (
    QUANTILES,
    SEARCH_FILE,
    CachedLook,
    calibrate,
    calibrated,
    keep,
    kept,
    measured_search,
    only_names,
)
from .interventions.file import FILE, DistanceSketch, Intervention, parse_names
from .interventions.search import Search, search, table
from .load import Model
from .methods.base import PartMethod, part_method
from .metrics.inference import inference_batches
from .vit.weights import weights_sha256

if TYPE_CHECKING:
    from .config import Intervene
    from .load import EvaluationData

DRAWN = 8  # pictures


@dataclass(frozen=True)
class Outcome:
    """What is kept now, and what was measured, now or before."""

    parts: int
    intervention: Intervention | None
    measured: dict[str, Any] | None
    search: Search | None = None
    notes: tuple[str, ...] = ()  # on data that are not the run's own
    replaced: Intervention | None = None  # by what was found

    @property
    def sentences(self) -> list[str]:
        said, now = [] if self.search is None else [self.search.sentence], self.intervention or Intervention()
        suspect = None if self.search is not None else (self.measured or {}).get("suspect")
        if suspect and suspect["part"] not in now.drop:
            said.append(f"When --find was asked: {suspect['sentence']}")
        if now.changes:
            found = now.facts.get("found")
            how = f", found on the {found['split']} data of {found['data']}" if found else ""
            before = " from before" * (self.search is not None and self.search.gain is None)
            said.append(f"Kept{before}: {now.words}{how}.")
            if self.replaced is not None and self.replaced.changes and self.replaced.folder != now.folder:
                said.append(f"In place of: {self.replaced.words}.")
        else:
            said.append(f"{self.parts} parts, and no intervention is kept.")
        names = ", ".join(f"{part} is {name}" for part, name in sorted(now.names.items()))
        return [*said, f"Of {self.parts} parts, {names}."] if names else said


def correct(command: Intervene) -> Outcome:
    """What the command says of a run, done."""
    from .load import opened

    if command.find and by_hand(command):
        raise UserError("--find chooses by itself: leave out --drop, --force and --quantile")
    accelerator, model = opened(command.run, command.device)
    method = part_method(model.method, str(command.run))
    names = parse_names(command.name)
    Intervention(command.drop, command.quantile, None, command.force, names).check_impossible(method.where.parts)
    before = only_names(model) if command.clear else kept(model)
    names = dict(before.names if before else {}) | names
    bench = Bench(command, accelerator, model, method, before)
    return bench.find(names) if command.find else bench.outcome(bench.as_said(names))


def by_hand(command: Intervene) -> bool:
    return bool(command.drop or command.force or command.quantile is not None)


@dataclass(frozen=True, eq=False)
class Bench:
    """Where a run is worked on."""

    command: Intervene
    accelerator: Accelerator
    model: Model
    method: PartMethod
    before: Intervention | None = None  # what there is to go on with

    def outcome(self, now: Intervention | None, found: Search | None = None, notes: tuple[str, ...] = ()) -> Outcome:
        return Outcome(self.method.where.parts, now, measured_search(self.model), found, notes)

    def as_said(self, names: dict[int, str]) -> Intervention | None:
        """What the command says by hand; it may say nothing."""
        if by_hand(self.command) or self.command.name:
            return self.by_hand(self.before or Intervention(), names)
        if not self.command.clear:
            return self.before
        if self.before is not None:  # names, which stay
            return self._save(self.before)
        if self.accelerator.is_main_process:
            (self.model.run.folder / FILE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        return None

    def by_hand(self, before: Intervention, names: dict[int, str]) -> Intervention:
        """What is said takes the place of what was kept of its kind; the rest stays, but that a part dropped now is no
        longer forced, and the other way round."""
        drop, force = self.command.drop, self.command.force
        drop, force = (
            drop or tuple(part for part in before.drop if part not in force),
            force or tuple(part for part in before.force if part not in drop),
        )
        now = replace(before, names=names, drop=drop, force=force)
        facts = dict(before.facts) if now == replace(before, names=names) else {}
        if (q := self.command.quantile) is not None:
            asked = self._asked()
            sketch = self._calibrate(asked)
            now, facts = replace(now, quantile=q, thresholds=sketch.quantile(q)), calibrated(asked, sketch)
        elif not facts and "calibrated" in before.facts:
            facts = {"calibrated": before.facts["calibrated"]}
        now.check_impossible(self.method.where.parts)
        return self._save(replace(now, facts=facts))

    def find(self, names: dict[int, str]) -> Outcome:
        """On validation data, never on test data; kept only if it surely helps."""
        asked = self._asked()
        for split in ("val", "train"):
            if not len(asked.rows.where(split)):
                raise UserError(f"{asked.path}: no pictures in the split {split!r}, which --find needs")
        notes = () if asked.own else asked.rows.notes  # such as that a part of the training pictures validates
        sketch = self._calibrate(asked)
        batches = self._batches(asked.rows, asked.path, "val")
        looked = CachedLook(self.method, asked.rows, batches, self.accelerator)
        try:
            found = search(
                looked, self.method.where.parts, {q: sketch.quantile(q) for q in QUANTILES},
                objective=self._objective(asked.rows), names=names, seed=self.command.seed,
            )  # fmt: skip
        finally:
            batches.close()
        data = {"data": asked.rows.name, "fingerprint": asked.fingerprint, "weights": self._weights}
        if self.accelerator.is_main_process:
            self._write(data | found.to_dict())
            self._draw(asked.rows, found)
        self.accelerator.wait_for_everyone()
        if found.gain is None:
            return self.outcome(self.as_said(names), found, notes)
        about = {k: v for k, v in found.to_dict().items() if k != "trials"}
        facts = calibrated(asked, sketch) | {"found": data | about}
        chosen = self._save(replace(found.chosen, facts=facts))
        return replace(self.outcome(chosen, found, notes), replaced=self.before)

    def _objective(self, rows: Rows) -> str | None:
        """What is said; else AUC where weights were selected by it and there are no groups."""
        by_auc = (self.model.run.facts.get("selection") or {}).get("metric") == "auc" and rows.groups is None
        return self.command.objective or ("auc" if by_auc else None)

    def _asked(self) -> EvaluationData:
        from .config import Evaluate
        from .load import evaluation_data, match_classes

        asked = evaluation_data(Evaluate(self.command.run, self.command.data, self.command.layout), self.model.run)
        return replace(asked, rows=match_classes(self.model, asked.rows, asked.path))

    def _batches(self, rows: Rows, path: Path, split: str) -> Batches:
        indices, said = rows.where(split), self.command
        if not len(indices):
            raise UserError(f"{path}: no pictures in the split {split!r}, whose patches --quantile is measured on")
        return inference_batches(
            rows, indices, self.model.expects, self.accelerator,
            batch=said.batch, workers=said.workers, cache=said.cache,
        )  # fmt: skip

    def _calibrate(self, asked: EvaluationData) -> DistanceSketch:
        batches = self._batches(asked.rows, asked.path, "train")
        try:
            return calibrate(self.method, batches, self.accelerator)
        finally:
            batches.close()

    @cached_property
    def _weights(self) -> str:
        return weights_sha256(cast(nn.Module, self.model.method))

    def _save(self, intervention: Intervention) -> Intervention:
        if self.accelerator.is_main_process:
            intervention = keep(self.model, intervention)
        self.accelerator.wait_for_everyone()
        return intervention

    def _draw(self, rows: Rows, found: Search) -> None:
        """What each part, and the usual quantiles, leave of a few of the pictures."""
        from .data.images import Canvas, decode
        from .report.strips import strips

        every = rows.where("val")
        few = every[np.linspace(0, len(every) - 1, min(DRAWN, len(every))).round().astype(int)]
        samples = [decode(rows, int(i), Canvas.of(self.model.expects)).image for i in few]
        images = torch.stack(samples).to(self.accelerator.device).float() / 255
        for name, page in strips(self.method, images, found).items():
            page.save(self.model.run.folder / SEARCH_FILE.parent / f"{name}.png")

    def _write(self, content: dict[str, Any]) -> None:
        from .console.files import make_folder, write

        path = self.model.run.folder / SEARCH_FILE
        make_folder(path.parent)
        write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Intervene) -> int:
    from rich.console import Console

    outcome = correct(command)
    if is_main_process():
        console = Console(highlight=False)
        if outcome.measured is not None and (command.find or not command.changes):
            console.print(table(outcome.measured, console))
        print_notes(console, outcome.notes)
        for sentence in outcome.sentences:
            console.print(sentence, soft_wrap=True, markup=False)
        if command.find and outcome.measured is not None:
            from .report.strips import write_left_out

            print(f"The table with its pictures is {write_left_out(command.run, outcome.measured)}.")
    return 0
