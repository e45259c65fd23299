"""Names to weights: the Hugging Face hub, a local file, or one of our own files, into the one ViT.

    vit = load_backbone("dinov2-s14-reg")                        # downloaded once, then from the hub's cache
    vit = load_backbone("weights/my_vit.safetensors")            # what it is, is read off the file
    vit = load_backbone("checkpoint.pth", like="dino-b16")       # ... or said, where a file cannot tell

A file that does not fit is refused, with what is missing, what is left over and what it looks like. Pickles are only
opened with `weights_only=True`, which builds nothing but tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .backbones import BY_REPOSITORY, KNOWN, NANO, Known
from .key_names import to_our_names
from .model import Input, ViT, ViTConfig

METADATA_KEY = "sightline"  # in the header of our own files: the ViTConfig, so that they explain themselves
HEAD = ("head.", "fc_norm.")
CONTAINERS = ("teacher", "state_dict", "model", "model_state", "module")  # what .pth files wrap their tensors in


@dataclass(frozen=True)
class Origin:
    """Where a ViT's weights come from."""

    name: str | None  # of the known backbone that was asked for
    file: str
    repository: str | None = None
    revision: str | None = None  # the hub's commit


def load_backbone(
    name_or_path: str | Path,
    *,
    like: str | None = None,
    config: ViTConfig | None = None,
    prefix: str = "",
    classes: int | None = None,
    revision: str | None = None,
    seed: int = 0,
) -> ViT:
    """A ViT with published or local weights, in evaluation mode; `vit.origin` says where they are from.

    `random:NAME` is that architecture with untrained weights. `like` names a known backbone that a local file has the
    shape and the preprocessing of; `config` says the same in full. `prefix` picks one part of a file (`stage_2.` of an
    iFAM checkpoint). `classes` replaces the file's head by a fresh one, drawn from `seed`. `revision` overrides the
    pinned commit of a hub repository.
    """
    text = str(name_or_path)
    if text.startswith("random:"):
        return untrained(text.removeprefix("random:"), classes, seed)
    known = KNOWN.get(text) or BY_REPOSITORY.get(text)
    if known and like is not None:
        raise UserError(f"{text}: a known backbone; like={like!r} is for files that cannot tell what they are")
    if known is None and revision is not None:
        raise UserError(f"{text}: revision={revision!r} is for backbones from the Hugging Face hub")
    if known:
        path, commit = download(known, revision)
        origin = Origin(known.name, path.name, known.repository, commit)
        config = config or known.config
    else:
        path = existing_file(text)
        origin = Origin(like, path.name)
    tensors, metadata = read_tensors(path)
    tensors = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    if METADATA_KEY not in metadata:  # our own files have our names
        tensors = to_our_names(tensors)
    if not tensors:
        raise UserError(f"{path}: holds no weights" + (f" under {prefix!r}" if prefix else ""))
    config = config or config_for(tensors, metadata, like, path)
    vit = fit(tensors, config, path, classes, seed)
    vit.origin = origin
    return vit


def untrained(name: str, classes: int | None, seed: int) -> ViT:
    """A known architecture with random weights: a baseline, or a small model to try things with."""
    if name != "nano" and name not in KNOWN:
        raise UserError(f"random:{name}: no such backbone. Known backbones: nano, {', '.join(sorted(KNOWN))}")
    config = NANO if name == "nano" else KNOWN[name].config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = ViT(replace(config, classes=classes or 0))
    vit.origin = Origin(None, f"random:{name}")
    return vit.eval()


