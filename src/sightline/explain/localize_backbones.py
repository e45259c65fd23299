"""Where do backbones look? The attention of CLS, of several of them and in several blocks, against masks or boxes.

Every figure has its n and a 95 % interval over images, and stands beside that of a map that is the same everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from ..console.terminal import counted, is_main_process, print_notes, watched
from ..data.batches import Batch
from ..data.images import Canvas, Sample, decode
from ..data.rows import SPLITS, Rows, fingerprint, read_rows
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches
from ..metrics.localization import RESAMPLES, estimates, in_order, with_truth
from ..metrics.overlap import Columns
from ..sight import Sight, cell_share, inside_boxes
from ..training.distributed import make_accelerator
from ..vit.model import Input, ViT
from ..vit.weights import HEAD, load_backbone
from ..where.attention import Heads, maps_and_shares
from .attention_tables import FIGURES, LEVELS, PLACES, Attention, Seen, SideBySide, Truth

if TYPE_CHECKING:
    from PIL import Image

    from ..config import Localize

PICTURES = 8  # on the sheet
PICTURE_SIDE = 144


# ---- figures ---------------------------------------------------------------------------------------------------------


def map_figures(maps: Tensor, inside: Tensor) -> dict[str, Tensor]:
    """Of maps [B, H, W] over cells of which a share `inside` [B, H, W] is true: a value and whether it counts, [B, 2].

    Mass, hit, entropy and concentration as in A² (sec. 4; App., tables 19 to 23). A hit is a peak at least half inside.
    """
    flat, true = maps.flatten(1).float(), inside.flatten(1).float()
    shares = flat / flat.sum(dim=1, keepdim=True).clamp(min=1e-12)
    counts = true.any(dim=1)
    cells = shares.shape[1]
    top = shares.topk(max(1, round(0.25 * cells)), dim=1).values.cumsum(dim=1)
    return {
        "mass": _counted((shares * true).sum(dim=1), counts),
        "hit": _counted(true.gather(1, shares.argmax(dim=1, keepdim=True))[:, 0] >= 0.5, counts),
        "entropy": _counted(torch.special.entr(shares).sum(dim=1) / math.log(max(2, cells))),
        "top10": _counted(top[:, max(1, round(0.1 * cells)) - 1]),
        "top25": _counted(top[:, -1]),
    }


def even_figures(inside: Tensor) -> dict[str, Tensor]:
    """Of a map that is the same everywhere, whose peak is anywhere."""
    found = map_figures(torch.ones_like(inside, dtype=torch.float), inside)
    by_chance = (inside.flatten(1) >= 0.5).float().mean(dim=1)
    return found | {"hit": _counted(by_chance, inside.flatten(1).any(dim=1))}


def _counted(values: Tensor, counts: Tensor | None = None) -> Tensor:
    counts = torch.ones_like(values, dtype=torch.float) if counts is None else counts.float()
    return torch.stack([values.float() * counts, counts], dim=1)


def truth_in(batch: Batch, truth: Truth) -> Tensor:
    """bool [b, h, w]: masks, or the union of boxes, whose edges go to the whole pixel outside (A²)."""
    if truth == "masks":
        assert batch.masks is not None
        return batch.masks
    assert batch.boxes is not None
    return in_boxes(batch.boxes, (batch.images.shape[-2], batch.images.shape[-1]))


def in_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    return inside_boxes(torch.cat([boxes[..., :2].floor(), boxes[..., 2:].ceil()], dim=-1), size)


# ---- backbones -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A backbone, the maps that are asked of it, and the pictures it is shown."""

    name: str
    vit: ViT
    layers: tuple[int, ...]  # from 0
    heads: tuple[Heads, ...]
    expects: Input

    def columns(self, images: Tensor, inside: Tensor) -> Columns:
        """For one batch: bool `inside` [b, h, w] is the truth."""
        maps, shares = maps_and_shares(self.vit, images, self.layers, self.heads)
        grid = maps.shape[-2:]
        truth = {"patches": cell_share(inside, grid), "pixels": inside}
        columns = {}
        for level, true in truth.items():
            columns |= {f"even {level} {figure}": one for figure, one in even_figures(true).items()}
            for i, layer in enumerate(self.layers):
                for j, heads in enumerate(self.heads):
                    each = maps[:, i, j]
                    if level == "pixels":
                        each = F.interpolate(each[:, None], inside.shape[1:], mode="bilinear")[:, 0]
                    found = map_figures(each, true)
                    columns |= {f"{layer} {heads} {level} {figure}": one for figure, one in found.items()}
        for layer, some in enumerate(shares.unbind(dim=1)):
            columns |= {f"{layer} {place}": _counted(some[:, k]) for k, place in enumerate(PLACES)}
        return {name: column.double().cpu().numpy() for name, column in columns.items()}

    def seen(self, found: Mapping[str, Estimate]) -> Seen:
        def levels(about: str) -> dict[str, dict[str, Estimate]]:
            return {level: {figure: found[f"{about} {level} {figure}"] for figure in FIGURES} for level in LEVELS}

        if "even pixels mass" not in found:
            raise UserError(f"nothing is true in any of the pictures, as {self.name} sees them; choose other data")

        config = self.vit.config
        return Seen(
            self.name,
            sum(p.numel() for name, p in self.vit.named_parameters() if not name.startswith(HEAD)),
            config.depth,
            self.expects.size,
            config.patch,
            tuple(Attention(i, str(heads), levels(f"{i} {heads}")) for i in self.layers for heads in self.heads),
            tuple({place: found[f"{i} {place}"] for place in PLACES} for i in range(config.depth)),
            levels("even"),
        )


