"""Localisation of backbones: the attention of CLS, of several models and blocks, against masks or boxes.

Every figure has its n and a 95 % interval over images, and is shown beside that of a uniform map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from ..console.terminal import counted, is_main_process, present, print_notes, watched
from ..data.batches import Batch
from ..data.images import DecodedImage, Preprocess, decode
from ..data.rows import SPLITS, Rows, fingerprint, read_rows
from ..errors import UserError
from ..metrics.attention import attention_columns, concentration_columns, value_and_count
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches, sample_evenly
from ..metrics.localization import RESAMPLES, bootstrap_metrics, gather_in_order, select_annotated
from ..metrics.overlap import Columns
from ..sight import Sight, cell_share, inside_boxes
from ..training.distributed import make_accelerator
from ..vit.model import Input, ViT
from ..vit.weights import HEAD_PREFIXES, load_backbone
from ..where.attention import Heads, attention_maps_and_shares
from .attention_tables import (
    ATTENTION_TARGETS,
    FIGURES,
    LEVELS,
    Attention,
    BackboneAttention,
    BackboneComparison,
    Truth,
)

if TYPE_CHECKING:
    from PIL import Image

    from ..config import Localize

EXAMPLES = 8  # images on the contact sheet
EXAMPLE_SIDE = 144


# ---- figures ---------------------------------------------------------------------------------------------------------


def map_figures(maps: Tensor, inside: Tensor) -> dict[str, Tensor]:
    """Mass, hit, entropy and concentration (A²) of maps [B, H, W] against the ground truth `inside` [B, h, w], each
    [B, 2]: the value, and whether the image counts."""
    return attention_columns(maps, inside) | concentration_columns(maps, inside)


def even_figures(inside: Tensor) -> dict[str, Tensor]:
    """Figures of a uniform map, whose peak is a random position."""
    found = map_figures(torch.ones_like(inside, dtype=torch.float), inside)
    hit_rate = (inside.flatten(1) >= 0.5).float().mean(dim=1)
    return found | {"hit": value_and_count(hit_rate, inside.flatten(1).any(dim=1))}


def truth_in(batch: Batch, truth: Truth) -> Tensor:
    """bool [b, h, w]: masks, or the union of boxes with edges rounded outwards to whole pixels (A²)."""
    if truth == "masks":
        assert batch.masks is not None
        return batch.masks
    assert batch.boxes is not None
    return in_boxes(batch.boxes, (batch.images.shape[-2], batch.images.shape[-1]))


def in_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    return inside_boxes(torch.cat([boxes[..., :2].floor(), boxes[..., 2:].ceil()], dim=-1), size)


# ---- backbones -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BackboneSetup:
    """A backbone, the attention maps to measure, and its input size."""

    name: str
    vit: ViT
    layers: tuple[int, ...]  # from 0
    heads: tuple[Heads, ...]
    expects: Input

    def columns(self, images: Tensor, inside: Tensor) -> Columns:
        """For one batch, with the ground truth bool `inside` [b, h, w]."""
        maps, shares = attention_maps_and_shares(self.vit, images, self.layers, self.heads)
        grid = maps.shape[-2:]
        truth = {"patches": cell_share(inside, grid), "pixels": inside}
        columns = {}
        for level, true in truth.items():
            columns |= {f"even {level} {figure}": one for figure, one in even_figures(true).items()}
            for i, layer in enumerate(self.layers):
                for j, heads in enumerate(self.heads):
                    found = map_figures(maps[:, i, j], true)
                    columns |= {f"{layer} {heads} {level} {figure}": one for figure, one in found.items()}
        for layer, some in enumerate(shares.unbind(dim=1)):
            columns |= {f"{layer} {place}": value_and_count(some[:, k]) for k, place in enumerate(ATTENTION_TARGETS)}
        return {name: column.double().cpu().numpy() for name, column in columns.items()}

    def seen(self, found: Mapping[str, Estimate]) -> BackboneAttention:
        def levels(about: str) -> dict[str, dict[str, Estimate]]:
            return {level: {figure: found[f"{about} {level} {figure}"] for figure in FIGURES} for level in LEVELS}

        if "even pixels mass" not in found:
            raise UserError(f"no image has ground truth left after the crop for {self.name}; choose other data")

        config = self.vit.config
        return BackboneAttention(
            self.name,
            sum(p.numel() for name, p in self.vit.named_parameters() if not name.startswith(HEAD_PREFIXES)),
            config.depth,
            self.expects.size,
            config.patch,
            tuple(Attention(i, str(heads), levels(f"{i} {heads}")) for i in self.layers for heads in self.heads),
            tuple({place: found[f"{i} {place}"] for place in ATTENTION_TARGETS} for i in range(config.depth)),
            levels("even"),
        )


def backbone_setup(
    name: str, vit: ViT, layers: Sequence[int] | Literal["all"], heads: Sequence[str], size: int | None = None
) -> BackboneSetup:
    from ..methods.a2 import parse_heads

    config = vit.config
    for layer in () if layers == "all" else layers:
        if not -config.depth <= layer < config.depth:
            raise UserError(f"--layer {layer}: {name} has the blocks 0 to {config.depth - 1}")
    chosen = range(config.depth) if layers == "all" else [int(layer) % config.depth for layer in layers]
    if size is not None and (size < 1 or size % config.patch):
        near = max(size // config.patch, 1) * config.patch
        raise UserError(
            f"--size {size}: must be a multiple of the patch size of {name} ({config.patch}), such as {near}"
        )
    expects = config.input if size is None else replace(config.input, size=(size, size))
    combinations = [parse_heads(text, config) for text in heads]
    return BackboneSetup(name, vit, tuple(dict.fromkeys(chosen)), tuple(dict.fromkeys(combinations)), expects)


@torch.no_grad()
def localize_backbones(
    setups: Sequence[BackboneSetup],
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
) -> BackboneComparison:
    """Compare backbones on these rows. The ground truth is masks if the data have any, else boxes, unless given.

    Backbones with the same preprocessing share a pass, so that images are decoded once.
    """
    truth = truth or truth_of(rows, indices)
    chosen, notes = select_annotated(rows, np.asarray(indices), truth)
    alike: dict[Preprocess, list[BackboneSetup]] = {}
    for each in setups:
        each.vit.to(accelerator.device).eval()
        alike.setdefault(Preprocess.of(each.expects), []).append(each)
    found: dict[str, BackboneAttention] = {}
    for some in alike.values():
        batches = inference_batches(
            rows, chosen, some[0].expects, accelerator,
            batch=batch, workers=workers, cache=cache, masks=truth == "masks",
        )  # fmt: skip
        mine: dict[str, list[tuple[np.ndarray, Columns]]] = {each.name: [] for each in some}
        try:
            for loaded in watched(batches.epoch(0), len(batches)):
                if len(loaded):
                    loaded = loaded.to(accelerator.device)
                    images, inside = loaded.images.float() / 255, truth_in(loaded, truth)
                    for each in some:
                        mine[each.name].append((loaded.indices.cpu().numpy(), each.columns(images, inside)))
        finally:
            batches.close()
        for each in some:
            columns = gather_in_order(mine[each.name])
            plain = {name for name in columns if not name.endswith((" mass", " hit"))}
            found[each.name] = each.seen(bootstrap_metrics(columns, resamples, seed, plain=plain))
    if len(alike) > 1:
        notes = (
            *notes,
            "the backbones differ in input size or crop, and so does the ground truth they are measured against",
        )
    split = "+".join(SPLITS[i] for i in np.unique(rows.splits[chosen]))
    ordered = tuple(found[each.name] for each in setups)
    return BackboneComparison(rows.name, fingerprint(rows), split, len(chosen), truth, ordered, notes)


def truth_of(rows: Rows, indices: np.ndarray) -> Truth:
    has_masks = rows.masks is not None and any(rows.masks[i] for i in indices)
    return "boxes" if rows.boxes is not None and not has_masks else "masks"


# ---- the command -----------------------------------------------------------------------------------------------------


def localize_command(command: Localize) -> BackboneComparison:
    """`sightline localize BACKBONE … DATA`; every check runs before the work."""
    from ..console.files import make_folder
    from .plots import figure_class

    names, data = command.backbones_and_data()
    rows = read_rows(data, layout=command.layout, all_test=True)
    indices = rows.split_indices(command.split)
    if not len(indices):
        raise UserError(f"{data}: no images in the split {command.split!r}; choose another --split")
    indices, notes = select_annotated(rows, indices, command.ground_truth or truth_of(rows, indices))
    if command.limit is not None:
        indices = sample_evenly(indices, command.limit)
    if command.out is not None and command.figures:
        figure_class()  # raises if matplotlib is missing
    if not command.heads or not command.layer:
        raise UserError("--layer, --heads: name at least one of each")
    loaded = {name: load_backbone(name) for name in names}
    setups = [backbone_setup(name, vit, command.layer, command.heads, command.size) for name, vit in loaded.items()]
    if command.out is not None:
        make_folder(command.out)
    accelerator = make_accelerator(command.device)
    found = localize_backbones(
        setups, rows, indices, accelerator,
        truth=command.ground_truth, batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    found = replace(found, notes=(*notes, *found.notes))
    if command.out is not None and accelerator.is_main_process:
        save(found, command.out)
        if command.figures:
            draw(found, setups, rows, sample_evenly(indices, EXAMPLES), command.out)
    accelerator.wait_for_everyone()
    return found


def save(found: BackboneComparison, folder: Path) -> None:
    from ..console.files import as_csv, write, write_json

    write_json(folder / "backbones.json", found.to_dict())
    lines = found.lines()
    write(folder / "backbones.csv", as_csv(list(lines[0]), lines))


def draw(
    found: BackboneComparison, setups: Sequence[BackboneSetup], rows: Rows, shown: np.ndarray, folder: Path
) -> None:
    from ..console.files import save_image
    from .plots import draw_layers, draw_shares, draw_sizes

    draw_sizes(found, folder / "size.png")
    draw_shares(found, folder / "shares.png")
    if any(len({one.layer for one in seen.attention}) > 1 for seen in found.backbones):
        draw_layers(found, folder / "layers.png")
    save_image(folder / "attention.png", attention_sheet(found, setups, rows, shown))


@torch.no_grad()
def attention_sheet(
    found: BackboneComparison, setups: Sequence[BackboneSetup], rows: Rows, shown: np.ndarray
) -> Image.Image:
    """Example images, their ground truth, and the attention of each backbone in the last requested block."""
    from ..data.drawing import grey_out_hidden, image_grid, overlay_attention

    captions: dict[str, Tensor] = {}
    for seen, each in zip(found.backbones, setups, strict=True):
        device = each.vit.cls_token.device
        samples = [decode(rows, int(i), Preprocess.of(each.expects)) for i in shown]
        images = torch.stack([sample.image for sample in samples]).float() / 255
        if not captions:
            inside = torch.stack([_truth_of_one(sample, found.truth) for sample in samples])
            true = grey_out_hidden(images, Sight(keep_pixels=inside))
            captions = {"images": _resize(images), f"ground truth: {found.truth}": _resize(true)}
        best = max(seen.attention, key=lambda one: one.layer)
        maps, _ = attention_maps_and_shares(each.vit, images.to(device), [best.layer], each.heads[:1])
        figures = best.levels["pixels"]
        values = ", ".join(f"{FIGURES[name]} {figures[name].value_text}" for name in ("mass", "hit"))
        caption = f"{seen.short}, layer {seen.layer(best.layer)}, heads {best.heads}: {values}"
        captions[caption] = _resize(overlay_attention(images, maps[:, 0, 0].cpu()))
    return image_grid(captions)


def _truth_of_one(sample: DecodedImage, truth: Truth) -> Tensor:
    known = sample.mask if truth == "masks" else sample.boxes
    assert known is not None, "images without ground truth were left out"
    return known if truth == "masks" else in_boxes(known[None], (sample.image.shape[1], sample.image.shape[2]))[0]


def _resize(images: Tensor) -> Tensor:
    return F.interpolate(images, (EXAMPLE_SIDE, EXAMPLE_SIDE), mode="bilinear", antialias=True)


def show_backbones(command: Localize) -> int:
    from rich.console import Console
    from rich.markup import escape

    found = localize_command(command)
    if is_main_process():

        def show() -> None:
            console = Console(highlight=False)
            title = f"{found.data}, split {found.split!r}: {counted(found.n)}, ground truth: {found.truth}"
            console.print(escape(title), soft_wrap=True)
            console.print(found.table())
            console.print(found.table_of_shares())
            print_notes(console, found.notes)
            if command.out is not None:
                print(f"Results{' and figures' if command.figures else ''} saved to {command.out}.")

        present(command, found.to_dict(), show)
    return 0
