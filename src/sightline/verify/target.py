"""The target of `sightline verify`: a run, a backbone or a user's module, with images and the sight to verify."""

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
from ..data.unlabelled import csv_file_of
from ..datasets.toy_images import make_toy
from ..errors import UserError
from ..load import load_and_announce
from ..methods.pair import Pair
from ..sight import Judge, Sight
from ..training.distributed import make_accelerator
from ..vit.model import Input, ViT
from ..vit.weights import load_backbone
from ..what.masked import MaskedViT
from ..what.pool import LateMaskedViT
from ..where.attention import AttentionSight

RANDOM_HEAD_CLASSES = 10
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULTS = Verify("")
BACKBONE_FLAGS = ("masking", "arch")
USER_MODULE_FLAGS = ("patch", "mask_argument")
AS_TRAINED = "a run chooses its sight as it was trained to"


@dataclass(frozen=True)
class Target:
    name: str
    module: nn.Module  # a Sightline model gets a certificate; a user's module can only be searched for leaks
    images: Tensor
    sight: Sight | None  # None: the module is a method and chooses its sight itself
    where: str  # how the sight is chosen, in words
    call: Callable[[Tensor], Any] | None = None  # how a user's module is run
    note: str = ""


def resolve_target(command: Verify) -> Target:
    check_command(command)
    device, dtype = make_accelerator(command.device).device, PRECISIONS[command.precision]
    path, colon, function = command.model.rpartition(":")
    if (Path(command.model) / "run.json").is_file():
        flags = ("where", "sight", "visible_fraction", *BACKBONE_FLAGS, *USER_MODULE_FLAGS)
        check_unused_flags(command, flags, AS_TRAINED)
        target = run_target(command)
    elif colon and not Path(command.model).exists() and not command.model.startswith("random:"):
        check_unused_flags(command, BACKBONE_FLAGS, "it is for backbones")
        target = user_module_target(command, path, function)
    elif command.model.endswith(".py"):
        raise UserError(f"{command.model}: name the function that returns the module, such as {command.model}:build")
    else:
        check_unused_flags(command, USER_MODULE_FLAGS, "it is for your own modules")
        target = backbone_target(command)
    target.module.to(device, dtype).eval()
    sight = target.sight.to(device) if target.sight is not None else None
    target = replace(target, images=target.images.to(device, dtype), sight=sight)
    return with_tested_call(target, command) if target.call else target


def check_unused_flags(command: Verify, flags: tuple[str, ...], why: str) -> None:
    for flag in flags:
        if getattr(command, flag) != getattr(DEFAULTS, flag):
            raise UserError(f"--{flag.replace('_', '-')} cannot be used with {command.model}: {why}")


def check_command(command: Verify) -> None:
    if command.sight == "pixels" and command.where in ("attention", "random"):
        raise UserError(f"--sight pixels needs masks: --where {command.where} chooses whole patches")
    if command.where == "masks" and command.images and command.masks is None:
        raise UserError("--where masks needs a folder of masks: --masks FOLDER")


# ---- models ----------------------------------------------------------------------------------------------------------


def run_target(command: Verify) -> Target:
    model = load_and_announce(Path(command.model), "cpu", command.intervention)
    method = model.method
    patch = next((m.config.patch for m in method.modules() if isinstance(m, ViT)), 1)
    images, masks = load_images(command, resolve_size(command, model.expects, patch))
    name = Path(command.model).name
    if not method.needs_masks:
        check_unused_flags(command, ("masks",), AS_TRAINED)
        return Target(name, method, images, None, "the method it was trained with")
    if masks is None:
        raise UserError(f"{command.model}: needs a mask for every image; give them with --masks FOLDER")
    return Target(name, method, images, method.look_at(images, masks), "given masks")


def backbone_target(command: Verify) -> Target:
    vit = load_backbone(command.model, like=command.arch)
    images, masks = load_images(command, resolve_size(command, vit.config.input, vit.config.patch))
    sight, where = choose_sight(command, images, masks, vit.grid(images), default="attention")
    what, note = add_head(vit, command)
    method = what if sight is not None else Pair(AttentionSight(vit, command.visible_fraction), cast(Judge, what))
    return Target(Path(command.model).name, method, images, sight, where, note=note)


