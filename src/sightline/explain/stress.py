"""Tests of explanations: are maps faithful, what are 'sufficient' pixels worth, what do features know, and does
relevance outline the thing? For any trained model and any of its maps, on its own data or on others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Stress
from ..console.terminal import bar, counted, print_notes
from ..data.batches import Batch
from ..data.drawing import as_seen
from ..data.rows import Rows
from ..errors import UserError
from ..load import Model, evaluation_data, match_classes, opened, results_folder
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches, sight_for
from ..sight import Sight
from ..vit.weights import weights_sha256
from .localize import figures_before
from .neighbours import features, named_rightly
from .perturbation import (
    RANDOM,
    columns_of,
    curves,
    explained,
    mean_over,
    names_of_maps,
    perturbed,
    predicted,
    random_maps,
)
from .replacement_masks import with_other_masks
from .segmentation import PER_PICTURE, figures_of, outlined
from .stress_files import Work, save
from .stress_results import Stressed
from .sufficient_subsets import Subsets, other_labels, sufficient, summary

MOST_BANK = 20_000  # training pictures that neighbours are sought among
EXAMPLES = 4  # pictures whose subsets are drawn
NEED_MAPS = {"curves", "masks"}
NEED_NO_ANSWERS = {"masks", "neighbours"}  # so data may be of any classes
Columns = dict[str, np.ndarray]


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bench:
    """A model, pictures, and what is to be found out about them."""

    command: Stress
    accelerator: Accelerator
    model: Model
    rows: Rows
    indices: np.ndarray
    masks_from: str = ""  # in words, where they are not the data's own
    columns: Columns = field(default_factory=dict)  # per picture of `indices`, for the CSV file
    notes: list[str] = field(default_factory=list)

    def batches(self, indices: np.ndarray, masks: bool) -> Iterator[tuple[Batch, Tensor | None]]:
        """With true masks where asked for; and beside them those that the method is told by, if it is."""
        told, method, said = self.model.method.needs_masks, self.model.method, self.command
        with ExitStack() as to_close:
            opened = [
                inference_batches(
                    rows, indices, self.model.expects, self.accelerator,
                    batch=said.batch, workers=said.workers, cache=said.cache, masks=with_masks,
                )
                for rows, with_masks in [(self.rows, masks), *([(method.with_masks(self.rows), True)] if told else [])]
            ]  # fmt: skip
            for batches in opened:
                to_close.callback(batches.close)
            for several in zip(*(batches.epoch(0) for batches in opened), strict=True):
                moved = [batch.to(self.accelerator.device) for batch in several]
                yield moved[0], moved[-1].masks if told else None


def stress(command: Stress) -> tuple[Stressed, Path]:
    """What a trained model's explanations are worth, and the file that says so."""
    validate_config(command)
    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    if accelerator.num_processes > 1:
        raise UserError("explanations are tested by one process: run `sightline stress` without a launcher")
    asked = evaluation_data(command, model.run)
    any_classes = set(command.tests) <= NEED_NO_ANSWERS
    rows = asked.rows if any_classes else match_classes(model, asked.rows, asked.path)
    at = rows.where(command.split)
    if not len(at):
        raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
    path = results_folder(command, model.run, asked) / "stress" / f"{command.split}.json"
    before = figures_before(path, asked)  # or it says that they are of other data
    at = drawn(at, command.limit or len(at), command.seed)
    rows, masks_from = with_other_masks(rows, at, command, model, asked, accelerator)
    bench = Bench(command, accelerator, model, rows, at, masks_from)
    bench.columns["image"] = np.array([rows.images[i] for i in bench.indices], dtype=object)
    found, examples = examined(bench)
    about = {"fingerprint": asked.fingerprint, "seed": command.seed}
    about["weights"] = weights_sha256(cast(nn.Module, model.method))
    about["intervention"] = model.run.facts.get("intervention")
    work = Work(command.tests, about, found, bench.columns, examples)
    return save(path, work, before, pictures=command.pictures), path


def validate_config(command: Stress) -> None:
    for flag, number, least in (
        ("limit", command.limit, 0),
        ("subsets", command.subsets, 1),
        ("labels", command.labels, 1),
    ):
        if number < least:
            raise UserError(f"--{flag} {number}: must be at least {least}")
    if not 0 < command.confidence < 1:
        raise UserError(f"--confidence {command.confidence:g}: must be between 0 and 1")
    if command.steps < 2:
        raise UserError(f"--steps {command.steps}: at least 2, or nothing is taken away step by step")
    if not command.tests or not command.maps:
        raise UserError("nothing is asked for: name --tests and --maps")
    if command.masks is not None and "masks" not in command.tests:
        raise UserError(f"--masks {command.masks}: nothing is held against masks without `masks` among --tests")


