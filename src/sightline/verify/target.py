"""What `sightline verify` is asked about: a model, pictures, and where it may look."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import Verify
from ..data.images import find_images, mask_to_tensor, read_image, read_mask, to_tensor
from ..data.unlabelled import table_of
from ..datasets.toy_images import make_toy
from ..errors import UserError
from ..load import load_corrected
from ..methods.pair import Pair
from ..sight import Sight
from ..vit.model import Input, ViT
from ..vit.weights import load_backbone
from ..what.masked import MaskedViT
from ..what.pool import LateMask
from ..where.attention import AttentionSight

STAND_IN_CLASSES = 10
DEFAULTS = Verify("")
BACKBONE_FLAGS = ("what", "like")
OWN_FLAGS = ("patch", "mask_argument")


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
    device, dtype = on_device(command.device), getattr(torch, command.dtype)
    path, colon, function = command.model.rpartition(":")
    if (Path(command.model) / "run.json").is_file():
        check_value(
            command, ("where", "sight", "share", *BACKBONE_FLAGS, *OWN_FLAGS), "a run looks as it was trained to"
        )
        subject = run_subject(command)
    elif colon and not Path(command.model).exists() and not command.model.startswith("random:"):
        check_value(command, BACKBONE_FLAGS, "that is for backbones")
        subject = own_subject(command, path, function)
    elif command.model.endswith(".py"):
        raise UserError(f"{command.model}: say which function returns the module, such as {command.model}:build")
    else:
        check_value(command, OWN_FLAGS, "that is for modules of your own")
        subject = backbone_subject(command)
    subject.module.to(device, dtype).eval()
    sight = subject.sight.to(device) if subject.sight is not None else None
    subject = replace(subject, images=subject.images.to(device, dtype), sight=sight)
    return with_call(subject, command) if subject.call else subject


def check_value(command: Verify, flags: tuple[str, ...], why: str) -> None:
    for flag in flags:
        if getattr(command, flag) != getattr(DEFAULTS, flag):
            raise UserError(f"--{flag.replace('_', '-')} does not go with {command.model}: {why}")


def check(command: Verify) -> None:
    if not 0 < command.share < 1:
        raise UserError(f"--share {command.share}: a share between 0 and 1, such as 0.25")
    for flag in ("limit", "draws", "patch"):
        if getattr(command, flag) < 1:
            raise UserError(f"--{flag} {getattr(command, flag)}: at least 1")
    if command.sight == "pixels" and command.where in ("attention", "random"):
        raise UserError(f"--sight pixels needs masks: --where {command.where} chooses whole patches")
    if command.where == "masks" and command.images and command.masks is None:
        raise UserError("--where masks needs a folder of masks: --masks FOLDER")


def on_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not to be had here ({str(error).splitlines()[0]})") from error


# ---- models ----------------------------------------------------------------------------------------------------------


def run_subject(command: Verify) -> Subject:
    model = load_corrected(Path(command.model), "cpu", command.intervention)
    method = cast(nn.Module, model.method)
    patch = next((m.config.patch for m in method.modules() if isinstance(m, ViT)), 1)
    images, masks = pictures(command, sized(command, model.expects, patch))
    name = Path(command.model).name
    if not method.needs_masks:
        check_value(command, ("masks",), "a run looks as it was trained to")
        return Subject(name, method, images, None, "the method it was trained with")
    if masks is None:
        raise UserError(f"{command.model}: is told where to look; give a mask for each picture: --masks FOLDER")
    return Subject(name, method, images, method.look_at(images, masks), "given masks")


def backbone_subject(command: Verify) -> Subject:
    vit = load_backbone(command.model, like=command.like)
    images, masks = pictures(command, sized(command, vit.config.input, vit.config.patch))
    sight, where = sight_of(command, images, masks, vit.grid(images), default="attention")
    what, note = predictor(vit, command)
    method = what if sight is not None else Pair(AttentionSight(vit, command.share), what)
    return Subject(Path(command.model).name, method, images, sight, where, note=note)


def predictor(vit: ViT, command: Verify) -> tuple[MaskedViT | LateMask, str]:
    """Without a head there is no answer to compare; a random one, said to be so, will do for a proof."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(command.seed)
        if command.what == "late":
            return LateMask(
                vit, STAND_IN_CLASSES
            ), f"late masking averages patches into a random {STAND_IN_CLASSES}-way head"
        if vit.head is not None:
            return MaskedViT(vit), ""
        vit.head = nn.Linear(vit.config.width, STAND_IN_CLASSES)
        return MaskedViT(
            vit
        ), f"this backbone has no head: a random {STAND_IN_CLASSES}-way one stands in for the answers"


