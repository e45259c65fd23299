"""Does the default selector find the object in other kinds of images? It learns from some images of each kind and is
measured on others, without labels, masks or training. Beside it, the same with a single start of k-means.

    python benchmarks/selector_kinds.py PACKS --out benchmarks/results/selector_kinds.json

PACKS: the folder with cub224.zip, waterbirds.zip, scenes.zip, imagenet1k_samples.zip and weights/. The animals and
objects of ImageNet have no masks; where U2-Net-P is certain, its masks stand in for them.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image, ImageOps
from torch import Tensor
from tyro.conf import Positional

from record import record
from sightline.config import Ifam
from sightline.methods.base import copy_vit, make_selector
from sightline.methods.clustering import Teacher
from sightline.methods.ifam import selector_depth
from sightline.vit.weights import load_backbone
from sightline.where.foreground import STARTS, find_foreground, learn_foreground
from sightline.where.parts import PartDiscovery, foreground_probability
from sightline.where.pixels import PixelSettings, pixel_foreground_probability
from sightline.where.saliency import U2Net

SIDE, LEARN, TEST = 224, 256, 128  # pixels; images to learn from and to measure, where there are as many
CERTAIN = 0.88  # fraction of pixels at which U2-Net's salience is below 0.1 or above 0.9
ANIMALS = 398  # the first classes of ImageNet
Example = tuple[Image.Image, Image.Image]  # image and mask, SIDE × SIDE


@dataclass(frozen=True)
class Kinds:
    packs: Positional[Path]
    """Folder of the packs."""
    out: Path
    """Result file."""
    seeds: int = 3
    """Number of seeds, each with its own images to learn from; all kinds of images with one, then with the next."""


class Packs:
    """Images and masks, read from the archives."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.weights = folder / "weights/vit_ti16_augreg_in1k.safetensors"

    @cache  # noqa: B019 (one object, alive until the end)
    def archive(self, name: str) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.folder / f"{name}.zip")

    def table(self, archive: str, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.archive(archive).read(name).decode())))

    def image(self, archive: str, name: str) -> Image.Image:
        return Image.open(io.BytesIO(self.archive(archive).read(name)))

    def bird(self, row: dict[str, str]) -> Example:
        mask = row["path"].replace("images/", "masks/").replace(".webp", ".png")
        return self.image("cub224", row["path"]).convert("RGB"), self.image("cub224", mask).convert("L")

    def birds(self) -> list[Callable[[], Example]]:
        return [lambda row=row: square(*self.bird(row)) for row in self.table("cub224", "cub.csv")]

    def close_birds(self) -> list[Callable[[], Example]]:
        """Cut so tightly that most birds reach the border of the image."""

        def cut(row: dict[str, str]) -> Example:
            image, mask = self.bird(row)
            x, y, w, h = (float(row[name]) for name in "xywh")
            side = min(0.85 * max(w, h), *image.size)
            left = min(max(x + w / 2 - side / 2, 0), image.width - side)
            top = min(max(y + h / 2 - side / 2, 0), image.height - side)
            box = (left, top, left + side, top + side)
            return image.resize((SIDE, SIDE), box=box), mask.resize((SIDE, SIDE), box=box)

        return [lambda row=row: cut(row) for row in self.table("cub224", "cub.csv")]

    def waterbirds(self) -> list[Callable[[], Example]]:
        cub = {row["id"]: row for row in self.table("cub224", "cub.csv")}

        def read(row: dict[str, str]) -> Example:
            image = self.image("waterbirds", row["img_filename"]).convert("RGB")
            return square(image, self.bird(cub[row["img_id"]])[1].resize(image.size))

        return [lambda row=row: read(row) for row in self.table("waterbirds", "metadata.csv")]

    @cache  # noqa: B019
    def imagenet(self) -> list[tuple[int, Example]]:
        """Class and example, where U2-Net-P is certain and something between 8 % and 75 % of the image is salient."""
        network, examples = U2Net(self.folder / "weights/u2netp.onnx"), []
        for row in self.table("imagenet1k_samples", "samples.csv"):
            image = ImageOps.fit(self.image("imagenet1k_samples", row["path"]).convert("RGB"), (SIDE, SIDE))
            salience = network.maps(as_tensor([image]))["salience"][0].numpy()
            if (abs(salience - 0.5) > 0.4).mean() >= CERTAIN and 0.08 < (salience > 0.5).mean() < 0.75:
                examples.append((int(row["index"]), (image, Image.fromarray(np.uint8(255 * (salience > 0.5))))))
        return examples

    def natural(self, animals: bool) -> list[Callable[[], Example]]:
        return [lambda e=example: e for index, example in self.imagenet() if (index < ANIMALS) == animals]

    def composed(self, area: float, *, beyond: bool) -> list[Callable[[], Example]]:
        """Animals on scenes, at about this fraction of the image; perhaps reaching beyond its border."""
        scenes = self.table("scenes", "scenes.csv")
        examples = [example for index, example in self.imagenet() if index < ANIMALS]

        def make(number: int, example: Example) -> Example:
            generator = np.random.default_rng(number)
            scene = self.image("scenes", scenes[generator.integers(len(scenes))]["path"]).convert("RGB")
            return paste(
                *example, ImageOps.fit(scene, (SIDE, SIDE)), area * generator.uniform(0.6, 1.4), generator, beyond
            )

        return [lambda n=n, e=e: make(n, e) for n, e in enumerate(examples)]