def save_backbone(vit: ViT, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a file that `load_backbone` reads without being told anything."""
    from safetensors.torch import save_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: weights are saved as .safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in vit.state_dict().items()}
    save_file(tensors, str(path), metadata={METADATA_KEY: json.dumps(asdict(vit.config))})


# ---- reading ---------------------------------------------------------------------------------------------------------


def existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_dir():
        for name in ("model.safetensors", "model.safetensors.index.json"):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path}: a folder without model.safetensors; give the weights file itself")
    if not path.is_file():
        names = ", ".join(sorted(KNOWN))
        raise UserError(f"{text}: no such file, and no backbone of that name. Known backbones: {names}")
    return path


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its header's metadata."""
    if path.name.endswith(".index.json"):
        parts = [_read_safetensors(path.parent / shard)[0] for shard in _shards(path)]
        return {name: tensor for part in parts for name, tensor in part.items()}, {}
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (".pth", ".pt", ".bin", ".ckpt"):
        return _read_torch(path), {}
    raise UserError(f"{path}: weights come as .safetensors, or as .pth, .pt, .bin or .ckpt files of tensors")


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of safetensors shards ({error})") from error


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); is the download complete?") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a zip, pickle or format error, of several unrelated types
        told = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]  # before: how to run it anyway
        reason = re.split(r"\. | Check the documentation", told)[0][:200] or type(error).__name__
        raise UserError(
            f"{path}: not a file of plain tensors ({reason}). Sightline runs no code from files: where you trust it, "
            "load it yourself and save its state dict as safetensors"
        ) from error
    while isinstance(content, Mapping) and (
        inside := next((content[name] for name in CONTAINERS if isinstance(content.get(name), Mapping)), None)
    ):
        content = inside
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a state dict")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        found = ", ".join(map(str, list(content)[:8]))
        raise UserError(f"{path}: no tensors in it" + (f", only {found}" if found else ""))
    return tensors


def download(known: Known, revision: str | None) -> tuple[Path, str | None]:
    """The file in the hub's cache, fetched if need be, and the commit it is from; or the one that is embedded here."""
    if known.embedded is not None:
        if revision is not None:
            raise UserError(f"{known.name}: comes with this package; revision={revision!r} is for the hub")
        return Path(__file__).parent / "embedded" / known.embedded, None
    if known.repository is None:
        raise UserError(
            f"{known.name}: not published as safetensors. {known.note} Then give that file, with like={known.name!r}"
        )
    path = _fetch(known.name, known.repository, known.file, revision or known.revision)
    commit = next((p.name for p in path.parents if re.fullmatch("[0-9a-f]{40}", p.name)), None)
    if path.name.endswith(".index.json"):
        for shard in _shards(path):
            _fetch(known.name, known.repository, shard, commit)
    return path, commit


def _fetch(name: str, repository: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import errors, hf_hub_download

    where = f"{name}: {repository} on the Hugging Face hub"
    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except errors.GatedRepoError as error:
        raise UserError(f"{where} asks you to accept its licence there and to log in with `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{where} does not exist, or is private: then log in with `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{where} has no revision {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{where} is neither in the local cache nor reachable: download it once while online, or give a file"
        ) from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"{where} has no {file}") from error
    except Exception as error:  # no space, a cut transfer, a bad token: of several unrelated types
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{where} could not be fetched ({reason})") from error


# ---- fitting ---------------------------------------------------------------------------------------------------------


def fit(tensors: dict[str, Tensor], config: ViTConfig, path: Path, classes: int | None, seed: int) -> ViT:
    """A ViT of this config with these tensors, or a refusal that says what does not fit."""
    config = as_in_file(config, tensors, classes)
    if classes is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD)}
    with torch.random.fork_rng(devices=[]):  # loading leaves the caller's random numbers alone
        torch.manual_seed(seed)
        vit = ViT(config)
    ours = vit.state_dict()
    fresh = {name for name in ours if classes is not None and name.startswith(HEAD)}
    missing = sorted(set(ours) - set(tensors) - fresh)
    extra = sorted(set(tensors) - set(ours))
    misfits = [
        f"{name} is {list(tensors[name].shape)} instead of {list(ours[name].shape)}"
        for name in sorted(set(ours) & set(tensors))
        if tensors[name].shape != ours[name].shape
    ]
    if missing or extra or misfits:
        what = [
            f"{len(names)} {kind}: {', '.join(names[:6])}{', …' * (len(names) > 6)}"
            for kind, names in (("missing", missing), ("left over", extra), ("of another shape", misfits))
            if names
        ]
        raise UserError(f"{path}: does not fit. {'. '.join(what)}. It looks like {describe(tensors)}")
    vit.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=not fresh)
    return vit.eval()


def as_in_file(config: ViTConfig, tensors: Mapping[str, Tensor], classes: int | None) -> ViTConfig:
    """What may differ between files of the same backbone: the head, and DINOv3's biases, which some leave out."""
    if not any(name.endswith(".attn.qkv.bias") for name in tensors):
        config = replace(config, qkv_bias="none")
    if classes is not None:  # a fresh head is as the config has it, not as the file's was
        return replace(config, classes=classes)
    head = tensors.get("head.weight")
    return replace(
        config,
        classes=0 if head is None else len(head),
        head_bias=config.head_bias if head is None else "head.bias" in tensors,
        head_norm="fc_norm.weight" in tensors,
    )