def drawn(indices: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """At most so many, in the order of the rows."""
    if len(indices) <= limit:
        return indices
    return np.sort(np.random.default_rng([seed, 3]).choice(indices, limit, replace=False))


def examined(bench: Bench) -> tuple[Stressed, dict[str, Tensor]]:
    tests, found, examples = bench.command.tests, {}, {}
    if "curves" in tests or "masks" in tests:
        found |= looked_through(bench)
    if "subsets" in tests:
        try:
            found["subsets"], examples = sought(bench)
        except UserError as error:
            bench.notes.append(f"subsets: none were sought: {error}")
    if "neighbours" in tests:
        try:
            found["neighbours"] = neighbours(bench)
        except UserError as error:
            bench.notes.append(f"neighbours: none were sought: {error}")
    about: Any = {"data": bench.rows.name, "split": bench.command.split, "n": len(bench.indices)}
    return Stressed(**about, **found, notes=tuple(sorted(bench.notes))), examples


# ---- maps ------------------------------------------------------------------------------------------------------------


def looked_through(bench: Bench) -> dict[str, Any]:
    """Curves, and maps against masks, in one go."""
    said, rows, device = bench.command, bench.rows, bench.accelerator.device
    with_curves = "curves" in said.tests
    masked = "masks" in said.tests and rows.masks is not None and any(rows.masks[i] for i in bench.indices)
    if "masks" in said.tests and not masked:
        bench.notes.append(
            "masks: no picture has one, so nothing is said about what relevance outlines; discover some with --masks "
            "tokencut:BACKBONE"
        )
    if not with_curves and not masked:
        return {}
    names, labels, first, answers, outlines, truths = None, [], [], [], [], []
    with bar("looking through maps", len(bench.indices)) as tick:
        for batch, told in bench.batches(bench.indices, masked):
            images, random = batch.images.float() / 255, partial(random_maps, batch.indices.tolist(), seed=said.seed)
            with bench.accelerator.autocast():
                names = maps_there(bench, images, told) if names is None else names
                if not names:
                    return {}
                if with_curves:
                    whole, maps, some = perturbed(bench.model.method, images, told, batch.labels, names, random)
                    labels.append(batch.labels.cpu().numpy())
                    first.append(whole.cpu().numpy())
                    answers.append({name: one.cpu().numpy() for name, one in some.items()})
                else:
                    maps = just_maps(bench, images, told, names, random)
            if masked:
                assert batch.masks is not None
                truths.append(batch.masks.flatten(1).any(dim=1).cpu().numpy())
                outlines.append({name: outlined(one.to(device), batch.masks) for name, one in maps.items()})
            if tick is not None:
                tick(sum(map(len, truths if masked else labels)))
    found: dict[str, Any] = {}
    if masked:
        found["masks"] = held_against_masks(bench, outlines, np.concatenate(truths))
        found["masks_from"] = bench.masks_from
    if with_curves:
        label, whole = np.concatenate(labels), np.concatenate(first)
        joined = {name: np.concatenate([some[name] for some in answers]) for name in answers[0]}
        bench.columns.update(label=label, predicted=whole, **columns_of(label, joined))
        found |= {
            "accuracy": mean_over((label == whole).astype(np.float64)),
            "curves": tuple(curves(label, whole, joined)),
        }
    return found


@torch.no_grad()
def maps_there(bench: Bench, images: Tensor, told: Tensor | None) -> list[str]:
    """Those asked for that this model has; a name that no model knows is refused, and so is a call in vain."""
    from ..where.relevance import MAPS

    method, asked = bench.model.method, bench.command.maps
    has = names_of_maps(method, images, sight_for(method, images, told))
    lacking = [name for name in asked if name not in has]
    unknown = [name for name in lacking if name not in (*MAPS, "sight")]
    in_vain = len(lacking) == len(asked) and set(bench.command.tests) <= NEED_MAPS
    if unknown or in_vain:
        raise UserError(f"--maps {' '.join(unknown or asked)}: this model has no such map; it has {', '.join(has)}")
    if lacking:
        bench.notes.append(f"maps: this model has no map {', '.join(lacking)}")
    return [name for name in asked if name in has]


@torch.no_grad()
def just_maps(
    bench: Bench, images: Tensor, told: Tensor | None, names: Sequence[str], random: Any
) -> dict[str, Tensor]:
    from ..metrics.overlap import patch_grid

    method, maps = bench.model.method, {}
    sight = sight_for(method, images, told)
    for name in names:
        if (one := explained(method, images, sight, name)) is not None:
            maps[name] = one
    return maps | {RANDOM: random(patch_grid(sight, maps, (images.shape[2], images.shape[3]))).to(images.device)}


def held_against_masks(
    bench: Bench, outlines: Sequence[Mapping[str, Mapping[str, Tensor]]], there: np.ndarray
) -> dict[str, dict[str, Estimate]]:
    if left := int((~there).sum()):
        bench.notes.append(
            f"masks: left out of what relevance outlines, for want of one: {left:,} of {len(there):,} pictures"
        )
    found = {}
    for name in outlines[0] if there.any() else ():
        columns = {k: torch.cat([some[name][k] for some in outlines]).cpu().numpy() for k in outlines[0][name]}
        found[name] = figures_of({k: column[there] for k, column in columns.items()})
        for k in PER_PICTURE:
            bench.columns[f"{k} {name}"] = np.where(there, columns[k], np.nan)
    return found


# ---- pixels that are enough ------------------------------------------------------------------------------------------


def sought(bench: Bench) -> tuple[Subsets, dict[str, Tensor]]:
    """Of some of the pictures, for the model's own answer and for labels drawn at random; and pictures of the first."""
    said, method, classes = bench.command, bench.model.method, len(bench.model.classes)
    if classes < 2:
        raise UserError("there is only one label")
    some = drawn(bench.indices, said.subsets, said.seed + 1)
    sure, share, examples = [], [], {}
    with bar("seeking sufficient pixels", len(some)) as tick:
        for batch, told in bench.batches(some, masks=False):
            images = batch.images.float() / 255
            with bench.accelerator.autocast(), torch.no_grad():
                own = predicted(method, images, told).tolist()
            drawn_labels = [
                other_labels(i, mine, classes, said.labels, said.seed)
                for i, mine in zip(batch.indices.tolist(), own, strict=True)
            ]
            targets = torch.tensor([[mine, *others] for mine, others in zip(own, drawn_labels, strict=True)])
            parts = []
            for column in targets.to(images.device).unbind(dim=1):
                with bench.accelerator.autocast():
                    parts.append(
                        sufficient(
                            method, images, told, column, bench.model.expects.mean,
                            confidence=said.confidence, steps=said.steps, seed=said.seed,
                        )
                    )  # fmt: skip
            sure.append(torch.stack([part.sure for part in parts], dim=1).cpu().numpy())
            share.append(torch.stack([part.share for part in parts], dim=1).cpu().numpy())
            examples = examples or drawn_subsets(bench, images, targets, [part.visible for part in parts])
            if tick is not None:
                tick(sum(map(len, sure)))
    return summary(np.concatenate(sure), np.concatenate(share), said.confidence, said.steps), examples


def drawn_subsets(bench: Bench, images: Tensor, targets: Tensor, visible: Sequence[Tensor]) -> dict[str, Tensor]:
    """Rows of pictures under their captions, the first few."""
    names, few = bench.model.classes, slice(0, EXAMPLES)
    rows = {"as they are": images[few].cpu()}
    for column, kept in enumerate(visible):
        wanted = ", ".join(names[label] for label in targets[few, column].tolist())
        what = f"{'own answers' if column == 0 else f'random labels {column}'}: {wanted}"
        rows[what] = as_seen(images[few], Sight(keep_pixels=kept[few])).cpu()
    return rows


# ---- neighbours ------------------------------------------------------------------------------------------------------


def neighbours(bench: Bench) -> dict[str, Estimate]:
    """Among the training pictures of these data, or where there are none, among the others."""
    said, rows = bench.command, bench.rows
    bank = drawn(rows.where("train"), MOST_BANK, said.seed) if said.split != "train" else np.zeros(0, np.int64)
    check_strangers(rows.labels[bench.indices], rows.labels[bank])
    of = partial(
        features, bench.model.method, rows, expects=bench.model.expects, accelerator=bench.accelerator,
        batch=said.batch, workers=said.workers, cache=said.cache,
    )  # fmt: skip
    queries, labels = of(indices=bench.indices), torch.from_numpy(rows.labels[bench.indices])
    if len(bank):
        right = named_rightly(queries, labels, of(indices=bank), torch.from_numpy(rows.labels[bank]))
    else:
        right = named_rightly(queries, labels)
    among = f"among {len(bank):,} training pictures" if len(bank) else "among the others"
    bench.columns.update({f"{k} neighbours": some.astype(np.float64) for k, some in right.items()})
    return {f"{k} {among}": mean_over(some.astype(np.float64)) for k, some in right.items()}


def check_strangers(labels: np.ndarray, bank: np.ndarray) -> None:
    """Pictures none of which has a neighbour of its class would all be named wrongly, whatever the features know; and
    where all neighbours are of one class, everything is named that."""
    if len(bank) and not np.isin(labels, bank).any():
        raise UserError("no label of these pictures occurs among the training pictures: none could be named rightly")
    if not len(bank) and len(np.unique(labels)) == len(labels) > 1:
        raise UserError("no two of these pictures have the same label: none could be named rightly")
    if len(np.unique(bank if len(bank) else labels)) == 1:
        raise UserError("all pictures to seek them among are of one class: whatever features know, they name that one")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Stress) -> int:
    from rich.console import Console
    from rich.markup import escape

    found, path = stress(command)
    console = Console(highlight=False)
    console.print(f"{escape(str(command.run))}, split {command.split!r}: {counted(found.n)}", soft_wrap=True)
    for table in found.tables():
        console.print(table)
    print_notes(console, found.notes)
    for one in found.sentences:
        console.print(one, soft_wrap=True, markup=False)
    print(f"The figures, and what there is per picture, are in {path.parent}.")
    return 0
