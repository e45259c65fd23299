"""What a user can say: each dataclass is a command, each field a flag and a Python argument."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Verify:
    """Prove that a model is blind outside its sight, or find where it leaks.

    MODEL is the name of a backbone (see `sightline backbones`), a weights file, or `file.py:function` for any
    nn.Module of your own: the function takes no argument and returns the module.
    """

    model: Positional[str]
    """A backbone's name, a weights file, or file.py:function."""
    images: Positional[tuple[Path, ...]] = ()
    """Pictures, or folders of pictures; without any, toy pictures with known masks."""
    where: Literal["attention", "masks", "random"] | None = None
    """Where to look: the model's own attention, masks, or at random. Default: masks where there are any."""
    masks: Path | None = None
    """A folder with a mask for each picture, under the same name (bright = visible)."""
    pixels: bool = False
    """With masks: hide the pixels inside kept patches too, not only whole patches."""
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
class Backbones:
    """List the backbones that are known by name."""


@dataclass(frozen=True)
class Demo:
    """Show the proof on the embedded pictures."""

    out: Path = Path("runs/demo")
    """Folder for the certificates and the picture."""
    seed: int = 0
