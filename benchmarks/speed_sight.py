"""What the sight of iFAM costs: exact to the pixel against patches, and changed by interventions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from record import Runs, limits_met, ratios
from sightline.config import Ifam
from sightline.data.images import Preprocess, decode
from sightline.data.rows import fingerprint, read_rows
from sightline.datasets.toy_images import ToyImages, make_toy
from sightline.errors import UserError
from sightline.interventions.apply import QUANTILES, apply_intervention
from sightline.interventions.file import Intervention
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.erm import Classifier
from sightline.methods.ifam import IFam, make_predictor, pixel_settings
from sightline.metrics.cost import measure_cost
from sightline.sight import Method, Prediction, Sight, cell_share
from sightline.training.trainable import StepInfo, TrainBatch
from sightline.vit.weights import load_backbone
from sightline.where.pixels import PixelSettings, pixel_foreground_probability
from speed import Result, Speed

VARIANTS: dict[str, dict[str, Any]] = {
    "patches": {"sight": "patches"},
    "pixels": {"zoom": False, "refine": False},
    "pixels, zoom": {"refine": False},
    "pixels, zoom, look again": {},
    "pixels, zoom, look at twice the size": {"refine": False, "selector_size": 2},  # times the size of the image
    "the default": {"selector_size": 2},
}
WAYS = {
    "patches": VARIANTS["patches"],
    "pixels, looked at once": {"refine": False},
    "pixels, looked at again": {},
    "the default": VARIANTS["the default"],
}


def backbone_of(config: Speed) -> str:
    return (config.backbones or ("random:augreg-ti16",))[0]


def build(kind: type[IFam], backbone: str, side: int, options: dict[str, Any]) -> IFam:
    vit = load_backbone(backbone)
    larger = {"selector_size": options["selector_size"] * side} if "selector_size" in options else {}
    config = Ifam(Path("toy"), **options | larger)
    halves = make_selector(vit, config, 2), make_predictor(vit, config, 2)
    return kind(*halves, PartSettings.of(config), pixel_settings(config))


def ifam(config: Speed, toy: ToyImages, images: Tensor, options: dict[str, Any]) -> IFam:
    """Its prototypes are the mean patches of objects and of backgrounds."""
    model = build(IFam, backbone_of(config), images.shape[-1], options).to(config.device)
    with torch.no_grad():
        features = model.where.discover(images).features
        inside = cell_share(toy.masks.to(images.device), features.shape[2:]) > 0.5
        tokens = features.movedim(1, -1)
        found = [tokens[inside].mean(dim=0)] * model.where.parts + [tokens[~inside].mean(dim=0)]
        model.where.prototypes.copy_(torch.stack(found))
    return model


def toys(config: Speed, count: int) -> tuple[ToyImages, Tensor]:
    toy = make_toy(count, size=load_backbone(backbone_of(config)).config.input.size[0])
    return toy, (toy.images.float() / 255).to(config.device)


def true_sight(model: IFam, images: Tensor, masks: Tensor) -> Sight:
    grid, pixels = model.what.vit.grid(images), model.pixels
    return Sight.of_pixels(masks, grid, at_least=0.5 if pixels is None else pixels.patch_threshold, exact=bool(pixels))


@torch.no_grad()
def patches_visible(model: IFam, images: Tensor, masks: Tensor | None) -> float:
    """The share that the second stage may see, of true masks or else by itself: much of the cost."""
    sight = model.look(images) if masks is None else true_sight(model, images, masks)
    on_grid = sight.on_grid(model.what.vit.grid(images), (images.shape[2], images.shape[3]))
    return round(model.what.masked_input(images, *on_grid).keep.float().mean().item(), 3)


# ---- pixels against patches ------------------------------------------------------------------------------------------


def pixels(config: Speed) -> Result:
    """Sights are true masks of toy images, so that the cost does not depend on what an untrained model sees. A training
    step is forward and backward; there patches cost more than they need to: their mask passes a gradient, so that no
    patch can be removed."""
    rows = [row for batch in config.batches or (1, 16) for row in pixels_of(config, batch)]
    met = limits_met(rows, "patches", {"pixels": 1.15})
    facts = {"backbone": backbone_of(config), "precision": config.precision, "verdicts": met}
    return Result(facts | {"rows": rows})


def pixels_of(config: Speed, batch: int) -> list[dict[str, Any]]:
    toy, images = toys(config, batch)
    models, rows = {name: ifam(config, toy, images, options) for name, options in VARIANTS.items()}, []
    with torch.autocast(images.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        for what, variants in (("look and judge", predicting), ("training step", stepping)):
            for model in models.values():
                model.train(what == "training step")
            with torch.set_grad_enabled(what == "training step"):
                runs = variants(models, images, toy)
                found = ratios(runs, "patches", rounds=config.rounds or 15, device=config.device)
            masks = toy.masks.to(images.device) if what == "look and judge" else None
            seen = {name: {"patches_visible": patches_visible(model, images, masks)} for name, model in models.items()}
            rows += [{"what": what, "batch": batch} | row | seen.get(row["variant"], {}) for row in found]
    return rows


def predicting(models: dict[str, IFam], images: Tensor, toy: ToyImages) -> Runs:
    """Looking and judging, and of that the filter that follows the edges of the image."""
    masks, runs = toy.masks.to(images.device), {}
    for name, model in models.items():
        sight = true_sight(model, images, masks)
        runs[name] = lambda model=model, sight=sight: (model.look(images), model.judge(images, sight))
    coarse = cell_share(masks, models["patches"].where.grid(images))
    runs["of which following edges, once"] = lambda: pixel_foreground_probability(coarse, images, PixelSettings())
    return runs


def stepping(models: dict[str, IFam], images: Tensor, toy: ToyImages) -> Runs:
    positions = torch.arange(len(images))
    when = StepInfo(seed=0, epoch=0, step=0, epochs=1, steps=1, positions=positions)
    batch = TrainBatch(images, toy.labels.to(images.device), None, None, positions.to(images.device), when)

    def step(model: IFam) -> None:
        model.zero_grad()
        model(batch)["loss"].backward()

    return {name: lambda model=model: step(model) for name, model in models.items()}


class WithGivenSight(Method):
    """Looks as usual, and then judges what true masks show."""

    blind = True

    def __init__(self, model: IFam, masks: Tensor):
        super().__init__()
        self.model, self.masks = model, masks

    def look(self, images: Tensor) -> Sight:
        self.model.look(images)
        return true_sight(self.model, images, self.masks)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.model.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.model.maps(images)


def operations(config: Speed) -> Result:
    """GFLOPs of looking and judging, on images evenly spread over a split, with their true masks as sights."""
    if config.data is None:
        raise UserError("--data: name a dataset with masks")
    vit, rows = load_backbone(backbone_of(config), classes=2), read_rows(config.data)
    there = rows.split_indices(config.split)
    few = there[np.linspace(0, len(there) - 1, config.count or 64).round().astype(int)]
    samples = [decode(rows, int(i), Preprocess.of(vit.config.input)) for i in few]
    images = torch.stack([sample.image for sample in samples]).float() / 255
    masks = torch.stack([sample.mask for sample in samples if sample.mask is not None])
    dense, toy = Classifier(vit).eval(), make_toy(1, size=images.shape[-1])
    found = [gflops_row("the dense ViT", [measure_cost(dense, image[None]).gflops for image in images])]
    for name, options in VARIANTS.items():
        model = ifam(config, toy, toy.images.float() / 255, options).eval()
        pairs = [(image[None], WithGivenSight(model, mask[None])) for image, mask in zip(images, masks, strict=True)]
        found.append(gflops_row(name, [measure_cost(method, image).gflops for image, method in pairs]))
    facts = {"backbone": backbone_of(config), "data": config.data.name, "fingerprint": fingerprint(rows)}
    seen = round(masks.float().mean().item(), 3)
    return Result(facts | {"split": config.split, "pixels_seen": seen, "rows": found})


def gflops_row(name: str, gflops: list[float]) -> dict[str, Any]:
    """With the 95 % interval of the mean over images."""
    mean, half = np.mean(gflops), 1.96 * np.std(gflops, ddof=1) / len(gflops) ** 0.5
    ends = {
        key: round(float(value), 2) for key, value in (("gflops", mean), ("low", mean - half), ("high", mean + half))
    }
    return {"variant": name} | ends | {"n": len(gflops)}


# ---- many interventions ----------------------------------------------------------------------------------------------

ONCE, EVERY_TIME = "looked at once for all", "full passes"


@torch.no_grad()
def interventions(config: Speed) -> Result:
    """No change, every part left out, and every quantile that `sightline intervene --find` tries: with the first stage
    once for all of them, or every time."""
    ways = config.ways or ("patches", "the default")
    rows = [row for way in ways for row in interventions_of(config, way)]
    return Result({"backbone": backbone_of(config), "parts": config.parts, "rows": rows})


def interventions_of(config: Speed, way: str) -> list[dict[str, Any]]:
    model, images = model_of_way(config, way)
    tried = tried_interventions(model, images)
    runs = {ONCE: lambda: look_once(model, images, tried), EVERY_TIME: lambda: look_every_time(model, images, tried)}
    facts = {"way": way, "batch": len(images), "interventions": len(tried)}
    facts["patches_visible"] = patches_visible(model, images, None)
    return [facts | row for row in ratios(runs, ONCE, rounds=config.rounds or 5, device=config.device)]


def model_of_way(config: Speed, way: str) -> tuple[IFam, Tensor]:
    toy, images = toys(config, (config.batches or (1,))[0])
    return ifam(config, toy, images, WAYS[way] | {"parts": config.parts}).eval(), images


def tried_interventions(model: IFam, images: Tensor) -> list[Intervention]:
    distances, parts = model.detect(images).mask_assignment.distances, model.where.parts
    limits = {q: (float(distances.quantile(q)),) * parts for q in QUANTILES}
    dropped = [Intervention(drop=(part,)) for part in range(parts)]
    return [Intervention(), *dropped, *(Intervention(quantile=q, thresholds=far) for q, far in limits.items())]


def look_once(model: IFam, images: Tensor, tried: list[Intervention]) -> list[Prediction]:
    found = model.detect(images)
    return [model.predict_from(images, found, one.correction) for one in tried]


def look_every_time(model: IFam, images: Tensor, tried: list[Intervention]) -> list[Prediction]:
    return [one.judge(images, one.look(images)) for one in (apply_intervention(model, change) for change in tried)]


# ---- a toggle in the app ---------------------------------------------------------------------------------------------

PARTS, SIDE, COVERAGE = 8, 224, 0.25
CLASSES = ("stork", "duck")
FULL, TOGGLE = "a full pass", "a toggle"


class Striped(IFam):
    """Looks as usual, and then finds a square in the middle, cut into eight stripes that are the parts: a quarter of
    the image, or as much of a window as that becomes."""

    looks = 0

    def discover(self, images: Tensor) -> tuple[Any, Tensor]:
        parts, scores = super().discover(images)
        closer = self.pixels is not None and self.pixels.refine and self.looks % 2
        self.looks += 1
        H, W = scores.shape[2:]
        side = 1 / (1 + 2 * self.WINDOW.margin) if closer else COVERAGE**0.5
        y, x = torch.meshgrid(*((torch.arange(n) / n - (1 - side) / 2) / side for n in (H, W)), indexing="ij")
        inside = (y >= 0) & (y < 1) & (x >= 0) & (x < 1)
        stripe = torch.where(inside, (x * PARTS).long(), PARTS)
        fixed = 20 * torch.nn.functional.one_hot(stripe, PARTS + 1).movedim(-1, 0)[None].to(scores)
        return parts, fixed.expand_as(scores)


def toggle(config: Speed) -> Result:
    """What a click in the app runs when a part is dropped, against both stages with the same intervention. Processor
    time is compared, too, because it holds on a busy machine."""
    ways = {way: options for way, options in WAYS.items() if way in (config.ways or WAYS)}
    rows = [{"what": way} | row for way, options in ways.items() for row in toggle_of(config, options)]
    met = limits_met(rows, FULL, {TOGGLE: 0.5})
    return Result({"backbone": backbone_of(config), "verdicts": met, "rows": rows})


@torch.no_grad()
def toggle_of(config: Speed, options: dict[str, Any]) -> list[dict[str, Any]]:
    from sightline.app.panels import panel
    from sightline.app.session import InputImage, ShownPrediction, Viewer
    from sightline.config import App
    from sightline.load import Model
    from sightline.training.distributed import make_accelerator
    from sightline.training.run_folder import Run

    image = InputImage(make_toy(1, size=SIDE).images[0], "toy")
    images = image.pixels[None].float() / 255
    changes = cycle([Intervention(drop=(part,)) for part in range(PARTS)])
    method = build(Striped, backbone_of(config), SIDE, {"parts": PARTS} | options).eval()
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), {"method": "ifam"})
        model = Model(method, CLASSES, method.what.vit.config.input, run)
        viewer = Viewer(App(Path(folder)), make_accelerator("cpu"), model, None, "")
        plain = viewer.predict(image)
        seen = method.what.masked_input(images, *plain.sight.on_grid(method.what.vit.grid(images), (SIDE, SIDE)))

        def full() -> None:
            changed = apply_intervention(viewer.method, next(changes))
            changed.judge(images, changed.look(images))

        def click() -> ShownPrediction:
            return viewer.predict(image, next(changes))

        drawn = "a toggle, and its panel drawn"
        runs = {FULL: full, TOGGLE: click, drawn: lambda: panel(click(), CLASSES, "", blind=True)}
        rows = ratios(runs, FULL, rounds=config.rounds or 15, device="cpu")
        work = {name: processor_seconds(run) for name, run in runs.items()}
    facts = {"coverage": round(plain.coverage, 3), "tokens_seen": round(seen.keep.float().mean().item(), 3)}
    return [facts | row | {"processor_ratio": round(work[row["variant"]] / work[FULL], 3)} for row in rows]


def processor_seconds(run: Callable[[], object], times: int = 9) -> float:
    """The median over calls, of all threads."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken)
