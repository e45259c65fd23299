"""`make demo`: the proof, on pictures and a model that come with the package."""

from __future__ import annotations

import torch

from .audit.maps import as_seen, sheet
from .cli import show
from .config import Demo
from .data.toy import make_toy
from .sight import Sight
from .verify import verify
from .vit import ViT, ViTConfig
from .what.masked import MaskedViT
from .what.pool import LateMask

NANO = ViTConfig(width=96, depth=6, heads=3, patch=8, grid=(16, 16), registers=2, classes=2)


def demo(command: Demo) -> int:
    toy = make_toy(16, size=128, seed=command.seed)
    images = toy.images.float() / 255
    torch.manual_seed(command.seed)
    vit = ViT(NANO).eval()
    patches = Sight.of_pixels(toy.masks, NANO.grid, at_least=0.5, exact=False)
    pixels = Sight.of_pixels(toy.masks, NANO.grid)
    cases = [
        (
            "patches",
            "A ViT under the birds' patches: every other patch is gone before the first block",
            MaskedViT(vit),
            patches,
        ),
        (
            "pixels",
            "The same, exact to the pixel: inside the kept patches the background is blanked too",
            MaskedViT(vit),
            pixels,
        ),
        ("late", "The usual way: see everything, then average only the birds' patches", LateMask(vit, 2), patches),
    ]
    command.out.mkdir(parents=True, exist_ok=True)
    print(f"16 toy pictures, a nano ViT with random weights (seed {command.seed}): blindness is built in, not learned.")
    verdicts = []
    for name, caption, what, sight in cases:
        certificate = verify(what, images, sight)
        certificate.save(command.out / f"{name}.json")
        print(f"\n{caption}")
        show(certificate)
        verdicts.append(certificate.verdict)
    rows = {
        "the picture": images,
        "what whole patches show: every border smuggles background in": as_seen(images, patches),
        "what Sightline shows": as_seen(images, pixels),
    }
    sheet({caption: row[:7] for caption, row in rows.items()}).save(command.out / "sight.png")
    print(f"\nCertificates and a picture (sight.png) are in {command.out}.")
    return int(verdicts != ["blind", "blind", "leaks"])
