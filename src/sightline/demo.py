"""`make demo`: the main job, on pictures and a backbone that come with the package. A table that does not flatter, then
the proof."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from .compare import run_command as compare
from .config import A2, Compare, Demo, EarlyMask, Erm, Ifam, Probe, Train
from .data.drawing import as_seen, sheet, with_parts
from .datasets.toy import write_toy
from .datasets.toy_images import make_toy
from .errors import UserError
from .load import load_as_trained
from .sight import Sight
from .train import run_command as train
from .verify.verify import show, verify
from .vit.weights import load_backbone
from .what.pool import LateMask

BACKBONE = "sightline-nano"
SIDE = 80  # of the pictures in pixels
# Settings were chosen on validation data of such pictures. Head 0 is the one that attends to birds most.
CROPS = {"crop": ("0.3",), "crops": (2,), "heads": ("0",)}
# The parts are not taught by the class: in so few pictures, the place would teach them to look at it. Nothing of the
# selector is tuned, and it looks once and coarsely, because that is quick.
PARTS = {
    "parts": 6, "epochs": 7, "batch": 64, "lr": 3e-4, "head_lr": 10.0, "prototype_lr": 10.0, "classify_parts": 0.0,
    "tune_selector": "nothing", "look_size": SIDE, "look_again": False, "zoom": False, "average": None,
    "balance": "none",
}  # fmt: skip
MARKER = "made-by-the-demo.txt"


def run_command(command: Demo) -> int:
    make_room(command.out)
    print(
        "1. A data set with a shortcut: storks and ducks, where the place gives the class away nine times out of ten.\n"
    )
    data = write_toy(command.out / "toy", val=300, size=SIDE, seed=command.seed, workers=2)
    runs = [train_and_tell(title, run) for title, run in lessons(command, data).items()]
    compare(Compare(tuple(runs)))
    return prove(command)


def lessons(command: Demo, data: Path) -> dict[str, Train]:
    cache, seed, brief = command.out / "cache", command.seed, {"epochs": 3, "batch": 64, "lr": 3e-4}

    def asked(kind: type[Train], name: str, **settings) -> Train:
        return kind(
            data, BACKBONE, command.out / name, size=SIDE, seed=seed, device="cpu", cache=cache, workers=1, **settings
        )

    return {
        "2. A probe: logistic regression on the features of the small self-supervised ViT that comes with Sightline.": (
            asked(Probe, "probe")
        ),
        "3. A²: the same probe, shown two small crops where that ViT attends, and nothing else.": (
            asked(A2, "a2", **CROPS)
        ),
        "4. ERM: the same ViT trained on whole pictures, the ordinary way.": asked(Erm, "erm", **brief),
        "5. iFAM: finds the parts of birds by itself, from no masks, and answers from their pixels alone.": (
            asked(Ifam, "ifam", **PARTS)
        ),
        "6. Shown the bird's patches (true masks). Every border patch smuggles a little of the place in.": (
            asked(EarlyMask, "patches", **brief)
        ),
        "7. Shown the bird's pixels (true masks): what iFAM could reach.": (
            asked(EarlyMask, "pixels", sight="pixels", at_least=0.1, **brief)
        ),
    }


def make_room(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if folder.exists():
        if not (folder / MARKER).is_file():
            raise UserError(f"{folder}: is there already and was not made by the demo; choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("Made by `sightline demo`, which may remove this folder.\n")


def train_and_tell(title: str, run: Train) -> Path:
    print(f"{title}\n")
    train(run)
    print()
    return run.folder


def prove(command: Demo) -> int:
    """Early hiding is blind, late hiding is not."""
    print("\n8. The proof, on the models that see only what they show, and on the usual way.\n")
    number = torch.arange(16)
    toy = make_toy(16, size=SIDE, seed=command.seed + 7, labels=number % 2, places=number // 2 % 2)
    images = toy.images.float() / 255
    verdicts, shown = [], {"the picture": images}
    captions = {
        "a2": "what A2 sees",
        "ifam": "what iFAM sees",
        "patches": "what whole patches show: every border smuggles background in",
        "pixels": "what true masks show",
    }
    for name, caption in captions.items():
        method = load_as_trained(command.out / name).method
        sight = method.look_at(images, toy.masks) if method.needs_masks else method.look(images)
        if sight.parts is not None:
            shown["the parts that iFAM found"] = with_parts(images, sight)
        shown[caption] = as_seen(images, sight)
        verdicts.append(tell(command, name, f"{caption[0].upper()}{caption[1:]} (run {name}):", method, images, sight))
    vit = load_backbone(BACKBONE, classes=2, seed=command.seed)
    patches = Sight.of_pixels(toy.masks, vit.grid(images), at_least=0.5, exact=False)
    torch.manual_seed(command.seed)
    usual = "The usual way, untrained: see everything, then average only the bird's patches."
    verdicts.append(tell(command, "late", usual, LateMask(vit, 2), images, patches))
    sheet({caption: row[:8] for caption, row in shown.items()}).save(command.out / "sight.png")
    print(f"\nRuns, certificates and a picture (sight.png) are in {command.out}.")
    return int(verdicts != [*["blind"] * len(captions), "leaks"])


def tell(command: Demo, name: str, caption: str, what, images: torch.Tensor, sight: Sight) -> str:
    certificate = verify(what, images, sight, draws=2)
    certificate.save(command.out / f"{name}.json")
    print(caption)
    show(certificate, brief=True)
    return certificate.verdict
