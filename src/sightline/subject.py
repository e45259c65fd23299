"""What `sightline verify` is asked about: a model, pictures, and where it may look."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .config import Verify
from .data.images import find_images, mask_to_tensor, read_image, read_mask, to_tensor
from .errors import UserError
from .load import load
from .methods.pair import Pair
from .sight import Sight
from .vit import Input, ViT
from .weights import load_backbone
from .what.masked import MaskedViT
from .what.pool import LateMask
from .where.attention import AttentionSight

STAND_IN_CLASSES = 10


@dataclass(frozen=True)
class Subject:
    name: str
    module: nn.Module  # ours can be proved; one of the user's own can only be searched for leaks
    images: Tensor
    sight: Sight | None  # None: the module is a method and looks for itself
    where: str  # in words
    call: Callable[[Tensor], Any] | None = None  # how a module of the user's own is run
    note: str = ""


def subject_of(command: Verify) -> Subject:
    check(command)
    path, colon, function = command.model.rpartition(":")
    if (Path(command.model) / "run.json").is_file():
        subject = run_subject(command)
    elif colon and not Path(command.model).exists() and not command.model.startswith("random:"):
        subject = own_subject(command, path, function)
    else:
        subject = backbone_subject(command)
    device, dtype = on_device(command.device), getattr(torch, command.dtype)
    subject.module.to(device, dtype).eval()
    sight = subject.sight.to(device) if subject.sight is not None else None
    return replace(subject, images=subject.images.to(device, dtype), sight=sight)


def run_subject(command: Verify) -> Subject:
    """A trained method, which looks for itself."""
    model = load(command.model)
    method = cast(nn.Module, model.method)
    patch = next((m.config.patch for m in method.modules() if isinstance(m, ViT)), 1)
    images = pictures(command, model.expects, patch)
    return Subject(Path(command.model).name, method, images, None, "the method it was trained with")


def backbone_subject(command: Verify) -> Subject:
    vit = load_backbone(command.model, like=command.like)
    images = pictures(command, vit.config.input, vit.config.patch)
    note = stand_in_head(vit, command)
    what = LateMask(vit, STAND_IN_CLASSES) if command.what == "late" else MaskedViT(vit)
    sight, where = sight_of(command, images, vit.grid(images), default="attention")
    method = what if sight is not None else Pair(AttentionSight(vit, command.share), what)
    return Subject(Path(command.model).name, method, images, sight, where, note=note)


def own_subject(command: Verify, path: str, function: str) -> Subject:
    module = own_module(path, function)
    images = pictures(command, Input(), command.patch)
    grid = (images.shape[2] // command.patch, images.shape[3] // command.patch)
    sight, where = sight_of(command, images, grid, default="random")
    if sight is None:
        raise UserError("--where attention is for backbones; for a module of your own, use masks or random")
    call = None
    if command.mask_argument:
        mask = {command.mask_argument: sight.to(command.device).keep}
        call = lambda x: module(x, **mask)  # noqa: E731
    return Subject(function, module, images, sight, where, call=call)


def stand_in_head(vit: ViT, command: Verify) -> str:
    """Without a head there is no answer to compare; a random one, said to be so, will do for a proof."""
    torch.manual_seed(command.seed)
    if command.what == "late":
        return f"late masking averages patches into a random {STAND_IN_CLASSES}-way head"
    if vit.head is None:
        vit.head = nn.Linear(vit.config.width, STAND_IN_CLASSES)
        return f"this backbone has no head: a random {STAND_IN_CLASSES}-way one stands in for the answers"
    return ""


def check(command: Verify) -> None:
    if not 0 < command.share < 1:
        raise UserError(f"--share {command.share}: a share between 0 and 1, such as 0.25")
    if command.limit < 1 or command.draws < 1:
        raise UserError("--limit and --draws start at 1")
    if command.pixels and command.where in ("attention", "random"):
        raise UserError(f"--pixels needs masks: --where {command.where} chooses whole patches")
    if command.where == "masks" and command.images and command.masks is None:
        raise UserError("--where masks needs a folder of masks: --masks FOLDER")


def on_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not to be had here ({str(error).splitlines()[0]})") from error


def pictures(command: Verify, expects: Input, patch: int) -> Tensor:
    expects = sized(command, expects, patch)
    if not command.images:
        from .data.toy import make_toy

        return make_toy(command.limit, size=expects.size[0], seed=command.seed).images.float() / 255
    paths = find_images(command.images)[: command.limit]
    return torch.stack([to_tensor(read_image(path), expects) for path in paths])


def sized(command: Verify, expects: Input, patch: int) -> Input:
    side = command.size or expects.size[0] // patch * patch
    if side < patch or side % patch:
        raise UserError(
            f"--size {side}: must be a multiple of the patch, {patch}, such as {max(side // patch, 1) * patch}"
        )
    return replace(expects, size=(side, side))


def sight_of(command: Verify, images: Tensor, grid: tuple[int, int], default: str) -> tuple[Sight | None, str]:
    """The sight, or None where attention is to choose it; and how it comes about, in words."""
    have_masks = command.masks is not None or not command.images
    where = command.where or ("masks" if have_masks else default)
    if where == "masks":
        visible = visible_of(command, images)
        if command.pixels:
            return Sight.of_pixels(visible, grid), "given masks, pixel by pixel"
        return Sight.of_pixels(visible, grid, at_least=0.5, exact=False), "given masks, patch by patch"
    if where == "random":
        generator = torch.Generator().manual_seed(command.seed)
        keep = torch.rand(len(images), *grid, generator=generator) < command.share
        return Sight(keep=keep), f"chance, at {command.share:.0%} of the patches"
    return None, f"its own attention, at {command.share:.0%} of the patches"


def visible_of(command: Verify, images: Tensor) -> Tensor:
    size = images.shape[-2:]
    if not command.images:
        from .data.toy import make_toy

        return make_toy(len(images), size=size[0], seed=command.seed).masks
    assert command.masks is not None
    by_stem = {path.stem: path for path in find_images([command.masks])}
    masks = []
    for path in find_images(command.images)[: command.limit]:
        if path.stem not in by_stem:
            raise UserError(f"{path}: no mask of that name in {command.masks} (looked for {path.stem}.*)")
        mask, image = read_mask(by_stem[path.stem]), read_image(path)
        if mask.size != image.size:
            sizes = " but its picture has ".join("{}×{} pixels".format(*one.size) for one in (mask, image))
            raise UserError(f"{by_stem[path.stem]}: {sizes}")
        masks.append(mask_to_tensor(mask, Input(size=(size[0], size[1]))))
    return torch.stack(masks)


def own_module(path: str, function: str) -> nn.Module:
    """The user's own code, imported as Python would."""
    try:
        if path.endswith(".py"):
            if not Path(path).is_file():
                raise UserError(f"{path}: no such file")
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            assert spec is not None
            assert spec.loader is not None
            code = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(code)
        else:
            code = importlib.import_module(path)
    except ImportError as error:
        raise UserError(f"{path}:{function}: cannot be imported ({error})") from error
    build = getattr(code, function, None)
    if build is None:
        raise UserError(f"{path}: has no {function}")
    module = build()
    if not isinstance(module, nn.Module):
        raise UserError(f"{path}:{function}: returned a {type(module).__name__}, not a torch.nn.Module")
    return module