def own_subject(command: Verify, path: str, function: str) -> Subject:
    module = own_module(path, function)
    images, masks = pictures(command, sized(command, Input(), command.patch))
    grid = (images.shape[2] // command.patch, images.shape[3] // command.patch)
    sight, where = sight_of(command, images, masks, grid, default="random")
    if sight is None:
        raise UserError("--where attention is for backbones; for a module of your own, use masks or random")
    return Subject(function, module, images, sight, where, call=module)


def with_call(subject: Subject, command: Verify) -> Subject:
    """Run a module of the user's own once, so that what does not fit is said before the search begins."""
    assert subject.sight is not None
    mask = {command.mask_argument: subject.sight.keep} if command.mask_argument else {}
    call = partial(subject.module, **mask)
    try:
        with torch.no_grad():
            call(subject.images)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        shape, reason = list(subject.images.shape), str(error).splitlines()[0]
        raise UserError(
            f"{command.model}: fails on images {shape} in [0, 1] ({type(error).__name__}: {reason})"
        ) from error
    return replace(subject, call=call)


def own_module(path: str, function: str) -> nn.Module:
    """The user's own code, imported as Python would."""
    if path.endswith(".py") and not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            assert spec is not None
            assert spec.loader is not None
            code = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(code)
        else:
            code = importlib.import_module(path)
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}") from error
    except ImportError as error:
        raise UserError(f"{path}:{function}: cannot be imported ({error})") from error
    build = getattr(code, function, None)
    if build is None:
        raise UserError(f"{path}: has no {function}")
    try:
        module = build()
    except TypeError as error:
        raise UserError(f"{path}:{function}: must be callable without arguments ({error})") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{path}:{function}: returned a {type(module).__name__}, not a torch.nn.Module")
    return module


# ---- pictures --------------------------------------------------------------------------------------------------------


def sized(command: Verify, expects: Input, patch: int) -> Input:
    sides = expects.size if command.size is None else (command.size, command.size)
    sides = tuple(side // patch * patch for side in sides) if command.size is None else sides
    if min(sides) < patch or any(side % patch for side in sides):
        near = max(min(sides) // patch, 1) * patch
        raise UserError(f"--size {sides[0]}: must be a multiple of the patch, {patch}, such as {near}")
    return replace(expects, size=(sides[0], sides[1]))


def pictures(command: Verify, expects: Input) -> tuple[Tensor, Tensor | None]:
    """Images [n, 3, h, w] in [0, 1], and their masks where there are any, both through the same geometry."""
    if not command.images:
        toy = make_toy(command.limit, size=expects.size[0], seed=command.seed)
        return toy.images.float() / 255, toy.masks
    paths = [path for given in command.images for path in photographs(given, command.masks)][: command.limit]
    opened = [(path, read_image(path)) for path in paths]
    images = torch.stack([to_tensor(image, expects) for _, image in opened])
    if command.masks is None:
        return images, None
    masks = []
    for path, image in opened:
        found = mask_for(path, command)
        mask = read_mask(found)
        if mask.size != image.size:
            sizes = " but its picture has ".join("{}×{} pixels".format(*one.size) for one in (mask, image))
            raise UserError(f"{found}: {sizes}")
        masks.append(mask_to_tensor(mask, expects))
    return images, torch.stack(masks)


def photographs(given: Path, masks: Path | None) -> list[Path]:
    """What a table lists, where there is one; otherwise all pictures that are there, but for the masks."""
    found = find_images([given])
    if masks is None or not given.is_dir() or table_of(given):
        return found
    found = [path for path in found if not path.parent.resolve().is_relative_to(masks.resolve())]
    if not found:
        raise UserError(f"{given}: no pictures in this folder but those in {masks}; give the folder of the pictures")
    return found


def mask_for(path: Path, command: Verify) -> Path:
    """The mask with the picture's name: in the same subfolder, or the only one of that name."""
    assert command.masks is not None
    named = [mask for mask in find_images([command.masks]) if mask.stem == path.stem]
    for given in command.images:
        table = table_of(given)
        folder = table.parent if table else given
        if folder.is_dir() and path.is_relative_to(folder):
            beside = command.masks / path.relative_to(folder).parent
            named = [mask for mask in named if mask.parent == beside] or named
    if not named:
        raise UserError(f"{path}: no mask of that name in {command.masks} (looked for {path.stem}.*)")
    if len(named) > 1:
        raise UserError(
            f"{path}: several masks of that name, such as {named[0]} and {named[1]}; use the same subfolders"
        )
    return named[0]


def sight_of(
    command: Verify, images: Tensor, masks: Tensor | None, grid: tuple[int, int], default: str
) -> tuple[Sight | None, str]:
    """The sight, or None where attention is to choose it; and how it comes about, in words."""
    where = command.where or ("masks" if masks is not None else default)
    if where == "masks":
        assert masks is not None
        if command.sight == "pixels":
            return Sight.of_pixels(masks, grid), "given masks, pixel by pixel"
        return Sight.of_pixels(masks, grid, at_least=0.5, exact=False), "given masks, patch by patch"
    if where == "random":
        generator = torch.Generator().manual_seed(command.seed)
        keep = torch.rand(len(images), *grid, generator=generator) < command.share
        return Sight(keep=keep), f"chance, at {command.share:.0%} of the patches"
    return None, f"its own attention, at {command.share:.0%} of the patches"