def subject(
    name: str, vit: ViT, layers: Sequence[int] | Literal["all"], heads: Sequence[str], size: int | None = None
) -> Subject:
    from ..methods.a2 import heads_of

    config = vit.config
    for layer in () if layers == "all" else layers:
        if not -config.depth <= layer < config.depth:
            raise UserError(f"--layer {layer}: {name} has {config.depth} blocks, 0 to {config.depth - 1}")
    chosen = range(config.depth) if layers == "all" else [int(layer) % config.depth for layer in layers]
    if size is not None and (size < 1 or size % config.patch):
        near = max(size // config.patch, 1) * config.patch
        raise UserError(f"--size {size}: must be a multiple of the patch of {name}, {config.patch}, such as {near}")
    expects = config.input if size is None else replace(config.input, size=(size, size))
    joined = [heads_of(text, config) for text in heads]
    return Subject(name, vit, tuple(dict.fromkeys(chosen)), tuple(dict.fromkeys(joined)), expects)


@torch.no_grad()
def localize_backbones(
    subjects: Sequence[Subject],
    rows: Rows,
    indices: np.ndarray,
    accelerator: Accelerator,
    *,
    truth: Truth | None = None,
    batch: int = 64,
    workers: int = 0,
    cache: Path | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> SideBySide:
    """Where they look on these rows. The truth is masks where the data have any, else boxes, unless it is said.

    Backbones that see pictures alike see them together, so that they are decoded once.
    """
    truth = truth or truth_of(rows, indices)
    chosen, notes = with_truth(rows, np.asarray(indices), truth)
    alike: dict[Canvas, list[Subject]] = {}
    for each in subjects:
        each.vit.to(accelerator.device).eval()
        alike.setdefault(Canvas.of(each.expects), []).append(each)
    found: dict[str, Seen] = {}
    for some in alike.values():
        batches = inference_batches(
            rows, chosen, some[0].expects, accelerator,
            batch=batch, workers=workers, cache=cache, masks=truth == "masks",
        )  # fmt: skip
        mine: dict[str, list[tuple[np.ndarray, Columns]]] = {each.name: [] for each in some}
        try:
            for pictures in watched(batches.epoch(0), len(batches)):
                if len(pictures):
                    pictures = pictures.to(accelerator.device)
                    images, inside = pictures.images.float() / 255, truth_in(pictures, truth)
                    for each in some:
                        mine[each.name].append((pictures.indices.cpu().numpy(), each.columns(images, inside)))
        finally:
            batches.close()
        for each in some:
            columns = in_order(mine[each.name])
            plain = {name for name in columns if not name.endswith((" mass", " hit"))}
            found[each.name] = each.seen(estimates(columns, resamples, seed, plain=plain))
    if len(alike) > 1:
        notes = (
            *notes,
            "backbones see pictures as each expects them: sizes or margins differ, and with them the truth",
        )
    split = "+".join(SPLITS[i] for i in np.unique(rows.splits[chosen]))
    ordered = tuple(found[each.name] for each in subjects)
    return SideBySide(rows.name, fingerprint(rows), split, len(chosen), truth, ordered, notes)


def truth_of(rows: Rows, indices: np.ndarray) -> Truth:
    has_masks = rows.masks is not None and any(rows.masks[i] for i in indices)
    return "boxes" if rows.boxes is not None and not has_masks else "masks"


# ---- the command -----------------------------------------------------------------------------------------------------


def localize_command(command: Localize) -> SideBySide:
    """What `sightline localize BACKBONE … DATA` asks for; everything that can be wrong is said before the work."""
    from ..console.files import make_folder
    from .plots import figure_class

    names, data = command.backbones_and_data()
    rows = read_rows(data, layout=command.layout, whole=True)
    indices = rows.where(command.split)
    if not len(indices):
        raise UserError(f"{data}: no pictures in the split {command.split!r}; choose another --split")
    indices, notes = with_truth(rows, indices, command.truth or truth_of(rows, indices))
    if command.limit is not None:
        if command.limit < 1:
            raise UserError(f"--limit {command.limit}: at least 1")
        indices = spread_over(indices, command.limit)
    if command.out is not None and command.pictures:
        figure_class()  # or it says what is missing
    if not command.heads or not command.layer:
        raise UserError("--layer, --heads: name at least one of each")
    loaded = {name: load_backbone(name) for name in names}
    subjects = [subject(name, vit, command.layer, command.heads, command.size) for name, vit in loaded.items()]
    if command.out is not None:
        make_folder(command.out)
    accelerator = make_accelerator(command.device)
    found = localize_backbones(
        subjects, rows, indices, accelerator,
        truth=command.truth, batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    found = replace(found, notes=(*notes, *found.notes))
    if command.out is not None and accelerator.is_main_process:
        save(found, command.out)
        if command.pictures:
            draw(found, subjects, rows, spread_over(indices, PICTURES), command.out)
    accelerator.wait_for_everyone()
    return found


def spread_over(indices: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of them, at even distances: rows are often in the order of their classes."""
    return indices[np.linspace(0, len(indices) - 1, min(count, len(indices))).round().astype(np.int64)]


def save(found: SideBySide, folder: Path) -> None:
    from ..console.files import as_csv, write

    write(folder / "backbones.json", json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
    lines = found.lines()
    write(folder / "backbones.csv", as_csv(list(lines[0]), lines))


def draw(found: SideBySide, subjects: Sequence[Subject], rows: Rows, few: np.ndarray, folder: Path) -> None:
    from .plots import draw_layers, draw_shares, draw_sizes

    draw_sizes(found, folder / "size.png")
    draw_shares(found, folder / "shares.png")
    if any(len({one.layer for one in seen.attention}) > 1 for seen in found.backbones):
        draw_layers(found, folder / "layers.png")
    attention_sheet(found, subjects, rows, few).save(folder / "attention.png")


@torch.no_grad()
def attention_sheet(found: SideBySide, subjects: Sequence[Subject], rows: Rows, few: np.ndarray) -> Image.Image:
    """Some pictures, what is true of them, and lit by the attention of each backbone in the last block asked about."""
    from ..data.drawing import as_seen, lit, sheet

    captions: dict[str, Tensor] = {}
    for seen, each in zip(found.backbones, subjects, strict=True):
        device = each.vit.cls_token.device
        samples = [decode(rows, int(i), Canvas.of(each.expects)) for i in few]
        images = torch.stack([sample.image for sample in samples]).float() / 255
        if not captions:
            inside = torch.stack([_truth_of_one(sample, found.truth) for sample in samples])
            true = as_seen(images, Sight(keep_pixels=inside))
            captions = {"pictures": _even_sided(images), f"truth: {found.truth}": _even_sided(true)}
        best = max(seen.attention, key=lambda one: one.layer)
        maps, _ = maps_and_shares(each.vit, images.to(device), [best.layer], each.heads[:1])
        figures = best.levels["pixels"]
        said = ", ".join(f"{FIGURES[name]} {figures[name].figure}" for name in ("mass", "hit"))
        about = f"{seen.short}, layer {seen.layer(best.layer)}, heads {best.heads}: {said}"
        captions[about] = _even_sided(lit(images, maps[:, 0, 0].cpu()))
    return sheet(captions)


def _truth_of_one(sample: Sample, truth: Truth) -> Tensor:
    known = sample.mask if truth == "masks" else sample.boxes
    assert known is not None, "pictures without any truth were left out"
    return known if truth == "masks" else in_boxes(known[None], (sample.image.shape[1], sample.image.shape[2]))[0]


def _even_sided(images: Tensor) -> Tensor:
    return F.interpolate(images, (PICTURE_SIDE, PICTURE_SIDE), mode="bilinear", antialias=True)


def show_backbones(command: Localize) -> int:
    from rich.console import Console
    from rich.markup import escape

    found = localize_command(command)
    if is_main_process():
        console = Console(highlight=False)
        about = f"{found.data}, split {found.split!r}: {counted(found.n)}, the truth being {found.truth}"
        console.print(escape(about), soft_wrap=True)
        console.print(found.table())
        console.print(found.table_of_shares())
        print_notes(console, found.notes)
        if command.out is not None:
            print(f"The figures{' and pictures' if command.pictures else ''} are in {command.out}.")
    return 0
