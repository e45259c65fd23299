"""`sightline demo`: six methods on the toy dataset with the embedded backbone, their comparison, and the proof."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from .compare import run_command as compare
from .config import A2, Compare, Demo, EarlyMask, Erm, Ifam, Probe, Train
from .console.files import save_image, write
from .data.drawing import grey_out_hidden, image_grid, tint_parts
from .datasets.toy import write_toy
from .datasets.toy_images import make_toy
from .errors import UserError
from .load import load_as_trained
from .sight import Sight
from .train import run_command as train
from .verify.verify import print_certificate, verify
from .vit.weights import load_backbone
from .what.pool import LateMaskedViT

BACKBONE = "sightline-nano"
SIDE = 80  # of the images in pixels
# Settings were selected on validation data of such images. Head 0 is the one that attends to birds most.
CROPS = {"crop_size": ("0.3",), "crop_count": (2,), "heads": ("0",)}
# The classification loss does not reach the parts: with so few images it would make them follow the background. The
# selector is not tuned, and it looks once and at low resolution, because that is fast.
PARTS = {
    "parts": 6, "epochs": 7, "batch": 64, "lr": 3e-4, "head_lr_factor": 10.0, "prototype_lr_factor": 10.0,
    "classify_parts": 0.0, "tune_selector": "none", "selector_size": SIDE, "refine": False, "zoom": False, "ema": None,
    "balance": "none", "selector": "learned", "guide_radius": 16,
}  # fmt: skip
MARKER = "made-by-the-demo.txt"


def run_command(command: Demo) -> int:
    remove_earlier_demo(command.out)
    print("1. A dataset with a shortcut: storks and ducks, whose background gives the class away in nine of ten.\n")
    data = write_toy(command.out / "toy", val=300, size=SIDE, seed=command.seed, workers=2)
    runs = [train_and_print(title, config) for title, config in trainings(command, data).items()]
    compare(Compare(tuple(runs)))
    return prove(command)


def trainings(command: Demo, data: Path) -> dict[str, Train]:
    cache, seed, brief = command.out / "cache", command.seed, {"epochs": 3, "batch": 64, "lr": 3e-4}

    def configured(kind: type[Train], name: str, **settings) -> Train:
        return kind(
            data, BACKBONE, command.out / name, size=SIDE, seed=seed, device="cpu", cache=cache, workers=1, **settings
        )

    return {
        "2. Probe: logistic regression on frozen features of the small self-supervised ViT in Sightline.": (
            configured(Probe, "probe")
        ),
        "3. A²: the same probe on two small crops where that ViT attends, and on nothing else.": (
            configured(A2, "a2", **CROPS)
        ),
        "4. ERM: the same ViT, fine-tuned on whole images.": configured(Erm, "erm", **brief),
        "5. iFAM: discovers the parts of the birds without masks, and classifies from their pixels alone.": (
            configured(Ifam, "ifam", **PARTS)
        ),
        "6. Early masking by patches (true masks): every border patch still shows some background.": (
            configured(EarlyMask, "patches", **brief)
        ),
        "7. Early masking by pixels (true masks): the upper bound for iFAM.": (
            configured(EarlyMask, "pixels", sight="pixels", patch_threshold=0.1, **brief)
        ),
    }


def remove_earlier_demo(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if folder.exists():
        if not (folder / MARKER).is_file():
            raise UserError(f"{folder}: exists and was not made by the demo; choose another --out")
        shutil.rmtree(folder)
    write(folder / MARKER, "Made by `sightline demo`, which may remove this folder.\n")


def train_and_print(title: str, config: Train) -> Path:
    print(f"{title}\n")
    train(config)
    print()
    return config.folder


def prove(command: Demo) -> int:
    """Early masking is blind, late masking is not."""
    print("\n8. The proof, for the four methods that hide the rest, and for late masking.\n")
    number = torch.arange(16)
    toy = make_toy(16, size=SIDE, seed=command.seed + 7, labels=number % 2, backgrounds=number // 2 % 2)
    images = toy.images.float() / 255
    verdicts, shown = [], {"image": images}
    captions = {
        "a2": "sight of A2",
        "ifam": "sight of iFAM",
        "patches": "sight of early masking by patches: background at every border",
        "pixels": "sight of early masking by pixels",
    }
    for name, caption in captions.items():
        method = load_as_trained(command.out / name).method
        sight = method.look_at(images, toy.masks) if method.needs_masks else method.look(images)
        if sight.parts is not None:
            shown["parts discovered by iFAM"] = tint_parts(images, sight)
        shown[caption] = grey_out_hidden(images, sight)
        title = f"{caption[0].upper()}{caption[1:]} (run {name}):"
        verdicts.append(verify_and_print(command, name, title, method, images, sight))
    vit = load_backbone(BACKBONE, classes=2, seed=command.seed)
    patches = Sight.of_pixels(toy.masks, vit.grid(images), at_least=0.5, exact=False)
    torch.manual_seed(command.seed)
    title = "Late masking, untrained: see the whole image, then pool only the bird's patches."
    verdicts.append(verify_and_print(command, "late", title, LateMaskedViT(vit, 2), images, patches))
    save_image(command.out / "sight.png", image_grid({caption: row[:8] for caption, row in shown.items()}))
    print(f"\nRuns, certificates and a figure (sight.png): {command.out}")
    return int(verdicts != [*["blind"] * len(captions), "leaks"])


def verify_and_print(command: Demo, name: str, title: str, judge, images: torch.Tensor, sight: Sight) -> str:
    certificate = verify(judge, images, sight, draws=2)
    certificate.save(command.out / f"{name}.json")
    print(title)
    print_certificate(certificate, brief=True)
    return certificate.verdict
