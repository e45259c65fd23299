"""`sightline stress`: tests of explanations, for any trained model and any of its maps, on its own or other data.

Perturbation curves (are maps faithful?), sufficient input subsets (what do they explain?), nearest neighbours (what do
the features know?), and segmentation (do relevance maps outline the object?).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Stress
from ..console.terminal import counted, present, print_notes
from ..data.batches import Batch
from ..data.drawing import grey_out_hidden
from ..data.rows import Rows
from ..data.sampling import sample_randomly
from ..errors import UserError
from ..load import Model, evaluation_data, match_classes, open_model, results_folder
from ..metrics.estimates import Estimate
from ..metrics.inference import sight_for
from ..sight import Sight
from ..vit.weights import weights_sha256
from .estimates import bootstrap_mean
from .localize import batches_with_masks, images_of_split, previous_results
from .neighbours import features, knn_correct
from .perturbation import compute_maps, curves, map_names, per_image_columns, perturb, predict_classes, random_maps
from .replacement_masks import with_replacement_masks
from .segmentation import PER_IMAGE, segmentation_columns, segmentation_figures
from .stress_files import NewResults, save
from .stress_results import StressResults
from .sufficient_subsets import Subsets, find_sufficient_subsets, random_other_labels, summarize

MAX_BANK = 20_000  # training images in the bank of neighbours
EXAMPLES = 4  # images whose subsets are drawn
NEED_MAPS = {"curves", "masks"}
NEED_NO_PREDICTIONS = {"masks", "neighbours"}  # so the data may have other classes


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StressContext:
    """A model, images, and the tests to run on them."""

    command: Stress
    accelerator: Accelerator
    model: Model
    rows: Rows
    indices: np.ndarray
    masks_from: str = ""  # where the masks come from, if they are not the data's own
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # per image of `indices`, for the CSV file
    notes: list[str] = field(default_factory=list)

    def batches(self, indices: np.ndarray, task: str, *, true_masks: bool) -> Iterator[tuple[Batch, Tensor | None]]:
        return batches_with_masks(
            self.model.method, self.rows, indices, self.model.expects, self.accelerator,
            batch=self.command.batch, workers=self.command.workers, cache=self.command.cache,
            true_masks=true_masks, task=task,
        )  # fmt: skip


def stress(command: Stress) -> tuple[StressResults, Path]:
    """Run the tests on a trained model; the results, and the file they are written to."""
    validate_config(command)
    accelerator, model = open_model(command.run, command.device, intervention=command.intervention)
    if accelerator.num_processes > 1:
        raise UserError("`sightline stress` runs in one process: start it without a launcher")
    dataset = evaluation_data(command, model.run)
    any_classes = set(command.tests) <= NEED_NO_PREDICTIONS
    rows = dataset.rows if any_classes else match_classes(model, dataset.rows, dataset.path)
    indices = images_of_split(rows, command.split, dataset.path)
    path = results_folder(command, model.run, dataset) / "stress" / f"{command.split}.json"
    before = previous_results(path, dataset)  # raises if they are about other data
    indices = sample_randomly(indices, command.limit or len(indices), command.seed)
    rows, masks_from = with_replacement_masks(rows, indices, command, model, dataset, accelerator)
    context = StressContext(command, accelerator, model, rows, indices, masks_from)
    context.columns["image"] = np.array([rows.images[i] for i in indices], dtype=object)
    results, examples = run_tests(context)
    conditions = {"fingerprint": dataset.fingerprint, "seed": command.seed}
    conditions["weights"] = weights_sha256(cast(nn.Module, model.method))
    conditions["intervention"] = model.run.facts.get("intervention")
    new = NewResults(command.tests, conditions, results, context.columns, examples)
    return save(path, new, before, figures=command.figures), path


def validate_config(command: Stress) -> None:
    if not command.tests or not command.maps:
        raise UserError("--tests, --maps: name at least one of each")
    if command.masks is not None and "masks" not in command.tests:
        raise UserError(f"--masks {command.masks}: only the test `masks` uses masks; add it to --tests")


def run_tests(context: StressContext) -> tuple[StressResults, dict[str, Tensor]]:
    tests, found, examples = context.command.tests, {}, {}
    if NEED_MAPS & set(tests):
        found |= test_maps(context)
    if "subsets" in tests:
        try:
            found["subsets"], examples = find_subsets(context)
        except UserError as error:
            context.notes.append(f"subsets: skipped: {error}")
    if "neighbours" in tests:
        try:
            found["neighbours"] = neighbours(context)
        except UserError as error:
            context.notes.append(f"neighbours: skipped: {error}")
    about: Any = {"data": context.rows.name, "split": context.command.split, "n": len(context.indices)}
    return StressResults(**about, **found, notes=tuple(sorted(context.notes))), examples


# ---- maps ------------------------------------------------------------------------------------------------------------


def test_maps(context: StressContext) -> dict[str, Any]:
    """Perturbation curves and segmentation, in one pass over the images."""
    command, rows, method = context.command, context.rows, context.model.method
    with_curves = "curves" in command.tests
    with_masks = "masks" in command.tests and rows.masks is not None and any(rows.masks[i] for i in context.indices)
    if "masks" in command.tests and not with_masks:
        context.notes.append("masks: skipped: no image has a mask; create some with --masks tokencut:BACKBONE")
    if not with_curves and not with_masks:
        return {}
    names, labels, intact, predictions, outlines, has_mask = None, [], [], [], [], []
    for batch, given in context.batches(context.indices, "testing maps", true_masks=with_masks):
        images, random = batch.images.float() / 255, partial(random_maps, batch.indices.tolist(), seed=command.seed)
        with context.accelerator.autocast():
            names = available_maps(context, images, given) if names is None else names
            if not names:
                return {}
            if with_curves:
                predicted, maps, perturbed = perturb(method, images, given, batch.labels, names, random)
                labels.append(batch.labels.cpu().numpy())
                intact.append(predicted.cpu().numpy())
                predictions.append({name: one.cpu().numpy() for name, one in perturbed.items()})
            else:
                with torch.no_grad():
                    maps = compute_maps(method, images, sight_for(method, images, given), names, random)
        if with_masks:
            assert batch.masks is not None
            has_mask.append(batch.masks.flatten(1).any(dim=1).cpu().numpy())
            device = context.accelerator.device
            outlines.append({name: segmentation_columns(one.to(device), batch.masks) for name, one in maps.items()})
    found: dict[str, Any] = {}
    if with_masks:
        found["masks"] = mask_agreement(context, outlines, np.concatenate(has_mask))
        found["masks_from"] = context.masks_from
    if with_curves:
        label, predicted = np.concatenate(labels), np.concatenate(intact)
        joined = {name: np.concatenate([some[name] for some in predictions]) for name in predictions[0]}
        context.columns.update(label=label, predicted=predicted, **per_image_columns(label, joined))
        found["accuracy"] = bootstrap_mean((label == predicted).astype(np.float64))
        found["curves"] = tuple(curves(label, predicted, joined))
    return found


@torch.no_grad()
def available_maps(context: StressContext, images: Tensor, given: Tensor | None) -> list[str]:
    """The requested maps that this model has. Unknown names are an error, and so is a request without any result."""
    from ..where.relevance import MAPS

    method, requested = context.model.method, context.command.maps
    available = map_names(method, images, sight_for(method, images, given))
    missing = [name for name in requested if name not in available]
    unknown = [name for name in missing if name not in (*MAPS, "sight")]
    nothing_left = len(missing) == len(requested) and set(context.command.tests) <= NEED_MAPS
    if unknown or nothing_left:
        names = " ".join(unknown or requested)
        raise UserError(f"--maps {names}: this model has no such map; choose among {', '.join(available)}")
    if missing:
        context.notes.append(f"maps: this model has no map {', '.join(missing)}")
    return [name for name in requested if name in available]


def mask_agreement(
    context: StressContext, outlines: Sequence[Mapping[str, Mapping[str, Tensor]]], has_mask: np.ndarray
) -> dict[str, dict[str, Estimate]]:
    if without := int((~has_mask).sum()):
        context.notes.append(f"masks: {without:,} of {len(has_mask):,} images have no mask and were left out")
    found = {}
    for name in outlines[0] if has_mask.any() else ():
        columns = {k: torch.cat([some[name][k] for some in outlines]).cpu().numpy() for k in outlines[0][name]}
        found[name] = segmentation_figures({k: column[has_mask] for k, column in columns.items()})
        for k in PER_IMAGE:
            context.columns[f"{k} {name}"] = np.where(has_mask, columns[k], np.nan)
    return found


# ---- sufficient input subsets ----------------------------------------------------------------------------------------


def find_subsets(context: StressContext) -> tuple[Subsets, dict[str, Tensor]]:
    """For some images, subsets for the model's own prediction and for random labels; and examples to draw."""
    command, method, classes = context.command, context.model.method, len(context.model.classes)
    if classes < 2:
        raise UserError("there is only one class")
    indices = sample_randomly(context.indices, command.subset_images, command.seed + 1)
    reached, share, examples = [], [], {}
    for batch, given in context.batches(indices, "searching sufficient subsets", true_masks=False):
        images = batch.images.float() / 255
        with context.accelerator.autocast(), torch.no_grad():
            predicted = predict_classes(method, images, given).tolist()
        targets = torch.tensor(
            [
                [own, *random_other_labels(i, own, classes, command.labels_per_image, command.seed)]
                for i, own in zip(batch.indices.tolist(), predicted, strict=True)
            ]
        )
        with context.accelerator.autocast():
            subsets = [
                find_sufficient_subsets(
                    method, images, given, column, context.model.expects.mean,
                    confidence=command.confidence, steps=command.subset_steps, seed=command.seed,
                )
                for column in targets.to(images.device).unbind(dim=1)
            ]  # fmt: skip
        reached.append(torch.stack([one.reached for one in subsets], dim=1).cpu().numpy())
        share.append(torch.stack([one.share for one in subsets], dim=1).cpu().numpy())
        examples = examples or draw_subsets(context, images, targets, [one.visible for one in subsets])
    return summarize(np.concatenate(reached), np.concatenate(share), command.confidence, command.subset_steps), examples


