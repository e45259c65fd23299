"""`sightline intervene`: correct a trained model by hand or by a search on validation data, and save the correction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from .config import Evaluate, Intervene
from .console.checksums import remove_with_checksum
from .console.files import make_folder, save_image, write_json
from .console.terminal import is_main_process, print_notes
from .data.batches import Batches
from .data.images import Preprocess, decode
from .data.rows import Rows
from .errors import UserError
from .interventions.apply import (
    QUANTILES,
    SEARCH_FILE,
    CachedLook,
    calibrate,
    calibration_facts,
    load_intervention,
    load_part_names,
    load_search,
    save_intervention,
)
from .interventions.file import FILE, DistanceSketch, Intervention, parse_names
from .interventions.search import Search, search, search_table
from .load import EvaluationData, Model, evaluation_data, match_classes, open_model
from .methods.base import PartMethod, part_method
from .metrics.inference import inference_batches, sample_evenly
from .vit.weights import weights_sha256

EXAMPLES = 8  # images drawn


@dataclass(frozen=True)
class Outcome:
    """The intervention saved now, and what was measured, now or before."""

    parts: int
    intervention: Intervention | None
    measured: dict[str, Any] | None
    search: Search | None = None
    notes: tuple[str, ...] = ()  # on data that are not the run's own
    replaced: Intervention | None = None  # by the result of the search

    @property
    def sentences(self) -> list[str]:
        sentences, now = [] if self.search is None else [self.search.sentence], self.intervention or Intervention()
        suspect = None if self.search is not None else (self.measured or {}).get("suspect")
        if suspect and suspect["part"] not in now.drop:
            sentences.append(f"The last search (--find) found: {suspect['sentence']}")
        if now.changes:
            found = now.facts.get("found")
            source = f", found on the {found['split']} data of {found['data']}" if found else ""
            unchanged = " (unchanged)" * (self.search is not None and self.search.gain is None)
            sentences.append(f"Saved intervention{unchanged}: {now.description}{source}.")
            if self.replaced is not None and self.replaced.changes and self.replaced.folder != now.folder:
                sentences.append(f"It replaces: {self.replaced.description}.")
        else:
            sentences.append(f"{self.parts} parts; no intervention is saved.")
        names = ", ".join(f"{part} = {name}" for part, name in sorted(now.names.items()))
        return [*sentences, f"Part names: {names} (of {self.parts} parts)."] if names else sentences


def intervene(command: Intervene) -> Outcome:
    """Carry out the command: show, set, search or clear the intervention of a run."""
    if command.find and is_by_hand(command):
        raise UserError("--find searches by itself; leave out --drop, --force and --quantile")
    accelerator, model = open_model(command.run, command.device)
    method = part_method(model.method, str(command.run))
    names = parse_names(command.name)
    Intervention(command.drop, command.quantile, None, command.force, names).check_part_numbers(method.where.parts)
    before = load_part_names(model) if command.clear else load_intervention(model)
    names = dict(before.names if before else {}) | names
    session = InterventionSession(command, accelerator, model, method, before)
    return session.find(names) if command.find else session.outcome(session.update(names))


def is_by_hand(command: Intervene) -> bool:
    return bool(command.drop or command.force or command.quantile is not None)


@dataclass(frozen=True, eq=False)
class InterventionSession:
    """A model whose intervention is changed."""

    command: Intervene
    accelerator: Accelerator
    model: Model
    method: PartMethod
    before: Intervention | None = None  # the saved intervention to start from

    def outcome(self, now: Intervention | None, found: Search | None = None, notes: tuple[str, ...] = ()) -> Outcome:
        return Outcome(self.method.where.parts, now, load_search(self.model), found, notes)

    def update(self, names: dict[int, str]) -> Intervention | None:
        """Apply the changes of the command, if any, and save them."""
        if is_by_hand(self.command) or self.command.name:
            return self.set_by_hand(self.before or Intervention(), names)
        if not self.command.clear:
            return self.before
        if self.before is not None:  # part names, which stay
            return self._save(self.before)
        if self.accelerator.is_main_process:
            remove_with_checksum(self.model.run.folder / FILE)
        self.accelerator.wait_for_everyone()
        return None

    def set_by_hand(self, before: Intervention, names: dict[int, str]) -> Intervention:
        """Each flag replaces the saved value of its kind, the rest stays; but a part that is dropped now is no longer
        forced, and vice versa."""
        drop, force = self.command.drop, self.command.force
        drop, force = (
            drop or tuple(part for part in before.drop if part not in force),
            force or tuple(part for part in before.force if part not in drop),
        )
        now = replace(before, names=names, drop=drop, force=force)
        facts = dict(before.facts) if now == replace(before, names=names) else {}
        if (q := self.command.quantile) is not None:
            data = self._data()
            sketch = self._calibrate(data)
            now, facts = replace(now, quantile=q, thresholds=sketch.quantile(q)), calibration_facts(data, sketch)
        elif not facts and "calibrated" in before.facts:
            facts = {"calibrated": before.facts["calibrated"]}
        now.check_part_numbers(self.method.where.parts)
        return self._save(replace(now, facts=facts))

    def find(self, names: dict[int, str]) -> Outcome:
        """Search on validation data, never on test data; the result is saved only if it improves significantly."""
        data = self._data()
        for split in ("val", "train"):
            if not len(data.rows.split_indices(split)):
                raise UserError(f"{data.path}: no images in the split {split!r}, which --find needs; choose other data")
        notes = () if data.own else data.rows.notes  # such as that part of the training images are used for validation
        sketch = self._calibrate(data)
        batches = self._batches(data, "val")
        try:
            found = search(
                CachedLook(self.method, data.rows, batches, self.accelerator), self.method.where.parts,
                {q: sketch.quantile(q) for q in QUANTILES}, objective=self._objective(data.rows), names=names,
                seed=self.command.seed,
            )  # fmt: skip
        finally:
            batches.close()
        about = {"data": data.rows.name, "fingerprint": data.fingerprint, "weights": self._weights}
        if self.accelerator.is_main_process:
            path = self.model.run.folder / SEARCH_FILE
            make_folder(path.parent)
            write_json(path, about | found.to_dict())
            self._draw(data.rows, found)
        self.accelerator.wait_for_everyone()
        if found.gain is None:
            return self.outcome(self.update(names), found, notes)
        about |= {k: v for k, v in found.to_dict().items() if k != "trials"}
        chosen = self._save(replace(found.chosen, facts=calibration_facts(data, sketch) | {"found": about}))
        return replace(self.outcome(chosen, found, notes), replaced=self.before)

    def _objective(self, rows: Rows) -> str | None:
        """The given one; else AUC if the checkpoint was selected by it and there are no groups."""
        by_auc = (self.model.run.facts.get("selection") or {}).get("metric") == "auc" and rows.groups is None
        return self.command.objective or ("auc" if by_auc else None)

    def _data(self) -> EvaluationData:
        data = evaluation_data(Evaluate(self.command.run, self.command.data, self.command.layout), self.model.run)
        return replace(data, rows=match_classes(self.model, data.rows, data.path))

    def _batches(self, data: EvaluationData, split: str) -> Batches:
        indices, command = data.rows.split_indices(split), self.command
        if not len(indices):
            raise UserError(f"{data.path}: no images in the split {split!r}, on which --quantile is calibrated")
        return inference_batches(
            data.rows, indices, self.model.expects, self.accelerator,
            batch=command.batch, workers=command.workers, cache=command.cache,
        )  # fmt: skip

    def _calibrate(self, data: EvaluationData) -> DistanceSketch:
        batches = self._batches(data, "train")
        try:
            return calibrate(self.method, batches, self.accelerator)
        finally:
            batches.close()

    @cached_property
    def _weights(self) -> str:
        return weights_sha256(cast(nn.Module, self.model.method))

    def _save(self, intervention: Intervention) -> Intervention:
        if self.accelerator.is_main_process:
            intervention = save_intervention(self.model, intervention)
        self.accelerator.wait_for_everyone()
        return intervention

    def _draw(self, rows: Rows, found: Search) -> None:
        """What each part, and the usual quantiles, remove from a few images."""
        from .report.strips import strips

        indices = sample_evenly(rows.split_indices("val"), EXAMPLES)
        samples = [decode(rows, int(i), Preprocess.of(self.model.expects)).image for i in indices]
        images = torch.stack(samples).to(self.accelerator.device).float() / 255
        for name, page in strips(self.method, images, found).items():
            save_image(self.model.run.folder / SEARCH_FILE.parent / f"{name}.png", page)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Intervene) -> int:
    from rich.console import Console

    outcome = intervene(command)
    if is_main_process():
        console = Console(highlight=False)
        if outcome.measured is not None and (command.find or not command.changes):
            console.print(search_table(outcome.measured, console))
        print_notes(console, outcome.notes)
        for sentence in outcome.sentences:
            console.print(sentence, soft_wrap=True, markup=False)
        if command.find and outcome.measured is not None:
            from .report.strips import write_search_page

            print(f"Table with images: {write_search_page(command.run, outcome.measured)}")
    return 0