def add_head(vit: ViT, command: Verify) -> tuple[MaskedViT | LateMaskedViT, str]:
    """A predictor, and a note if it has a random head: the proof needs logits to compare, not accuracy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(command.seed)
        if command.masking == "late":
            note = f"late masking pools patches for a random head with {RANDOM_HEAD_CLASSES} classes"
            return LateMaskedViT(vit, RANDOM_HEAD_CLASSES), note
        if vit.head is not None:
            return MaskedViT(vit), ""
        vit.head = nn.Linear(vit.config.width, RANDOM_HEAD_CLASSES)
        return MaskedViT(vit), f"the backbone has no head: a random one with {RANDOM_HEAD_CLASSES} classes is used"


def user_module_target(command: Verify, path: str, function: str) -> Target:
    module = load_user_module(path, function)
    images, masks = load_images(command, resolve_size(command, Input(), command.patch))
    grid = (images.shape[2] // command.patch, images.shape[3] // command.patch)
    sight, where = choose_sight(command, images, masks, grid, default="random")
    if sight is None:
        raise UserError("--where attention is for backbones; use --where masks or random for your own module")
    return Target(function, module, images, sight, where, call=module)


def with_tested_call(target: Target, command: Verify) -> Target:
    """Run a user's module once, so that errors in its input are reported before the search begins."""
    assert target.sight is not None
    mask = {command.mask_argument: target.sight.keep} if command.mask_argument else {}
    call = partial(target.module, **mask)
    try:
        with torch.no_grad():
            call(target.images)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        shape, reason = list(target.images.shape), str(error).splitlines()[0]
        raise UserError(
            f"{command.model}: fails on images {shape} in [0, 1] ({type(error).__name__}: {reason})"
        ) from error
    return replace(target, call=call)


def load_user_module(path: str, function: str) -> nn.Module:
    """The module that a function of the user's code returns."""
    if path.endswith(".py") and not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            assert spec is not None and spec.loader is not None  # noqa: PT018
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
        raise UserError(f"{path}: has no function {function}")
    try:
        module = build()
    except TypeError as error:
        raise UserError(f"{path}:{function}: must be callable without arguments ({error})") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{path}:{function}: returned a {type(module).__name__}, not a torch.nn.Module")
    return module


# ---- images and sight ------------------------------------------------------------------------------------------------


def resolve_size(command: Verify, expects: Input, patch: int) -> Input:
    sides = expects.size if command.size is None else (command.size, command.size)
    sides = tuple(side // patch * patch for side in sides) if command.size is None else sides
    if min(sides) < patch or any(side % patch for side in sides):
        near = max(min(sides) // patch, 1) * patch
        raise UserError(f"--size {sides[0]}: must be a multiple of the patch size {patch}, such as {near}")
    return replace(expects, size=(sides[0], sides[1]))


def load_images(command: Verify, expects: Input) -> tuple[Tensor, Tensor | None]:
    """Images [n, 3, h, w] in [0, 1] and their masks, if there are any, both resized and cropped alike."""
    if not command.images:
        toy = make_toy(command.limit, size=expects.size[0], seed=command.seed)
        return toy.images.float() / 255, toy.masks
    paths = [path for given in command.images for path in image_files(given, command.masks)][: command.limit]
    opened = [(path, read_image(path)) for path in paths]
    images = torch.stack([to_tensor(image, expects) for _, image in opened])
    if command.masks is None:
        return images, None
    masks = []
    for path, image in opened:
        mask_path = find_mask(path, command)
        mask = read_mask(mask_path)
        if mask.size != image.size:
            sizes = " but its image has ".join("{}×{} pixels".format(*file.size) for file in (mask, image))
            raise UserError(f"{mask_path}: {sizes}; give a mask of the same size")
        masks.append(mask_to_tensor(mask, expects))
    return images, torch.stack(masks)


def image_files(given: Path, masks: Path | None) -> list[Path]:
    """The images that a table lists, if there is one; otherwise all images of the folder except the masks."""
    files = find_images([given])
    if masks is None or not given.is_dir() or csv_file_of(given):
        return files
    files = [path for path in files if not path.parent.resolve().is_relative_to(masks.resolve())]
    if not files:
        raise UserError(f"{given}: contains no images except the masks in {masks}; give the folder of the images")
    return files


def find_mask(path: Path, command: Verify) -> Path:
    """The mask with the image's name: in the same subfolder, or the only one of that name."""
    assert command.masks is not None
    named = [mask for mask in find_images([command.masks]) if mask.stem == path.stem]
    for given in command.images:
        table = csv_file_of(given)
        folder = table.parent if table else given
        if folder.is_dir() and path.is_relative_to(folder):
            beside = command.masks / path.relative_to(folder).parent
            named = [mask for mask in named if mask.parent == beside] or named
    if not named:
        raise UserError(f"{path}: no mask of that name in {command.masks} (looked for {path.stem}.*)")
    if len(named) > 1:
        raise UserError(
            f"{path}: several masks of that name, such as {named[0]} and {named[1]}; use the images' subfolders"
        )
    return named[0]


def choose_sight(
    command: Verify, images: Tensor, masks: Tensor | None, grid: tuple[int, int], default: str
) -> tuple[Sight | None, str]:
    """The sight, or None if attention chooses it, and how it is chosen, in words."""
    where = command.where or ("masks" if masks is not None else default)
    if where == "masks":
        assert masks is not None
        if command.sight == "pixels":
            return Sight.of_pixels(masks, grid), "given masks, pixels"
        return Sight.of_pixels(masks, grid, at_least=0.5, exact=False), "given masks, whole patches"
    if where == "random":
        generator = torch.Generator().manual_seed(command.seed)
        keep = torch.rand(len(images), *grid, generator=generator) < command.visible_fraction
        return Sight(keep=keep), f"a random {command.visible_fraction:.0%} of the patches"
    return None, f"the {command.visible_fraction:.0%} most attended patches"
