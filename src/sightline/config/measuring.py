"""Settings of the commands that evaluate trained models: accuracy, localisation, predictions, proof."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..errors import UserError
from .flags import SOFTWARE, CacheFolder, OtherData, RunFolder, Writes
from .limits import Checked, Count, Index, InnerFraction, Processes, Seed, Side
from .output import Output

PREDICTED = ("image", "label", "predicted")
METRICS = {"metrics.json": ("splits",), "predictions/*.csv": PREDICTED}
BACKBONES = {"backbones.json": ("backbones",), "backbones.csv": ("backbone",)}
BACKBONES |= {f"{name}.png": (SOFTWARE,) for name in ("size", "shares", "layers", "attention")}
LOCALIZATION = {"localization.json": ("splits",), "localization/*.csv": ("image",)} | BACKBONES
SHAPE = {"shape/*.json": ("cells", "metrics"), "shape/*.csv": PREDICTED}

FOR_RUNS = ("intervention", "published_keypoints", "per_map")
FOR_BACKBONES = ("more_backbones", "layer", "heads", "ground_truth", "size", "limit", "figures")


@dataclass(frozen=True)
class Evaluate(Output):
    """Evaluate a trained model, overall and per group, with confidence intervals."""

    run: RunFolder
    """Run folder."""
    data: OtherData = None
    """Data to evaluate on. Default: those it was trained on."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT (imagenet9:mixed_rand, metashift-animals:3)."""
    split: Literal["train", "val", "test"] = "test"
    """Split to evaluate on."""
    intervention: bool = True
    """Apply the intervention saved with the run, if any; its results go to a folder of their own."""
    batch: Count = 64
    """Images per batch; on a CPU at most 16 of them are computed at a time."""
    workers: Processes = 2
    """Data-loading processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images, such as the one used in training."""
    out: Annotated[Path | None, Writes(METRICS)] = None
    """Folder for metrics.json and the predictions per image. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Localize(Evaluate):
    """Compare where a model looks with ground-truth masks.

    `localize RUN` measures a trained model, `localize BACKBONE … DATA` the attention of backbones, side by side."""

    run: Annotated[Positional[Path], arg(metavar="RUN|BACKBONE")]
    """Run folder; or the name or weights file of a backbone, followed by further backbones and the data."""
    data: Annotated[Positional[Path | None], arg(metavar="[DATA|BACKBONE]")] = None
    """For a run: data to evaluate on. Default: those it was trained on."""
    more_backbones: Annotated[Positional[tuple[Path, ...]], arg(metavar="[[BACKBONE …] DATA]")] = ()
    """Further backbones, then the data."""
    out: Annotated[Path | None, Writes(LOCALIZATION)] = None
    """Folder for localization.json (default: the run, if these are its own data); for backbones, for backbones.json,
    backbones.csv and figures (default: none)."""
    layer: tuple[Index, ...] | Literal["all"] = (-1,)
    """For backbones: blocks, counted from 0, or from the end."""
    heads: tuple[str, ...] = ("mean",)
    """For backbones: aggregation of the attention heads: mean, entropy, lowest, max, or the number of a head (from
    0)."""
    ground_truth: Literal["masks", "boxes"] | None = None
    """For backbones: what attention is compared with. Default: masks if there are any, else the union of boxes."""
    size: Side | None = None
    """For backbones: image side in pixels. Default: each backbone's own."""
    limit: Count | None = None
    """For backbones: maximum number of images, spread over the split."""
    figures: bool = True
    """For backbones, with --out: draw curves and attention maps."""
    published_keypoints: bool = False
    """Key points in the coordinates of the published iFAM code, which are off by half a cell."""
    per_map: bool = False
    """Also write per-image results for every map, not only for the sight."""

    @property
    def of_backbones(self) -> bool:
        """Whether backbones are measured, not a run; flags of the other case are rejected."""
        backbones = not (self.run / "run.json").is_file()
        if backbones and self.data is None:
            raise UserError(
                f"{self.run}: not a run folder; for a backbone, name the data too: `sightline localize {self.run} DATA`"
            )
        others, reason = (FOR_RUNS, "for runs only") if backbones else (FOR_BACKBONES, "for backbones only")
        given = [f for f in fields(self) if f.name in others and getattr(self, f.name) != f.default]
        if given and given[0].name == "more_backbones":
            raise UserError(f"{self.run}: a run is measured alone, on one dataset; remove {self.more_backbones[0]}")
        if given:
            raise UserError(f"--{given[0].name.replace('_', '-')}: {reason} ({self.run}); remove it")
        return backbones

    def backbones_and_data(self) -> tuple[list[str], Path]:
        assert self.data is not None, "for backbones only"
        *backbones, data = (self.run, self.data, *self.more_backbones)
        for i, backbone in enumerate(backbones):
            if backbone in backbones[:i]:
                raise UserError(f"{backbone}: named twice; remove one of them")
            if (backbone / "run.json").is_file():
                raise UserError(f"{backbone}: a run, not a backbone; name its weights file, or measure it alone")
        return [str(backbone) for backbone in backbones], data