def square(image: Image.Image, mask: Image.Image) -> Example:
    return ImageOps.fit(image, (SIDE, SIDE)), ImageOps.fit(mask, (SIDE, SIDE))


def paste(
    image: Image.Image, mask: Image.Image, scene: Image.Image, area: float, generator: np.random.Generator, beyond: bool
) -> Example:
    box = mask.getbbox()
    factor = (area * SIDE**2 / (np.asarray(mask) > 127).sum()) ** 0.5
    size = tuple(max(8, round(factor * length)) for length in (box[2] - box[0], box[3] - box[1]))
    corner = []
    for length in size:
        over = length // 6 if beyond else 0
        low, high = sorted((-over, SIDE - length + over))
        corner.append(int(generator.integers(low, high + 1)))
    animal, shape = image.resize(size, box=box), mask.resize(size, box=box).point(lambda level: 255 * (level > 127))
    canvas, whole = scene.copy(), Image.new("L", scene.size)
    canvas.paste(animal, corner, shape)
    whole.paste(shape, corner)
    return canvas, whole


def as_tensor(images: list[Image.Image]) -> Tensor:
    """[N, 3, h, w] in [0, 1]"""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 255


def measure(packs: Packs, name: str, examples: list[Callable[[], Example]], seed: int) -> dict:
    order = np.random.default_rng(seed).permutation(len(examples))
    count = min(LEARN, len(examples) // 2)
    learn, test = ([examples[i]() for i in part] for part in (order[:count], order[count : count + TEST]))
    images, masks = as_tensor([image for image, _ in test]), torch.stack([as_mask(mask) for _, mask in test])
    area = masks.float().mean().item()
    result = {
        "dataset": name, "seed": seed, "learned_from": len(learn), "n": len(test), "object_area": round(area, 4)
    }  # fmt: skip
    selectors = learned_selectors(packs.weights, as_tensor([image for image, _ in learn]), seed)
    for prefix, selector in zip(("one_start_", ""), selectors, strict=True):
        with torch.inference_mode():
            seen = torch.cat([look(selector, chunk) for chunk in images.split(32)])
        both, either = (seen & masks).sum(dim=(1, 2)), (seen | masks).sum(dim=(1, 2))
        coverage = seen.float().mean().item()
        result |= {
            f"{prefix}pixel_iou": round((both / either.clamp(min=1)).mean().item(), 4),
            f"{prefix}coverage": round(coverage, 4), f"{prefix}coverage_per_area": round(coverage / area, 3),
        }  # fmt: skip
    print(result, flush=True)
    return result


@torch.no_grad()
def learned_selectors(weights: Path, images: Tensor, seed: int) -> Iterator[PartDiscovery]:
    """From the same features: with one start of k-means, and as it is by default."""
    vit, config = load_backbone(weights, classes=0, seed=seed).eval(), Ifam(Path(), seed=seed)
    selector = make_selector(vit, config, 2, 3 * SIDE // 2, selector_depth(config, vit)).eval()
    teacher = Teacher(copy_vit(vit, vit.config).eval(), 2 * SIDE)
    fine = torch.cat([teacher.features(chunk) for chunk in images.split(32)])
    coarse = torch.cat([selector.vit(selector.resize(chunk)).feature_map for chunk in images.split(32)])
    for starts in (1, STARTS):
        found = find_foreground(fine, images, starts=starts, seed=seed)
        selector.start_from(learn_foreground(coarse, found.masks, config.parts, seed=seed))
        yield selector


def look(selector: torch.nn.Module, images: Tensor) -> Tensor:
    """bool [B, h, w]: the pixels that the default iFAM would show to stage 2."""
    settings = PixelSettings()
    probability = pixel_foreground_probability(
        foreground_probability(selector.discover(images).scores), images, settings
    )
    return probability >= settings.pixel_threshold


def as_mask(mask: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(mask) > 127)


def main() -> None:
    config = tyro.cli(Kinds)
    packs, runs = Packs(config.packs), []
    kinds = {
        "ImageNet animals": lambda: packs.natural(animals=True),
        "ImageNet objects": lambda: packs.natural(animals=False),
        "animals on scenes, 16 %": lambda: packs.composed(0.16, beyond=False),
        "animals on scenes, 41 %, beyond the border": lambda: packs.composed(0.41, beyond=True),
        "birds": packs.birds,
        "birds, cut tightly": packs.close_birds,
        "Waterbirds v1.0": packs.waterbirds,
    }
    note = (
        "The default selector of iFAM with ViT-Ti: clustering of the images it learns from, then the mask of other "
        "images; it is the same for every number of parts. Masks of ImageNet images, pasted or not, are U2-Net-P's."
    )
    for seed in range(config.seeds):
        for name, make in kinds.items():
            runs.append(measure(packs, name, make(), seed))
            record(config.out, "cpu", {"note": note, "runs": runs})


if __name__ == "__main__":
    main()
