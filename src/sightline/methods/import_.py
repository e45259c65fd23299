"""Import published checkpoints of iFAM and PDiscoFormer as run folders, which every command can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor, nn

from ..config import Ifam, Import, Pdiscoformer
from ..data.rows import read_rows
from ..errors import UserError
from ..training.checkpoint import save_tensors
from ..training.run_folder import begin_run, run_ending
from ..vit.key_names import WRAPPERS, to_our_names
from ..vit.model import Input, ViTConfig
from ..vit.weights import Origin, config_for_file, find_weights_file, fit_weights, load_backbone, read_tensors, shape_of
from ..what.masked import MaskedViT
from ..where.parts import PartDiscovery
from .base import PartSettings
from .ifam import IFam
from .pdiscoformer import PDiscoFormer

PROTOTYPES = "fc_landmarks.weight"  # in every such file, and in no plain backbone
PUBLISHED_NAMES = {  # names in the published files of PDiscoFormer and, under `stage_1.`, of iFAM
    PROTOTYPES: "prototypes",
    "modulation.weight": "modulation.weight",
    "modulation.bias": "modulation.bias",
    "fc_class_landmarks.weight": "head.weight",
}


def load_published(
    path: str | Path, *, like: str | None = None, config: ViTConfig | None = None, preset: str = "papers"
) -> IFam | PDiscoFormer:
    """A published model, in evaluation mode. `preset="published"` keeps the Gumbel noise on, as the published code
    does."""
    if not Path(path).expanduser().exists():
        raise UserError(f"{path}: no such file; give a published checkpoint of iFAM or PDiscoFormer")
    names = read_tensors(find_weights_file(str(path)))[0]
    if not any(name.endswith(PROTOTYPES) for name in names):
        raise UserError(
            f"{path}: not a checkpoint of iFAM or PDiscoFormer (it has no {PROTOTYPES}); use a plain backbone with "
            f"`sightline train METHOD DATA --backbone {path}`"
        )
    two_stages = any("stage_1." in name for name in names)
    where = load_stage1(path, prefix="stage_1." if two_stages else "", like=like, config=config)
    settings = Ifam if two_stages else Pdiscoformer
    part_settings = PartSettings.of(settings(Path(), preset=preset))  # ty: ignore[invalid-argument-type]
    if not two_stages:
        return PDiscoFormer(where, part_settings).eval()
    wrapped = next((name.partition("stage_2.")[0] for name in names if "stage_2." in name), "")
    stage2 = load_backbone(path, prefix=f"{wrapped}stage_2.", config=replace(where.vit.config, head_norm=True))
    return IFam(where, MaskedViT(stage2), part_settings).eval()


def published_preprocessing(config: ViTConfig, command: Import) -> Input:
    """The preprocessing of the published code: the whole image, resized to the size of the position embeddings; for
    ImageNet with a centre crop."""
    height, width = (command.size or side * config.patch for side in config.grid)
    if height % config.patch or width % config.patch:
        near = max(1, height // config.patch) * config.patch
        raise UserError(f"--size {height}: must be a multiple of the patch, {config.patch}, such as {near}")
    expects = replace(config.input, size=(height, width))
    return expects if (command.layout or "").startswith("imagenet") else replace(expects, crop=1.0, resample="bilinear")


def import_published(command: Import) -> Path:
    """Make a run folder from a published checkpoint and its dataset, which names the classes."""
    model = load_published(command.file, like=command.arch)
    rows = read_rows(command.data, layout=command.layout)
    classes = len(model.where.head.weight)
    if classes != len(rows.classes):
        raise UserError(f"{command.file}: predicts {classes} classes, and {command.data} has {len(rows.classes)}")
    kind = Ifam if isinstance(model, IFam) else Pdiscoformer
    parts, backbone = model.where.parts, command.arch or Path(command.file).stem
    settings = kind(command.data, backbone, command.out, command.layout, parts=parts, tune_selector="all")
    if isinstance(settings, Ifam):
        settings = replace(settings, sight="patches")
    expects = published_preprocessing(model.where.vit.config, command)
    with run_ending(settings.folder):
        run = begin_run(settings, rows)
        save_tensors(run.best, nn.Module.state_dict(model), {"imported": Path(command.file).name})
        run.note(
            vit=asdict(replace(model.where.vit.config, input=expects)),
            backbone={"file": Path(command.file).name},
            selection={"metric": None, "on": None},
            state="imported",
        )
    return run.folder


def split_published_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Published tensors of stage 1 -> those of its ViT, and all others under our names."""
    named = dict(tensors)
    others = {ours: named.pop(theirs).float() for theirs, ours in PUBLISHED_NAMES.items() if theirs in named}
    if "prototypes" in others:
        others["prototypes"] = others["prototypes"].flatten(1)  # theirs is the weight of a convolution
    return to_our_names(named), others


def load_stage1(
    path: str | Path, *, prefix: str = "", like: str | None = None, config: ViTConfig | None = None
) -> PartDiscovery:
    """A published PDiscoFormer or, with `prefix="stage_1."`, stage 1 of a published iFAM, in evaluation mode.

    `like` and `config` say which ViT it is, as for `load_backbone`, where the file cannot tell.
    """
    path = find_weights_file(str(path))
    tensors, metadata = read_tensors(path)
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    backbone, others = split_published_tensors(
        {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    )
    missing = sorted(theirs for theirs, ours in PUBLISHED_NAMES.items() if ours not in others)
    if missing:
        raise UserError(f"{path}: no part discovery under {prefix!r}: it lacks {', '.join(missing)}")
    if config is None:
        config = config_for_file(backbone, metadata, like, path)
        config = replace(
            config, grid=(shape_of(backbone) or {}).get("grid", config.grid)
        )  # of the published position embeddings
    vit = fit_weights(backbone, replace(config, classes=0, head_norm=False), path, None, seed=0)
    vit.origin = Origin(like, path.name)
    model = PartDiscovery(vit, len(others["prototypes"]) - 1, len(others["head.weight"]))
    model.load_state_dict(others | {f"vit.{name}": tensor for name, tensor in vit.state_dict().items()})
    return model.eval()


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Import) -> int:
    print(f"The run is in {import_published(command)}.")
    return 0
