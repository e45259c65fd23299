"""What trained models are asked: how good, where they look, what they see, and that they see nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..errors import UserError

FOR_RUNS = ("intervention", "published", "maps")
FOR_BACKBONES = ("more", "layer", "heads", "truth", "size", "limit", "pictures")


@dataclass(frozen=True)
class Evaluate:
    """Measure a trained model: every group, with intervals."""

    run: Positional[Path]
    data: Positional[Path | None] = None
    """Other data than those it was trained on."""
    layout: str | None = None
    """Of published data, perhaps with an option: imagenet9:mixed_rand, metashift-animals:3."""
    split: Literal["train", "val", "test"] = "test"
    intervention: bool = True
    """Apply the intervention that is kept with the run, if any; its figures have a folder of their own."""
    batch: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache: Path | None = None
    """Take decoded pictures from this folder, such as the one of training, and keep them there."""
    out: Path | None = None
    """Folder for metrics.json and the answers per picture. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Localize(Evaluate):
    """Measure where a model looks, against true masks: `localize RUN` a trained one, `localize BACKBONE … DATA` the
    attention of backbones, side by side."""

    run: Annotated[Positional[Path], arg(metavar="RUN|BACKBONE")]
    """The folder of a run; or a backbone's name or weights file, more of them, and data."""
    data: Annotated[Positional[Path | None], arg(metavar="[DATA|BACKBONE]")] = None
    """For a run: other data than those it was trained on."""
    more: Annotated[Positional[tuple[Path, ...]], arg(metavar="[[BACKBONE …] DATA]")] = ()
    """Further backbones, the data last."""
    out: Path | None = None
    """Folder for localization.json (default: the run, if these are its own data); or of backbones, for backbones.json,
    backbones.csv and pictures (default: none)."""
    layer: tuple[int, ...] | Literal["all"] = (-1,)
    """Of backbones: blocks, counted from 0, or from the end."""
    heads: tuple[str, ...] = ("mean",)
    """Of backbones: how heads are joined: mean, entropy, lowest, max, or the number of a single head (from 0)."""
    truth: Literal["masks", "boxes"] | None = None
    """Of backbones: what is held to be right. Default: masks where there are any, else the union of boxes."""
    size: int | None = None
    """Of backbones: the side of the pictures in pixels. Default: what each expects."""
    limit: int | None = None
    """Of backbones: at most this many pictures, from all over the split."""
    pictures: bool = True
    """Of backbones, with --out: draw curves and attention."""
    published: bool = False
    """Key points in the geometry of the published iFAM code, which is half a cell off."""
    maps: bool = False
    """Picture by picture, too, each map's figures, not only those of the sight."""

    @property
    def of_backbones(self) -> bool:
        """Or of a run; flags that are for the other are refused."""
        backbones = not (self.run / "run.json").is_file()
        if backbones and self.data is None:
            raise UserError(
                f"{self.run}: is no folder of a run; a backbone needs data, too: `sightline localize {self.run} DATA`"
            )
        others, why = (FOR_RUNS, "is for runs") if backbones else (FOR_BACKBONES, "is for backbones, and this is a run")
        given = [f for f in fields(self) if f.name in others and getattr(self, f.name) != f.default]
        if given and given[0].name == "more":
            raise UserError(f"{self.run}: a run is measured alone, on one data set; {self.more[0]} is too much")
        if given:
            raise UserError(f"--{given[0].name} does not go with {self.run}: it {why}")
        return backbones

    def backbones_and_data(self) -> tuple[list[str], Path]:
        assert self.data is not None, "asked of backbones alone"
        *backbones, data = (self.run, self.data, *self.more)
        for i, one in enumerate(backbones):
            if one in backbones[:i]:
                raise UserError(f"{one}: is named twice")
            if (one / "run.json").is_file():
                raise UserError(f"{one}: is a run, not a backbone; name its weights file, or measure it alone")
        return [str(one) for one in backbones], data


@dataclass(frozen=True)
class Shape(Evaluate):
    """Measure what the shape of the sight alone says of the label: what a selector can give away, however blind the
    rest is."""

    split: Literal["val", "test"] = "test"
    """The probe is fitted on train and tuned on val."""
    out: Path | None = None
    """Folder for shape/SPLIT.json and .csv. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Predict:
    """Answer for pictures that have no labels."""

    run: Positional[Path]
    images: Positional[tuple[Path, ...]]
    """Pictures, folders of pictures, or a CSV file with a column image; of a folder with rows.csv, what that lists."""
    out: Path | None = None
    """A .csv or .json file. Default: CSV on the screen."""
    overlay: Path | None = None
    """Folder for pictures of what was seen, where the method does not see everything."""
    intervention: bool = True
    """Apply the intervention that is kept with the run, if any."""
    mask: Path | None = None
    """For one picture: show the model what is bright in this mask, instead of what it would look at."""
    batch: int = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class Compare:
    """Put runs side by side, on the same pictures. Runs that differ only in their seed count as one."""

    runs: Positional[tuple[Path, ...]]
    """Run folders; or, to compare on other data, the folders that `evaluate` made for these in each run."""
    split: Literal["val", "test"] = "test"
    suite: Literal["imagenet-shift"] | None = None
    """On the test sets that `evaluate --suite` has measured two runs on."""
    classes: Path | None = None
    """Of two runs: draw there how the accuracy of every class has changed, from the first to the second."""
    out: Path | None = None
    """Write the table there, as JSON."""


@dataclass(frozen=True)
class Verify:
    """Prove that a model is blind outside its sight, or find where it leaks.

    MODEL is a run folder, the name of a backbone (see `sightline backbones`), a weights file, or `file.py:function` for
    any nn.Module of your own: the function takes no argument and returns the module.
    """

    model: Positional[str]
    """A run folder, a backbone's name, a weights file, or file.py:function."""
    images: Positional[tuple[Path, ...]] = ()
    """Pictures, folders of pictures, or a CSV file with a column image; without any, toy pictures with known masks."""
    where: Literal["attention", "masks", "random"] | None = None
    """Where to look: the model's own attention, masks, or at random. Default: masks where there are any."""
    masks: Path | None = None
    """A folder with a mask for each picture, under the same name (bright = visible)."""
    sight: Literal["patches", "pixels"] = "patches"
    """With masks: hide whole patches, or also the pixels outside the mask within kept patches."""
    what: Literal["masked", "late"] = "masked"
    """How a backbone uses the sight: never sees the rest, or leaves it out at the end (which leaks)."""
    share: float = 0.25
    """The share of patches that attention or chance keeps."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what the model expects, or 224."""
    patch: int = 16
    """For your own module: the side of its patches."""
    mask_argument: str | None = None
    """For your own module: the keyword of its forward that takes the mask, bool [B, H, W] over patches."""
    like: str | None = None
    """For a weights file that cannot tell: the known backbone it is like."""
    intervention: bool = True
    """For a run: with the intervention that is kept with it, if any."""
    limit: int = 16
    """Take at most this many pictures."""
    draws: int = 5
    """Redraws of each kind per picture."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    seed: int = 0
    out: Path | None = None
    """Write the certificate there, as JSON."""


@dataclass(frozen=True)
class Demo:
    """The main job on the embedded pictures: train, measure, prove."""

    out: Path = Path("runs/demo")
    """Folder for everything it makes; what was there before is removed."""
    seed: int = 0
