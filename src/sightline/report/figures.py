"""Figures of one run's parts: on the same images as those of other runs, on swapped backgrounds, as heat maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Evaluate, Strips
from ..data.images import Preprocess, decode
from ..data.rows import Rows
from ..data.sampling import sample_balanced
from ..errors import UserError
from ..explain.background_swaps import MaskedImages, background_kinds, choose_partners
from ..explain.localize import images_of_split
from ..interventions.apply import load_search
from ..interventions.file import DistanceSketch, Intervention
from ..methods.base import PartMethod
from ..metrics.inference import inference_batches, sample_evenly
from ..sight import Prediction, Sight, cell_share
from .contact_sheet import RIGHT, WRONG, Colour, Note, SheetRow, centre_of_mass, draw_cross, heat_map
from .gallery import LINE, draw_outline, part_colour, thumbnail_views, tint_view
from .survey import part_of_pixels

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.batches import Batches
    from ..load import EvaluationData, Model

TILE, TILES = 132, 9  # of heat maps: side in pixels, and number per row
POOL = 64  # images that lend their backgrounds
HALF = 0.5


@dataclass(frozen=True, eq=False)
class PartFigures:
    """One run, and the images its parts are drawn on."""

    command: Strips
    model: Model
    accelerator: Accelerator
    method: PartMethod
    intervention: Intervention
    dataset: EvaluationData
    label: str

    @classmethod
    def open(
        cls, command: Strips, folder: Path, data: Path | None, first: PartFigures | None, label: str = ""
    ) -> PartFigures:
        """On the data of the `first` run, if there is one."""
        from ..interventions.apply import load_intervention
        from ..load import evaluation_data, open_model
        from ..methods.base import part_method

        accelerator, model = open_model(folder, command.device)
        method = part_method(model.method, str(folder))
        intervention = (load_intervention(model) if command.intervention else None) or Intervention()
        if first is None:
            dataset = evaluation_data(Evaluate(folder, data, command.layout), model.run)
        elif data is None and model.run.facts["data"]["fingerprint"] != first.dataset.fingerprint:
            other = first.model.run.folder
            raise UserError(f"{folder}: trained on other data than {other}; name the data as the last argument")
        else:
            dataset = first.dataset
        images_of_split(dataset.rows, command.split, dataset.path)
        return cls(command, model, accelerator, method, intervention, dataset, label or folder.name)

    @property
    def parts(self) -> int:
        return self.method.where.parts

    @property
    def name(self) -> str:
        facts = self.model.run.facts
        changed = f", {self.intervention.description}" if self.intervention.changes else ""
        method = {"ifam": "iFAM", "pdiscoformer": "PDiscoFormer"}.get(facts["method"], facts["method"])
        return f"K = {self.parts}: {method}, {self.label}{changed}"

    @property
    def legend(self) -> list[tuple[str, Colour]]:
        def byte(k: int) -> Colour:
            r, g, b = (round(255 * level) for level in part_colour(k, self.parts))
            return r, g, b

        kept = [k for k in range(self.parts) if k not in self.intervention.drop]
        return [(self.intervention.names.get(k, str(k)), byte(k)) for k in kept]

    @cached_property
    def measured(self) -> dict[str, Any] | None:
        return load_search(self.model)

    # ---- images and predictions --------------------------------------------------------------------------------------

    def select(self, candidates: np.ndarray) -> np.ndarray:
        """Example images, balanced over groups; the same for every run."""
        generator = np.random.default_rng(self.command.seed)
        cells = self.dataset.rows.cells[0]
        at = sample_balanced(np.arange(len(candidates)), cells[candidates], self.command.examples, generator)
        return candidates[at]

    def load_images(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        preprocess = Preprocess.of(self.model.expects)
        decoded = [decode(self.dataset.rows, int(i), preprocess, mask=False).image for i in indices]
        return torch.stack(decoded).to(self.accelerator.device).float() / 255

    def sample(self, split: str) -> np.ndarray:
        """At most --limit images, spread evenly over a split."""
        return sample_evenly(self.dataset.rows.split_indices(split), self.command.limit)

    def batches(self, indices: np.ndarray, *, masks: bool = False) -> closing[Batches]:
        command = self.command
        return closing(
            inference_batches(
                self.dataset.rows, indices, self.model.expects, self.accelerator,
                batch=command.batch, workers=command.workers, cache=command.cache, masks=masks,
            )
        )  # fmt: skip

    @torch.no_grad()
    def predict(self, images: Tensor, interventions: Sequence[Intervention]) -> Iterator[Prediction]:
        """Under each intervention; stage 1 runs once."""
        with self.accelerator.autocast():
            detections = self.method.detect(images)
            for intervention in interventions:
                yield self.method.predict_from(images, detections, intervention.correction)

    def prediction_row(
        self, caption: str, images: Tensor, prediction: Prediction, labels: Sequence[str], **more: Any
    ) -> SheetRow:
        """The parts in their colours; correct predictions in green, wrong ones in red."""
        best = prediction.probabilities.max(dim=1)
        predicted = [self.model.classes[k] for k in best.indices.tolist()]
        notes = [
            Note(f"{name} {100 * confidence:.0f} %", RIGHT if name == label else WRONG)
            for name, confidence, label in zip(predicted, best.values.tolist(), labels, strict=True)
        ]
        return SheetRow(caption, parts_overlay(images, prediction.sight), notes, **more)

    # ---- the figures -------------------------------------------------------------------------------------------------

    def part_maps(self) -> list[SheetRow]:
        """The images, and this run's parts on them."""
        rows, chosen = self.dataset.rows, self.select(self.dataset.rows.split_indices(self.command.split))
        images = self.load_images(chosen)
        cells, names = rows.cells
        groups = [Note(names[cells[i]]) for i in chosen]
        (prediction,) = self.predict(images, [self.intervention])
        parts = parts_overlay(images, prediction.sight)
        return [SheetRow("images", thumbnails(images), groups), SheetRow(self.name, parts, legend=self.legend)]

    def swapped(self) -> tuple[list[SheetRow], str]:
        """Original, on another background, and there with token removal; and how backgrounds were swapped."""
        chosen, images, others, how = self.on_other_backgrounds()
        plain = self.intervention
        removals = [replace(plain, quantile=q, thresholds=self.sketch.quantile(q)) for q in self.command.quantiles]
        labels = [self.dataset.rows.classes[self.dataset.rows.labels[i]] for i in chosen]
        (first,) = self.predict(images, [plain])
        captions = ["parts", *(f"token removal beyond the {q:g} quantile" for q in self.command.quantiles)]
        predictions = self.predict(others, [plain, *removals])
        rows = [
            SheetRow("image", thumbnails(images), [Note(label) for label in labels]),
            self.prediction_row("parts", images, first, labels, legend=self.legend),
            SheetRow("on another background", thumbnails(others)),
            *(self.prediction_row(text, others, one, labels) for text, one in zip(captions, predictions, strict=True)),
        ]
        if removals:
            how += f" Quantiles are of the distances in {len(self.sample('train')):,} training images."
        return rows, how if self.method.blind else f"{how} This model also sees the faded background."

    @cached_property
    def sketch(self) -> DistanceSketch:
        from ..interventions.apply import calibrate

        if not len(self.dataset.rows.split_indices("train")):
            raise UserError(
                f"{self.dataset.path}: no training images to compute --quantiles on; omit `swapped` from --kind"
            )
        with self.batches(self.sample("train")) as batches:
            return calibrate(self.method, batches, self.accelerator)

    def on_other_backgrounds(self) -> tuple[np.ndarray, Tensor, Tensor, str]:
        """Indices of images, the images, the same objects on another background, and how these were made."""
        rows, indices = self.dataset.rows, self.dataset.rows.split_indices(self.command.split)
        if counterparts := find_counterparts(rows, indices):
            chosen = self.select(np.array(sorted(counterparts)))
            swapped = self.load_images([counterparts[i] for i in chosen.tolist()])
            return chosen, self.load_images(chosen), swapped, "The data contain the same object on another background."
        masked = rows.masks is not None and np.array([bool(rows.masks[i]) for i in indices])
        given = bool(np.any(masked))
        candidates = indices[masked] if given else indices
        chosen = self.select(candidates)
        lenders = sample_evenly(np.setdiff1d(candidates, chosen), POOL)
        command = self.command
        pool = MaskedImages.load(
            self.method, rows, np.concatenate([chosen, lenders]), self.model.expects, self.accelerator, given,
            command.batch, command.workers, command.cache,
        )  # fmt: skip
        pool, _ = pool.usable(given)
        kinds, _, _ = background_kinds(rows, pool.indices)
        generator = np.random.default_rng(command.seed)
        partners = choose_partners(kinds, "other" if len(np.unique(kinds)) > 1 else "random", generator)
        at = np.flatnonzero(np.isin(pool.indices, chosen))
        if not len(at) or (partners[at] < 0).any():
            raise UserError(f"{self.dataset.path}: too few images in the split {command.split!r} to swap backgrounds")
        mixed, _ = pool.composite(at, "other", partners, self.model.expects.mean, self.accelerator.device)
        images = pool.images[at].to(self.accelerator.device).float() / 255
        outline = "the object mask" if given else "the model's own sight (no masks, so a weaker test)"
        return pool.indices[at], images, mixed, f"Cut out along {outline} and pasted onto another background."

    @torch.no_grad()
    def occupancy(self) -> list[SheetRow]:
        """A heat map of the location of every part, and of the true masks if there are any."""
        counts: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))
        truth, masked, indices = torch.zeros(()), 0, self.sample(self.command.split)
        masks = self.dataset.rows.masks
        has_mask = np.zeros(len(self.dataset.rows), bool) if masks is None else np.array([bool(mask) for mask in masks])
        with self.batches(indices, masks=bool(has_mask[indices].any())) as batches:
            for batch in batches.epoch(0):
                batch = batch.to(self.accelerator.device)
                images = batch.images.float() / 255
                with self.accelerator.autocast():
                    sight = self.method.sight_from(images, self.method.detect(images), self.intervention.correction)
                for k, fraction in enumerate(part_fractions(sight, images)):
                    counts[k] = counts[k] + fraction.sum(dim=0).cpu()
                if batch.masks is not None:
                    annotated = torch.tensor(has_mask[batch.indices.cpu().numpy()], device=batch.masks.device)
                    assert sight.parts is not None
                    truth = truth + cell_share(batch.masks[annotated], sight.parts.shape[2:]).sum(dim=0).cpu()
                    masked += int(annotated.sum())
        means = {k: total / len(indices) for k, total in counts.items() if k not in self.intervention.drop}
        return heat_map_rows(
            f"{self.name}; {len(indices):,} {self.command.split} images",
            {self.intervention.part_name(k): mean for k, mean in means.items()},
            truth / masked if masked else None,
        )


