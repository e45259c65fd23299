"""Small versions of CUB and of scene folders, drawn rather than photographed."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sightline.datasets.birds import Bird, Birds, Files, is_waterbird

SPECIES = {
    "001.Herring_Gull": (230, 230, 240),
    "002.Artic_Tern": (200, 200, 220),
    "003.Eastern_Towhee": (120, 40, 20),
    "004.Song_Sparrow": (150, 110, 70),
    "005.Yellow_Warbler": (230, 210, 30),
    "006.Rusty_Blackbird": (40, 30, 40),
    "007.Blue_Jay": (30, 60, 200),
}
SCENES = {"forest": (20, 120, 30), "sea": (20, 60, 160), "mountain": (120, 120, 130), "street": (90, 80, 80)}
SCENES |= {"glacier": (210, 230, 240), "buildings": (160, 100, 80)}
PER_SPECIES = 8  # images, half of them in the test split


def bird_photo(rng: np.random.Generator, colour: tuple[int, ...]) -> tuple[Image.Image, Image.Image, tuple[int, ...]]:
    """An ellipse of one colour on noise, so that every pixel of the bird can be recognised."""
    size = (int(rng.integers(60, 90)), int(rng.integers(48, 64)))
    photo = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    mask = Image.new("1", size)
    left, top = (int(v) for v in rng.integers(4, 20, 2))
    box = (left, top, left + int(rng.integers(22, 36)), top + int(rng.integers(14, 26)))
    ImageDraw.Draw(mask).ellipse(box, fill=1)
    photo.paste(colour, mask=mask)
    return photo, mask, box


def draw_cub(root: Path) -> Path:
    """CUB_200_2011 with its segmentations beside it."""
    rng, lines = np.random.default_rng(0), {"images": [], "train_test_split": [], "bounding_boxes": []}
    for species, colour in SPECIES.items():
        for folder in ("CUB_200_2011/images", "segmentations"):
            (root / folder / species).mkdir(parents=True)
        for i in range(PER_SPECIES):
            number = len(lines["images"]) + 1
            photo, mask, (left, top, right, bottom) = bird_photo(rng, colour)
            name = f"{species}/{species[4:]}_{i:04}_{number}"
            photo.save(root / f"CUB_200_2011/images/{name}.png")
            mask.convert("L").save(root / f"segmentations/{name}.png")
            lines["images"].append(f"{number} {name}.png")
            lines["train_test_split"].append(f"{number} {i % 2}")
            lines["bounding_boxes"].append(f"{number} {left}.0 {top}.0 {right - left}.0 {bottom - top}.0")
    for file, content in lines.items():
        (root / f"CUB_200_2011/{file}.txt").write_text("\n".join(content) + "\n")
    return root


def draw_scenes(root: Path) -> Path:
    rng = np.random.default_rng(1)
    for kind, colour in SCENES.items():
        (root / kind).mkdir()
        for i in range(20):
            pixels = np.clip(np.array(colour) + rng.integers(-20, 20, (30, 30, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / kind / f"{i}.png")
    return root


def birds_without_images(per_species: int, **labels: str) -> Birds:
    """Birds of the seven species without image files, which recipes do not need."""
    names = [f"{species}/{i}" for species in SPECIES for i in range(per_species)]
    all_birds = (
        Bird(n, name, "", "", (0, 0, 1, 1), n % 2 == 0, is_waterbird(name), **labels) for n, name in enumerate(names)
    )
    return Birds(Files(Path("birds")), tuple(all_birds))


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def array(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)