def draw_subsets(
    context: StressContext, images: Tensor, targets: Tensor, visible: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Rows of example images by caption: intact, and reduced to the subset of each label."""
    names, first = context.model.classes, slice(0, EXAMPLES)
    rows = {"images": images[first].cpu()}
    for column, subset in enumerate(visible):
        wanted = ", ".join(names[label] for label in targets[first, column].tolist())
        caption = f"{'predicted labels' if column == 0 else f'random labels {column}'}: {wanted}"
        rows[caption] = grey_out_hidden(images[first], Sight(keep_pixels=subset[first])).cpu()
    return rows


# ---- neighbours ------------------------------------------------------------------------------------------------------


def neighbours(context: StressContext) -> dict[str, Estimate]:
    """k-NN accuracy against the training images of these data, or against the other images if there are none."""
    command, rows = context.command, context.rows
    bank = np.zeros(0, np.int64)
    if command.split != "train":
        bank = sample_randomly(rows.split_indices("train"), MAX_BANK, command.seed)
    check_bank_labels(rows.labels[context.indices], rows.labels[bank])
    embed = partial(
        features, context.model.method, rows, expects=context.model.expects, accelerator=context.accelerator,
        batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    queries, labels = embed(indices=context.indices), torch.from_numpy(rows.labels[context.indices])
    if len(bank):
        correct = knn_correct(queries, labels, embed(indices=bank), torch.from_numpy(rows.labels[bank]))
    else:
        correct = knn_correct(queries, labels)
    among = f"among {len(bank):,} training images" if len(bank) else "among the others"
    context.columns.update({f"{k} neighbours": some.astype(np.float64) for k, some in correct.items()})
    return {f"{k} {among}": bootstrap_mean(some.astype(np.float64)) for k, some in correct.items()}


def check_bank_labels(labels: np.ndarray, bank: np.ndarray) -> None:
    """Refuse a bank with which the accuracy would be 0 or 1 whatever the features are."""
    if len(bank) and not np.isin(labels, bank).any():
        raise UserError("no label of these images occurs among the training images, so the accuracy would be 0")
    if not len(bank) and len(np.unique(labels)) == len(labels) > 1:
        raise UserError("no two of these images share a label, so the accuracy would be 0")
    if len(np.unique(bank if len(bank) else labels)) == 1:
        raise UserError("all candidate neighbours are of one class, so every image would be assigned to it")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Stress) -> int:
    from rich.console import Console
    from rich.markup import escape

    results, path = stress(command)

    def show() -> None:
        console = Console(highlight=False)
        console.print(f"{escape(str(command.run))}, split {command.split!r}: {counted(results.n)}", soft_wrap=True)
        for table in results.tables():
            console.print(table)
        print_notes(console, results.notes)
        for sentence in results.sentences:
            console.print(sentence, soft_wrap=True, markup=False)
        print(f"Results and per-image values saved to {path.parent}.")

    present(command, json.loads(path.read_text(encoding="utf-8")), show)
    return 0
