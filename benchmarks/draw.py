"""Figures of what RobustViT changes; they show photographs, so never put them into a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from collect import start_of
from evidence import Evidence, Missing
from sightline.errors import UserError

EXAMPLES = 6  # images that were helped, and as many that were harmed


def draw_all(runs: Path, device: str = "auto") -> None:
    """Per set, what changed from the start to RobustViT: classes, and maps of images whose prediction changed."""
    from sightline.explain.class_changes import both, class_changes, draw_changes, in_words

    for kind in sorted(path.name for path in runs.glob("*") if path.is_dir()):
        try:
            evidence = Evidence(runs)
            before, after = (evidence.folders(kind, row)[0] for row in (start_of("RobustViT", kind), "RobustViT"))
        except (Missing, KeyError):
            continue
        pair = both(*(folder / "predictions" / "test.csv" for folder in (before, after)))
        changes = class_changes(*pair)
        print(f"{kind}: {in_words(changes)}")
        try:
            draw_changes({kind: changes}, runs / kind / "classes.png", f"from {before.name} to {after.name}")
        except UserError as error:
            print(f"no figure of classes: {error}")
        if all((folder / "best.safetensors").exists() for folder in (before, after)):
            draw_maps(before, after, runs / kind / "changed.png", device)


def draw_maps(before: Path, after: Path, path: Path, device: str) -> None:
    """Relevance before and after, of images whose prediction became correct, or became wrong."""
    from sightline.config import Evaluate
    from sightline.data.drawing import lit, sheet
    from sightline.data.images import Canvas, decode
    from sightline.datasets.imagenet import imagenet_classes
    from sightline.explain.class_changes import both
    from sightline.load import data_asked_for, opened
    from sightline.where.relevance import MAPS

    called = imagenet_classes()

    one, other = both(*(folder / "predictions" / "test.csv" for folder in (before, after)))
    accelerator, first = opened(before, device)
    _, second = opened(after, device)
    rows = data_asked_for(Evaluate(before), first.run).rows
    place = {image: i for i, image in enumerate(rows.images)}
    strips: dict[str, Any] = {}
    for name, changed in (("helped", ~one.correct & other.correct), ("harmed", one.correct & ~other.correct)):
        chosen = np.flatnonzero(changed)
        if not len(chosen):
            continue
        chosen = chosen[np.linspace(0, len(chosen) - 1, EXAMPLES).astype(int)]
        images = torch.stack([decode(rows, place[one.images[i]], Canvas.of(first.expects)).image for i in chosen])
        images = images.to(accelerator.device).float() / 255
        names = [
            ", ".join(called.get(some[i], some[i]) for i in chosen)
            for some in (one.labels, one.predicted, other.predicted)
        ]
        strips[f"{name}: {names[0]}"] = images.cpu()
        for model, said, word in ((first, names[1], "before"), (second, names[2], "after")):
            strips[f"{name}, {word}: {said}"] = lit(images, MAPS["gae"](model.method, images)).cpu()
    if strips:
        sheet(strips).save(path)
