"""`make demo`: the main job, on pictures that come with the package. A table that does not flatter, then the proof."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from .audit.maps import as_seen, sheet
from .cli import compare, show, train
from .config import Compare, Demo, Erm, Probe
from .data.toy import make_toy
from .data.toyset import write_toy
from .errors import UserError
from .sight import Sight
from .verify import verify
from .weights import load_backbone
from .what.masked import MaskedViT
from .what.pool import LateMask

BACKBONE = "random:nano"
MARKER = "made-by-the-demo.txt"


def demo(command: Demo) -> int:
    make_room(command.out)
    print(
        "1. A data set with a shortcut: storks and ducks, where the place gives the class away nine times out of ten.\n"
    )
    data = write_toy(command.out / "toy", seed=command.seed)
    runs = [train_and_tell(command, data, method) for method in ("probe", "erm")]
    compare(Compare(tuple(runs)))
    return prove(command)


def make_room(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if folder.exists():
        if not (folder / MARKER).is_file():
            raise UserError(f"{folder}: is there already and was not made by the demo; choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("Made by `sightline demo`, which may remove this folder.\n")


def train_and_tell(command: Demo, data: Path, method: str) -> Path:
    out, cache = command.out / method, command.out / "cache"
    if method == "probe":
        print("2. A probe: logistic regression on the features of an untrained nano ViT.\n")
        train(Probe(data, BACKBONE, out, seed=command.seed, device="cpu", cache=cache, workers=1))
    else:
        print("3. ERM: the same ViT trained on whole pictures.\n")
        config = Erm(data, BACKBONE, out, seed=command.seed, device="cpu", cache=cache, workers=1)
        train(replace(config, epochs=12, batch=64, lr=1e-3, head_lr=1.0))
    print()
    return out


def prove(command: Demo) -> int:
    """Early hiding is blind, late hiding is not: here with random weights, because blindness is built in."""
    print("\n4. The proof: a ViT that is shown only the bird cannot see the place, trained or not.\n")
    toy = make_toy(16, size=128, seed=command.seed)
    images = toy.images.float() / 255
    vit = load_backbone(BACKBONE, classes=2, seed=command.seed)
    grid = vit.grid(images)
    patches = Sight.of_pixels(toy.masks, grid, at_least=0.5, exact=False)
    pixels = Sight.of_pixels(toy.masks, grid)
    torch.manual_seed(command.seed)
    cases = [
        (
            "patches",
            "Under the birds' patches: every other patch is gone before the first block",
            MaskedViT(vit),
            patches,
        ),
        ("pixels", "Exact to the pixel: inside the kept patches the background is blanked too", MaskedViT(vit), pixels),
        ("late", "The usual way: see everything, then average only the birds' patches", LateMask(vit, 2), patches),
    ]
    verdicts = []
    for name, caption, what, sight in cases:
        certificate = verify(what, images, sight, draws=2)
        certificate.save(command.out / f"{name}.json")
        print(caption)
        show(certificate, brief=True)
        verdicts.append(certificate.verdict)
    rows = {
        "the picture": images,
        "what whole patches show: every border smuggles background in": as_seen(images, patches),
        "what Sightline shows": as_seen(images, pixels),
    }
    sheet({caption: row[:7] for caption, row in rows.items()}).save(command.out / "sight.png")
    print(f"\nRuns, certificates and a picture (sight.png) are in {command.out}.")
    return int(verdicts != ["blind", "blind", "leaks"])
