"""Where backbones attend, image by image, and how far birds are from the centre."""

from __future__ import annotations

import contextlib
import math
import shlex
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from measure import BATCH, write_columns
from rows import Row
from sightline.data.rows import Rows, read_rows
from sightline.errors import UserError
from study import Context


def attention(context: Context, row: Row) -> None:
    """Image by image: mass, hit and entropy of every block, of every aggregate of the heads of the last block, and the
    attention to registers; with --neighbours also whether the k-NN prediction is correct."""
    from sightline.explain.localize_backbones import backbone_setup, truth_in
    from sightline.metrics.inference import inference_batches
    from sightline.training.distributed import make_accelerator

    words = shlex.split(row.line)
    vit, rows = (
        opened_backbone(context.files[words[words.index("--backbone") + 1][1:]]),
        read_rows(context.data_of(row)),
    )
    accelerator = make_accelerator(context.device)
    vit.to(accelerator.device).eval()
    heads = ["mean", "entropy", "lowest", "max", *map(str, range(vit.config.heads))]
    asked = [backbone_setup(row.name, vit, "all", ["mean"]), backbone_setup(row.name, vit, [-1], heads[1:])]
    expects = vit.config.input
    for split in ("val", "test"):
        chosen, found = rows.split_indices(split), []
        batches = inference_batches(
            rows, chosen, expects, accelerator, batch=128, workers=context.workers,
            cache=context.cache, masks=True,
        )  # fmt: skip
        with contextlib.closing(batches), torch.no_grad():
            for some in batches.epoch(0):
                some = some.to(accelerator.device)
                images, inside = some.images.float() / 255, truth_in(some, "masks")
                columns = {k: v for one in asked for k, v in one.columns(images, inside).items() if is_wanted(k)}
                found.append({k: v[:, 0] for k, v in columns.items()})
        columns = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        if "--neighbours" in words and split == "test":
            columns["knn"] = knn_correct(context, vit, rows, accelerator)
        names = [rows.images[i] for i in chosen]
        write_columns(context.folder(row), names, columns, split)


def is_wanted(column: str) -> bool:
    return column.endswith((" pixels mass", " pixels hit", " pixels entropy", " registers"))


def opened_backbone(file: str) -> Any:
    """A weights file, or the ViT of a trained run."""
    from sightline.load import load_as_trained as load
    from sightline.vit.weights import load_backbone

    if (Path(file) / "run.json").exists():
        return cast(Any, load(Path(file)).method).vit
    return load_backbone(file)


def knn_correct(context: Context, vit: Any, rows: Rows, accelerator: Any, bank: int = 10_000) -> np.ndarray:
    """Of every test image, whether its nearest training images predict its class."""
    from sightline.methods.dino import knn_correct
    from sightline.what.features import cls_features

    at = {"train": rows.split_indices("train")[:bank], "test": rows.split_indices("test")}
    features = {
        split: F.normalize(torch.from_numpy(cls_features(
            vit, rows, some, vit.config.input, accelerator, context.cache, batch=BATCH, workers=context.workers
        )), dim=1)
        for split, some in at.items()
    }  # fmt: skip
    labels = {split: torch.from_numpy(rows.labels[some]) for split, some in at.items()}
    return knn_correct(features["test"], labels["test"], features["train"], labels["train"]).float().numpy()


def distances(context: Context, row: Row) -> None:
    """Of the bird from the centre, in shares of width and height (A², appendix on centre bias)."""
    from sightline.data.images import read_row_mask

    rows = read_rows(context.data_of(row))
    at, values = rows.split_indices("test"), []
    for i in at:
        with Image.open(rows.image_path(int(i))) as image:
            size = image.size
        outline = read_row_mask(rows, int(i)) if rows.boxes is None else None
        box = rows.boxes[i][0] if rows.boxes is not None else outline.getbbox() if outline else None
        if box is None:
            raise UserError(
                f"{rows.images[i]}: has neither a box nor a mask, so that its distance from the centre is unknown"
            )
        left, top, right, bottom = box
        values.append(math.hypot((left + right) / 2 / size[0] - 0.5, (top + bottom) / 2 / size[1] - 0.5))
    write_columns(context.folder(row), [rows.images[i] for i in at], {"distance": np.array(values)})