@dataclass(frozen=True)
class Shape(Evaluate):
    """Measure the label information in the mask shape, which a blind predictor can still use."""

    split: Literal["val", "test"] = "test"
    """Split to evaluate on; the probe is fitted on train and tuned on val."""
    out: Annotated[Path | None, Writes(SHAPE)] = None
    """Folder for shape/SPLIT.json and .csv. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Compare(Output):
    """Compare runs on the same images, pairwise; runs that differ only in their seed count as one method."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN …")]
    """Run folders; or, for other data, the folders that `evaluate` made inside the runs."""
    split: Literal["val", "test"] = "test"
    """Split to compare on."""
    suite: Literal["imagenet-shift"] | None = None
    """Compare two runs on the test sets that `evaluate --suite` measured."""
    class_changes: Annotated[Path | None, Writes({"": (SOFTWARE,)})] = None
    """For two runs: figure of the change in accuracy of every class, from the first to the second."""
    out: Annotated[Path | None, Writes({"": ("reference",)})] = None
    """JSON file for the table."""
    details: bool = False
    """Also print how the differences and their intervals were computed."""


@dataclass(frozen=True)
class Verify(Output):
    """Prove that a model is blind outside its sight, or find where it leaks.

    MODEL is a run folder, the name of a backbone (see `sightline backbones`), a weights file, or `file.py:function` for
    any nn.Module of your own: the function takes no argument and returns the module.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Run folder, name of a backbone, weights file, or file.py:function."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="[IMAGES …]")] = ()
    """Images, folders of images, or a CSV file with a column image. Default: toy images with known masks."""
    where: Literal["attention", "masks", "random"] | None = None
    """Sight of a backbone or module: its own attention, masks, or random patches. Default: masks if there are any."""
    masks: Path | None = None
    """Folder with a mask for each image, under the same name (bright = visible)."""
    sight: Literal["patches", "pixels"] = "patches"
    """With masks: hide whole patches, or also pixels outside the mask inside kept patches."""
    masking: Literal["early", "late"] = "early"
    """For backbones: hide before the first block, or only at pooling (which leaks)."""
    visible_fraction: InnerFraction = 0.25
    """Fraction of patches kept with --where attention or random."""
    size: Side | None = None
    """Image side in pixels. Default: the model's own, or 224."""
    patch: Count = 16
    """For your own module: patch side in pixels."""
    mask_argument: str | None = None
    """For your own module: keyword argument of its forward that takes the mask, bool [B, H, W] over patches."""
    arch: str | None = None
    """For a weights file that does not tell: a known backbone with its architecture."""
    intervention: bool = True
    """For a run: apply the intervention saved with it, if any."""
    limit: Count = 16
    """Maximum number of images."""
    draws: Count = 5
    """Random perturbations of each kind per image."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Floating-point precision."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device; `auto` takes the GPU if there is one."""
    seed: Seed = 0
    """Random seed of the perturbations."""
    out: Annotated[Path | None, Writes({"": ("sentence",)})] = None
    """JSON file for the certificate."""


@dataclass(frozen=True)
class Demo(Checked):
    """Train, evaluate and verify six methods on toy images, in a few minutes."""

    out: Annotated[Path, Writes()] = Path("runs/demo")
    """Output folder; an earlier demo in it is removed."""
    seed: Seed = 0
    """Random seed of data and training."""
