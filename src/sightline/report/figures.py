"""One run whose parts are drawn: on the same pictures as those of other runs, on swapped backgrounds, as heat maps."""

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
from ..data.images import Canvas, decode
from ..data.rows import Rows
from ..errors import UserError
from ..explain.background_swaps import Held, kinds_of_background, partner
from ..interventions.apply import measured_search
from ..interventions.file import DistanceSketch, Intervention
from ..methods.base import PartMethod
from ..metrics.inference import inference_batches
from ..sight import Prediction, Sight, cell_share
from .contact_sheet import RIGHT, WRONG, Colour, Line, Note, centre_of, crossed, heat
from .gallery import LINE, colour_of, drawn, outlined, painted, small_views
from .survey import part_of_pixels

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.batches import Batches
    from ..load import EvaluationData, Model

TILE, TILES = 132, 9  # of heat maps: their side, and how many stand beside each other
POOL = 64  # pictures that lend their backgrounds
HALF = 0.5


@dataclass(frozen=True, eq=False)
class Easel:
    """One run whose parts are drawn, and the pictures they are drawn on."""

    command: Strips
    model: Model
    accelerator: Accelerator
    method: PartMethod
    intervention: Intervention
    asked: EvaluationData
    called: str

    @classmethod
    def open(cls, command: Strips, folder: Path, data: Path | None, first: Easel | None, called: str = "") -> Easel:
        from ..interventions.apply import kept
        from ..load import evaluation_data, opened
        from ..methods.base import part_method

        accelerator, model = opened(folder, command.device)
        method = part_method(model.method, str(folder))
        intervention = (kept(model) if command.intervention else None) or Intervention()
        if first is None:
            asked = evaluation_data(Evaluate(folder, data, command.layout), model.run)
        elif data is None and model.run.facts["data"]["fingerprint"] != first.asked.fingerprint:
            raise UserError(f"{folder}: was trained on other data than {first.model.run.folder}; name some at the end")
        else:
            asked = first.asked
        if not len(asked.rows.where(command.split)):
            raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
        return cls(command, model, accelerator, method, intervention, asked, called or folder.name)

    @property
    def parts(self) -> int:
        return self.method.where.parts

    @property
    def name(self) -> str:
        facts = self.model.run.facts
        changed = f", {self.intervention.words}" if self.intervention.changes else ""
        called = {"ifam": "iFAM", "pdiscoformer": "PDiscoFormer"}.get(facts["method"], facts["method"])
        return f"K = {self.parts}: {called}, {self.called}{changed}"

    @property
    def legend(self) -> list[tuple[str, Colour]]:
        def byte(k: int) -> Colour:
            r, g, b = (round(255 * level) for level in colour_of(k, self.parts))
            return r, g, b

        left = [k for k in range(self.parts) if k not in self.intervention.drop]
        return [(self.intervention.names.get(k, str(k)), byte(k)) for k in left]

    @cached_property
    def measured(self) -> dict[str, Any] | None:
        return measured_search(self.model)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def chosen(self, among: np.ndarray) -> np.ndarray:
        """A few, the groups alike; the same for every run."""
        generator = np.random.default_rng(self.command.seed)
        cells = self.asked.rows.cells[0]
        at = drawn(np.arange(len(among)), cells[among], self.command.pictures, generator)
        return among[at]

    def pictures(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        canvas = Canvas.of(self.model.expects)
        decoded = [decode(self.asked.rows, int(i), canvas, mask=False).image for i in indices]
        return torch.stack(decoded).to(self.accelerator.device).float() / 255

    def few(self, split: str) -> np.ndarray:
        """From all over a split, at most as many as asked for."""
        every = self.asked.rows.where(split)
        return every[np.linspace(0, len(every) - 1, min(self.command.limit, len(every))).round().astype(int)]

    def batches(self, indices: np.ndarray, *, masks: bool = False) -> closing[Batches]:
        said = self.command
        return closing(
            inference_batches(
                self.asked.rows, indices, self.model.expects, self.accelerator,
                batch=said.batch, workers=said.workers, cache=said.cache, masks=masks,
            )
        )  # fmt: skip

    @torch.no_grad()
    def answers(self, images: Tensor, interventions: Sequence[Intervention]) -> Iterator[Prediction]:
        """Under each; the first stage looks once."""
        with self.accelerator.autocast():
            found = self.method.find(images)
            for one in interventions:
                yield self.method.answer(images, found, one.correction)

    def line(self, caption: str, images: Tensor, answer: Prediction, truth: Sequence[str], **more: Any) -> Line:
        """The parts, painted, and the answers: right ones in green, wrong ones in red."""
        best = answer.probabilities.max(dim=1)
        said = [self.model.classes[k] for k in best.indices.tolist()]
        notes = [
            Note(f"{name} {100 * share:.0f} %", RIGHT if name == label else WRONG)
            for name, share, label in zip(said, best.values.tolist(), truth, strict=True)
        ]
        return Line(caption, painted_parts(images, answer.sight), notes, **more)

    # ---- the three kinds ---------------------------------------------------------------------------------------------

    def part_maps(self) -> list[Line]:
        """The pictures, and this run's parts of them."""
        rows, chosen = self.asked.rows, self.chosen(self.asked.rows.where(self.command.split))
        images = self.pictures(chosen)
        cells, names = rows.cells
        labels = [Note(names[cells[i]]) for i in chosen]
        (answer,) = self.answers(images, [self.intervention])
        parts = painted_parts(images, answer.sight)
        return [Line("the pictures", thumbnails(images), labels), Line(self.name, parts, legend=self.legend)]

    def swapped(self) -> tuple[list[Line], str]:
        """Original, on another background, and there without what is far from its part; and how it was swapped."""
        chosen, images, others, how = self.on_other_backgrounds()
        plain = self.intervention
        doubtful = [replace(plain, quantile=q, thresholds=self.sketch.quantile(q)) for q in self.command.quantiles]
        truth = [self.asked.rows.classes[self.asked.rows.labels[i]] for i in chosen]
        (first,) = self.answers(images, [plain])
        captions = ["its parts", *(f"without patches beyond the {q:g} quantile" for q in self.command.quantiles)]
        answers = self.answers(others, [plain, *doubtful])
        lines = [
            Line("the picture", thumbnails(images), [Note(label) for label in truth]),
            self.line("its parts", images, first, truth, legend=self.legend),
            Line("on another background", thumbnails(others)),
            *(self.line(words, others, answer, truth) for words, answer in zip(captions, answers, strict=True)),
        ]
        if doubtful:
            how += f" Distances of patches are those of {len(self.few('train')):,} training pictures."
        return lines, how if self.method.blind else f"{how} This model sees what is faded, too: its parts only explain."

    @cached_property
    def sketch(self) -> DistanceSketch:
        from ..interventions.apply import calibrate

        if not len(self.asked.rows.where("train")):
            raise UserError(f"{self.asked.path}: no training pictures, whose distances --quantiles are of; use --kind")
        with self.batches(self.few("train")) as batches:
            return calibrate(self.method, batches, self.accelerator)

    def on_other_backgrounds(self) -> tuple[np.ndarray, Tensor, Tensor, str]:
        """Which pictures, they, the same on another background, and how that was made."""
        rows, every = self.asked.rows, self.asked.rows.where(self.command.split)
        if twins := twins_in(rows, every):
            chosen = self.chosen(np.array(sorted(twins)))
            how = "The data have the same thing on another background."
            return chosen, self.pictures(chosen), self.pictures([twins[i] for i in chosen.tolist()]), how
        masked = rows.masks is not None and np.array([bool(rows.masks[i]) for i in every])
        given = bool(np.any(masked))
        among = every[masked] if given else every
        chosen = self.chosen(among)
        rest = np.setdiff1d(among, chosen)
        lent = rest[np.linspace(0, len(rest) - 1, min(POOL, len(rest))).round().astype(int)]
        said = self.command
        held = Held.of(
            self.method, rows, np.concatenate([chosen, lent]), self.model.expects, self.accelerator, given,
            said.batch, said.workers, said.cache,
        )  # fmt: skip
        held, _ = held.usable(given)
        kinds, _, _ = kinds_of_background(rows, held.indices)
        generator = np.random.default_rng(said.seed)
        partners = partner(kinds, "other" if len(np.unique(kinds)) > 1 else "random", generator)
        at = np.flatnonzero(np.isin(held.indices, chosen))
        if not len(at) or (partners[at] < 0).any():
            raise UserError(f"{self.asked.path}: too few pictures in the split {said.split!r} to swap backgrounds")
        mixed, _ = held.mixed(at, "other", partners, self.model.expects.mean, self.accelerator.device)
        images = held.images[at].to(self.accelerator.device).float() / 255
        outline = "the data's mask" if given else "what the model looks at, for want of masks, which is a weaker test,"
        return held.indices[at], images, mixed, f"Cut out along {outline} and put before another picture's background."

    @torch.no_grad()
    def occupancy(self) -> list[Line]:
        """A heat map for every part, and one of the true masks, if there are any."""
        counts: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))
        truth, masked, indices = torch.zeros(()), 0, self.few(self.command.split)
        masks = self.asked.rows.masks
        known = np.zeros(len(self.asked.rows), bool) if masks is None else np.array([bool(mask) for mask in masks])
        with self.batches(indices, masks=bool(known[indices].any())) as batches:
            for batch in batches.epoch(0):
                batch = batch.to(self.accelerator.device)
                images = batch.images.float() / 255
                with self.accelerator.autocast():
                    sight = self.method.decide(images, self.method.find(images), self.intervention.correction)
                for k, share in enumerate(occupied(sight, images)):
                    counts[k] = counts[k] + share.sum(dim=0).cpu()
                if batch.masks is not None:
                    there = torch.tensor(known[batch.indices.cpu().numpy()], device=batch.masks.device)
                    assert sight.parts is not None
                    truth = truth + cell_share(batch.masks[there], sight.parts.shape[2:]).sum(dim=0).cpu()
                    masked += int(there.sum())
        means = {k: total / len(indices) for k, total in counts.items() if k not in self.intervention.drop}
        return heat_lines(
            f"{self.name}; {len(indices):,} {self.command.split} pictures",
            {self.intervention.part(k): mean for k, mean in means.items()},
            truth / masked if masked else None,
        )