def thumbnails(images: Tensor) -> Tensor:
    everything = torch.ones(len(images), *images.shape[2:], dtype=torch.bool, device=images.device)
    return torch.stack([view.image for view in thumbnail_views(images, everything, None, None)])


def parts_overlay(images: Tensor, sight: Sight) -> Tensor:
    """[n, 3, h, w]: thumbnails with every part in its colour."""
    assert sight.parts is not None
    size, parts = (images.shape[2], images.shape[3]), sight.parts.shape[1] - 1
    views = thumbnail_views(images, sight.visible(size), part_of_pixels(sight, size), None)
    return torch.stack([tint_view(view, parts) for view in views])


def part_fractions(sight: Sight, images: Tensor) -> list[Tensor]:
    """For each part [B, H, W]: the fraction of every cell of the grid that belongs to it."""
    assert sight.parts is not None
    part, grid = part_of_pixels(sight, (images.shape[2], images.shape[3])), sight.parts.shape[2:]
    return [cell_share(part == k, grid) for k in range(sight.parts.shape[1] - 1)]


def heat_map_rows(caption: str, parts: dict[str, Tensor], truth: Tensor | None) -> list[SheetRow]:
    """The true masks first, if they are known, then every part."""
    maps = ({"true masks": truth} if truth is not None else {}) | parts
    tiles = []
    for shares in maps.values():
        tile = heat_map(shares, TILE)
        if truth is not None:
            size = (tile.shape[1], tile.shape[2])
            inside = F.interpolate(truth[None, None], size, mode="nearest-exact")[0, 0] >= HALF * truth.max()
            tile = draw_cross(draw_outline(tile, inside, (1.0, 1.0, 1.0), width=1), centre_of_mass(truth), LINE)
        tiles.append(draw_cross(tile, centre_of_mass(shares), (1.0, 1.0, 1.0)))
    notes = [Note(f"{name}: max. {100 * float(shares.max()):.0f} %") for name, shares in maps.items()]
    starts = range(0, len(tiles), TILES)
    return [
        SheetRow(caption if at == 0 else "", torch.stack(tiles[at : at + TILES]), notes[at : at + TILES])
        for at in starts
    ]


def find_counterparts(rows: Rows, indices: np.ndarray) -> dict[int, int]:
    """Pairs of the same object on backgrounds of different kinds: for the image with the more common group in training,
    the other. Counterparts have the same label, and paths that differ in one folder."""
    groups = rows.groups
    if groups is None:
        return {}
    frequency = np.bincount(groups[rows.split_indices("train")], minlength=len(rows.group_names))
    by_path: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i in indices.tolist():
        parts = Path(rows.images[i]).parts
        for k in range(len(parts) - 1):
            by_path[rows.labels[i], k, parts[:k], parts[k + 1 :]].append(i)
    found = {}
    for same in by_path.values():
        if len({groups[i] for i in same}) > 1:
            first, *_, last = sorted(same, key=lambda i: -frequency[groups[i]])
            found[first] = last
    return found
