"""One row of the A² tables: a run of the product, true masks made worse on purpose, or where a backbone looks."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from a2_rows import Row
from lanes import as_typed
from sightline.data.rows import Rows, read_rows
from sightline.errors import UserError
from sightline.sight import Prediction, Sight
from waterbirds_rows import folder_of


@dataclass(frozen=True)
class Setting:
    """What all rows of one set share."""

    data: Path
    runs: Path
    cache: Path
    backbones: dict[str, str]  # name -> file
    displaced: Path | None = None
    device: str = "auto"
    precision: str = "bf16"
    batch: int = 512
    workers: int = 2

    def folder(self, row: Row) -> Path:
        return folder_of(self.runs, row.name, row.seed)

    def lacks(self, row: Row) -> bool:
        folder = self.folder(row)
        if row.line.split()[0] in ("attention", "distances"):
            return not (folder / "localization" / "test.csv").exists()
        moved = row.moved and self.displaced is not None and not (folder / "predictions" / "displaced.csv").exists()
        return moved or not (folder / "metrics.json").exists()


def do(setting: Setting, row: Row, look: dict[str, Any] | None = None) -> dict[str, Any]:
    """What came of it, in a line. `look` says how its look was chosen, where it was."""
    began, kind = time.perf_counter(), row.line.split()[0]
    with contextlib.redirect_stdout(sys.stderr):
        {"oracle": oracle, "attention": attention, "distances": distances}.get(kind, trained)(setting, row)
    about = row.about
    if (setting.folder(row) / "metrics.json").exists():
        from sightline.metrics.estimates import Metrics, read_metrics
        from sightline.training.run_folder import read_run

        read_run(setting.folder(row)).note(benchmark={"row": row.name, "line": row.line, "look": look})
        (setting.folder(row) / "best.safetensors").unlink(missing_ok=True)  # it would fill the disk
        splits = read_metrics(setting.folder(row) / "metrics.json")["splits"]
        figures = {split: Metrics.from_dict(one) for split, one in splits.items()}
        worst = figures["test"].worst_group or figures["test"].worst_class
        about |= {"val_balanced": round(figures["val"].balanced.value, 4)} if "val" in figures else {}
        about |= {"accuracy": round(figures["test"].accuracy.value, 4), "worst_group": round(worst.value, 4)}
    return about | {"seconds": round(time.perf_counter() - began, 1)}


def command_of(setting: Setting, row: Row, method: str | None = None) -> Any:
    """What a user would type, parsed as the command line does it."""
    named, *flags = shlex.split(row.line)
    flags = [setting.backbones[flag[1:]] if flag.startswith("@") else flag for flag in flags]
    given = [
        str(setting.data), *flags, "--out", str(setting.folder(row)), "--seed", str(row.seed), "--device",
        setting.device, "--precision", setting.precision, "--batch", str(setting.batch), "--workers",
        str(setting.workers), "--cache", str(setting.cache), "--resume",
    ]  # fmt: skip
    return as_typed(row.name, method or named, given)


def trained(setting: Setting, row: Row) -> None:
    from sightline.train import train

    folder = train(command_of(setting, row))
    if row.moved and setting.displaced is not None:
        answer_displaced(setting, folder, setting.displaced)


def answer_displaced(setting: Setting, folder: Path, data: Path) -> None:
    """The same birds on the same scenes, away from the centre and in it."""
    from sightline.data.cache import Cache
    from sightline.data.images import Canvas
    from sightline.evaluate import opened, with_classes_of
    from sightline.metrics.inference import answer

    accelerator, model = opened(folder, setting.device)
    rows = with_classes_of(model, read_rows(data), data)
    at = rows.where("test")
    cache = Cache.open(rows, Canvas.of(model.expects), setting.cache, at, workers=max(1, setting.workers))
    found = answer(model.method, rows, at, model.expects, accelerator, batch=setting.batch, cache=cache)
    found.save_csv(folder / "predictions" / "displaced.csv")


# ---- true masks, moved -----------------------------------------------------------------------------------------------


class MovedMasks(nn.Module):
    """One crop where the true mask would be, had it been moved so far that only `mass` of it still lies on itself."""

    needs_masks = True

    def __init__(self, side: float, mass: float):
        super().__init__()
        self.side, self.mass = side, mass

    def given(self, rows: Rows) -> Rows:
        return rows

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        from sightline.where.crops import greedy_crops, in_pixels

        side = in_pixels(self.side, images.shape[-2:])
        moved, width = moved_masks(masks, self.mass).float(), side // 2 * 2 + 1
        thick = F.avg_pool2d(moved[:, None], width, 1, width // 2)[:, 0]  # where most of it is, not any place inside
        return Sight(boxes=greedy_crops(thick, [side]))

    def look(self, images: Tensor) -> Sight:
        raise NotImplementedError("it is told where to look")

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (there is nothing to draw but the crops)
        return {}


def moved_masks(masks: Tensor, mass: float) -> Tensor:
    """bool [B, h, w]: each towards the wider part of its picture, in a direction of its own, until at most `mass` of
    it lies on where it was."""
    h, w = masks.shape[1:]
    y, x = torch.arange(h, device=masks.device), torch.arange(w, device=masks.device)
    area = masks.sum(dim=(1, 2)).clamp(min=1)
    centre_y, centre_x = (masks.sum(dim=2) * y).sum(1) / area, (masks.sum(dim=1) * x).sum(1) / area
    angle = (area * 0.6180339887).frac() * (math.pi / 2)  # as good as random, and always the same
    down, right = torch.where(centre_y * 2 > h, -1, 1) * angle.sin(), torch.where(centre_x * 2 > w, -1, 1) * angle.cos()
    best, waiting = masks.clone(), torch.ones(len(masks), dtype=torch.bool, device=masks.device)
    for distance in range(0, max(h, w), max(1, max(h, w) // 112)):
        shifted = shifted_by(masks, (distance * down).round().long(), (distance * right).round().long())
        there = (shifted & masks).sum(dim=(1, 2)) / shifted.sum(dim=(1, 2)).clamp(min=1)
        best = torch.where(waiting[:, None, None] & shifted.any(dim=2).any(dim=1)[:, None, None], shifted, best)
        waiting = waiting & (there > mass)
        if not waiting.any():
            break
    return best


def shifted_by(masks: Tensor, down: Tensor, right: Tensor) -> Tensor:
    h, w = masks.shape[1:]
    y = torch.arange(h, device=masks.device) - down[:, None]
    x = torch.arange(w, device=masks.device) - right[:, None]
    inside = ((y >= 0) & (y < h))[:, :, None] & ((x >= 0) & (x < w))[:, None]
    picture = torch.arange(len(masks), device=masks.device)[:, None, None]
    return masks[picture, y.clamp(0, h - 1)[:, :, None], x.clamp(0, w - 1)[:, None]] & inside


class ToldPair(nn.Module):
    needs_masks = True

    def __init__(self, where: MovedMasks, what: nn.Module):
        super().__init__()
        self.where, self.what = where, what

    def given(self, rows: Rows) -> Rows:
        return rows

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        return self.where.look_at(images, masks)

    def look(self, images: Tensor) -> Sight:
        return self.where.look(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return cast(Any, self.what).judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)


def oracle(setting: Setting, row: Row) -> None:
    """A² with true masks for attention, made worse step by step: what better looking is worth, all else being equal."""
    from sightline.methods.erm import note_backbone, open_backbone
    from sightline.methods.probe import fit_probe, keep_fitted, seen_at_once, set_head
    from sightline.metrics.inference import answering_batches, make_accelerator, over_batches
    from sightline.train import begin_together, conclude
    from sightline.training.context import Desk
    from sightline.what.probe import BoxProbe

    words = shlex.split(row.line)
    mass, crop = (words[words.index(flag) + 1] for flag in ("--mass", "--crop"))
    config = command_of(setting, Row(row.set, row.name, f"probe {' '.join(words[words.index('--backbone') :])}"))
    rows, accelerator = read_rows(config.data), make_accelerator(config.device, config.precision)
    run = begin_together(config, rows, accelerator)
    vit, expects = open_backbone(config, 0)
    where = MovedMasks(float(Fraction(crop)), float(mass))
    what = BoxProbe(vit, seen_at_once(vit, expects), 1, len(rows.classes)).to(accelerator.device).eval()

    def over(split: str, function: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        batches = answering_batches(
            rows, rows.where(split), expects, accelerator, batch=config.batch, workers=config.workers,
            cache=config.cache, masks=True,
        )  # fmt: skip
        with contextlib.closing(batches):
            return over_batches(cast(Any, function), batches, accelerator)

    embed = lambda images, masks: what.embed(images, where.look_at(images, masks))  # noqa: E731
    fitted = fit_probe(config, rows, {split: over(split, embed) for split in ("train", "val")})
    set_head(cast(nn.Linear, what.head), fitted.linear)
    note_backbone(run, vit, expects, config)
    keep_fitted(run, what, fitted, config, {"mass": float(mass), "crop": crop})
    conclude(cast(Any, ToldPair(where, what)), Desk(rows, run, accelerator, expects), config)
    found = over("test", lambda images, masks: on_bird(where, images, masks))
    names = [rows.images[i] for i in rows.where("test")]
    write_pictures(run.folder, names, {"mass": found[:, 0], "crop": found[:, 1]})


def on_bird(where: MovedMasks, images: Tensor, masks: Tensor) -> Tensor:
    """[B, 2]: how much of the moved mask, and of the crop, is on the bird."""
    moved, inside = moved_masks(masks, where.mass), where.look_at(images, masks).visible(tuple(images.shape[-2:]))
    return torch.stack([(some & masks).sum((1, 2)) / some.sum((1, 2)).clamp(min=1) for some in (moved, inside)], dim=1)


# ---- where a backbone looks ------------------------------------------------------------------------------------------


def attention(setting: Setting, row: Row) -> None:
    """Picture by picture: mass, hit and entropy of every block, of every way to join the last block's heads, and the
    attention that registers have; with --neighbours also whether the nearest name the right class."""
    from sightline.explain.localize_backbones import subject, truth_in
    from sightline.metrics.inference import answering_batches, make_accelerator

    words = shlex.split(row.line)
    vit, rows = opened_backbone(setting.backbones[words[words.index("--backbone") + 1][1:]]), read_rows(setting.data)
    accelerator = make_accelerator(setting.device)
    vit.to(accelerator.device).eval()
    heads = ["mean", "entropy", "lowest", "max", *map(str, range(vit.config.heads))]
    asked = [subject(row.name, vit, "all", ["mean"]), subject(row.name, vit, [-1], heads[1:])]
    expects = vit.config.input
    for split in ("val", "test"):
        chosen, found = rows.where(split), []
        batches = answering_batches(
            rows, chosen, expects, accelerator, batch=min(setting.batch, 128), workers=setting.workers,
            cache=setting.cache, masks=True,
        )  # fmt: skip
        with contextlib.closing(batches), torch.no_grad():
            for some in batches.epoch(0):
                some = some.to(accelerator.device)
                images, inside = some.images.float() / 255, truth_in(some, "masks")
                columns = {k: v for one in asked for k, v in one.columns(images, inside).items() if is_wanted(k)}
                found.append({k: v[:, 0] for k, v in columns.items()})
        columns = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        if "--neighbours" in words and split == "test":
            columns["knn"] = named_rightly(setting, vit, rows, accelerator)
        names = [rows.images[i] for i in chosen]
        write_pictures(setting.folder(row), names, columns, split)


def is_wanted(column: str) -> bool:
    return column.endswith((" pixels mass", " pixels hit", " pixels entropy", " registers"))


def opened_backbone(file: str) -> Any:
    """A weights file, or the ViT of a trained run."""
    from sightline.load import load
    from sightline.vit.weights import load_backbone

    if (Path(file) / "run.json").exists():
        return cast(Any, load(Path(file)).method).vit
    return load_backbone(file)


def named_rightly(setting: Setting, vit: Any, rows: Rows, accelerator: Any, bank: int = 10_000) -> np.ndarray:
    """Of every test picture, whether its neighbours among training pictures name its class."""
    from sightline.methods.dino import nearest_neighbours
    from sightline.what.features import cls_features

    at = {"train": rows.where("train")[:bank], "test": rows.where("test")}
    features = {
        split: F.normalize(torch.from_numpy(cls_features(
            vit, rows, some, vit.config.input, accelerator, setting.cache, batch=setting.batch, workers=setting.workers
        )), dim=1)
        for split, some in at.items()
    }  # fmt: skip
    labels = {split: torch.from_numpy(rows.labels[some]) for split, some in at.items()}
    return nearest_neighbours(features["test"], labels["test"], features["train"], labels["train"]).float().numpy()


def distances(setting: Setting, row: Row) -> None:
    """Of every test picture's bird from the centre, in shares of width and height (A², App. on centre bias)."""
    from sightline.data.images import read_picture_mask

    rows = read_rows(setting.data)
    at, values = rows.where("test"), []
    for i in at:
        with Image.open(rows.image_path(int(i))) as picture:
            size = picture.size
        outline = read_picture_mask(rows, int(i)) if rows.boxes is None else None
        box = rows.boxes[i][0] if rows.boxes is not None else outline.getbbox() if outline else None
        if box is None:
            raise UserError(f"{rows.images[i]}: neither a box nor a mask, so that nobody knows where the bird is")
        left, top, right, bottom = box
        values.append(math.hypot((left + right) / 2 / size[0] - 0.5, (top + bottom) / 2 / size[1] - 0.5))
    write_pictures(setting.folder(row), [rows.images[i] for i in at], {"distance": np.array(values)})


def write_pictures(folder: Path, images: Sequence[str], columns: dict[str, np.ndarray], split: str = "test") -> None:
    path = folder / "localization" / f"{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", *columns])
    for image, *values in zip(images, *columns.values(), strict=True):
        writer.writerow([image, *(f"{value:.5g}" for value in values)])
    path.with_suffix(".part").write_text(text.getvalue(), encoding="utf-8")
    path.with_suffix(".part").replace(path)