def config_for(tensors: dict[str, Tensor], metadata: dict[str, str], like: str | None, path: Path) -> ViTConfig:
    """What a local file holds: as told, as its own header says, or as the only known backbone of that shape."""
    if like is not None:
        if like not in KNOWN:
            raise UserError(f"like={like!r}: no such backbone. Known backbones: {', '.join(sorted(KNOWN))}")
        return KNOWN[like].config
    if METADATA_KEY in metadata:
        return config_from_json(metadata[METADATA_KEY], path)
    shape = shape_of(tensors)
    if shape is None:
        raise UserError(f"{path}: not a Vision Transformer that Sightline knows. It looks like {describe(tensors)}")
    candidates = {name: known.config for name, known in KNOWN.items() if has_shape(known.config, shape)}
    if len(set(candidates.values())) == 1:
        return next(iter(candidates.values()))
    remedy = "Their preprocessing differs: say which with like=" if candidates else "Say what it is with config="
    raise UserError(f"{path}: holds {describe(tensors)}. {remedy}")


def config_from_json(text: str, path: Path | str) -> ViTConfig:
    try:
        values: dict[str, Any] = json.loads(text, object_hook=_lists_to_tuples)
        values["input"] = Input(**values["input"])
        return ViTConfig(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: its header was written by another version of Sightline ({error})") from error


def _lists_to_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def shape_of(tensors: Mapping[str, Tensor]) -> dict[str, object] | None:
    """The fields of a ViTConfig that tensors' names and shapes give away."""
    needed = ("cls_token", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
    if any(name not in tensors for name in needed):
        return None
    cls, proj, fc1, fc2 = (tensors[name] for name in needed)
    hidden = fc2.shape[1]
    shape = {
        "width": cls.shape[-1],
        "depth": 1 + max(int(name.split(".")[1]) for name in tensors if re.match(r"blocks\.\d+\.", name)),
        "patch": proj.shape[-1],
        "registers": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "hidden": hidden,
        "gated": fc1.shape[0] == 2 * hidden,
        "rotary": "pos_embed" not in tensors,
        "layer_scale": "blocks.0.ls1.gamma" in tensors,
        "pre_norm": "norm_pre.weight" in tensors,
        "patch_bias": "patch_embed.proj.bias" in tensors,
    }
    if "pos_embed" in tensors:
        side = math.isqrt(tensors["pos_embed"].shape[1])
        shape["grid"] = (side, side)
    return shape


def has_shape(config: ViTConfig, shape: dict[str, object]) -> bool:
    mine = {
        "hidden": config.hidden or 4 * config.width,
        "gated": config.mlp == "swiglu",
        "rotary": config.positions == "rotary",
        "layer_scale": config.layer_scale is not None,
    }
    return all(mine.get(name, getattr(config, name, None)) == value for name, value in shape.items())


def describe(tensors: Mapping[str, Tensor]) -> str:
    """What a file looks like, for a person."""
    shape = shape_of(tensors)
    if shape is None:
        names = ", ".join(list(tensors)[:6])
        return f"{len(tensors)} tensors that are no Vision Transformer: {names}, …"
    extras = [f"{shape['registers']} registers" if shape["registers"] else "no registers"]
    extras += [
        word
        for key, word in (
            ("gated", "SwiGLU"),
            ("layer_scale", "LayerScale"),
            ("rotary", "rotary positions"),
            ("pre_norm", "a norm before the blocks (CLIP)"),
        )
        if shape[key]
    ]
    close = [name for name, known in KNOWN.items() if has_shape(known.config, shape)]
    return f"a ViT of width {shape['width']}, {shape['depth']} blocks, patch {shape['patch']}, {', '.join(extras)}" + (
        f" (like {', '.join(close)})" if close else ""
    )


def weights_sha256(module: nn.Module, *, without: tuple[str, ...] = ()) -> str:
    """Over every parameter and buffer, stored in files or not: name, type, shape and content."""
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        if not name.startswith(without or ("\0",)):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