def thumbnails(images: Tensor) -> Tensor:
    everything = torch.ones(len(images), *images.shape[2:], dtype=torch.bool, device=images.device)
    return torch.stack([view.image for view in small_views(images, everything, None, None)])


def painted_parts(images: Tensor, sight: Sight) -> Tensor:
    """[n, 3, h, w]: thumbnails with every part in its colour."""
    assert sight.parts is not None
    size, parts = (images.shape[2], images.shape[3]), sight.parts.shape[1] - 1
    views = small_views(images, sight.visible(size), part_of_pixels(sight, size), None)
    return torch.stack([painted(view, parts) for view in views])


def occupied(sight: Sight, images: Tensor) -> list[Tensor]:
    """For each part [B, H, W]: which share of every cell of the grid belongs to it."""
    assert sight.parts is not None
    part, grid = part_of_pixels(sight, (images.shape[2], images.shape[3])), sight.parts.shape[2:]
    return [cell_share(part == k, grid) for k in range(sight.parts.shape[1] - 1)]


def heat_lines(caption: str, parts: dict[str, Tensor], truth: Tensor | None) -> list[Line]:
    """Things first, if they are known, then every part."""
    maps = ({"true masks": truth} if truth is not None else {}) | parts
    tiles = []
    for shares in maps.values():
        tile = heat(shares, TILE)
        if truth is not None:
            size = (tile.shape[1], tile.shape[2])
            inside = F.interpolate(truth[None, None], size, mode="nearest-exact")[0, 0] >= HALF * truth.max()
            tile = crossed(outlined(tile, inside, (1.0, 1.0, 1.0), width=1), centre_of(truth), LINE)
        tiles.append(crossed(tile, centre_of(shares), (1.0, 1.0, 1.0)))
    notes = [Note(f"{name}: up to {100 * float(shares.max()):.0f} %") for name, shares in maps.items()]
    starts = range(0, len(tiles), TILES)
    return [
        Line(caption if at == 0 else "", torch.stack(tiles[at : at + TILES]), notes[at : at + TILES]) for at in starts
    ]


def twins_in(rows: Rows, indices: np.ndarray) -> dict[int, int]:
    """Where a split has the same thing twice, on backgrounds of another kind: for the picture whose background is more
    usual in training, the other. Twins have one label, and paths that differ in one folder."""
    groups = rows.groups
    if groups is None:
        return {}
    usual = np.bincount(groups[rows.where("train")], minlength=len(rows.group_names))
    known: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i in indices.tolist():
        parts = Path(rows.images[i]).parts
        for k in range(len(parts) - 1):
            known[rows.labels[i], k, parts[:k], parts[k + 1 :]].append(i)
    found = {}
    for same in known.values():
        if len({groups[i] for i in same}) > 1:
            first, *_, last = sorted(same, key=lambda i: -usual[groups[i]])
            found[first] = last
    return found
