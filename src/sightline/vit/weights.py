"""Loading backbones: from the Hugging Face hub, a local checkpoint, or one of our own files, into our ViT.

    vit = load_backbone("dinov2-s14-reg")                        # downloaded once, then from the hub's cache
    vit = load_backbone("weights/my_vit.safetensors")            # the architecture is inferred from the file
    vit = load_backbone("checkpoint.pth", like="dino-b16")       # ... or given, where it is ambiguous

A file that does not fit is rejected, with its missing, unexpected and misshapen tensors and a description. Pickles are
only opened with `weights_only=True`, which builds nothing but tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from ..errors import UserError
from .backbones import BACKBONES, BY_REPOSITORY, NANO, Backbone
from .checksums import check_content, save_with_checksum
from .key_names import to_our_names
from .model import Input, ViT, ViTConfig
from .plausible import check_archive, check_plausible, elements_of, state_dict_of

METADATA_KEY = "sightline"  # in the header of our own files: the ViTConfig, so that they are self-describing
HEAD_PREFIXES = ("head.", "fc_norm.")


@dataclass(frozen=True)
class Origin:
    """The source of a ViT's weights."""

    name: str | None  # of the requested backbone in the registry
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
    """A ViT with published or local weights, in evaluation mode; `vit.origin` is their source.

    `random:NAME` is that architecture with random weights. `like` names a backbone with the architecture and the
    preprocessing of a local file; `config` gives them in full. `prefix` selects one part of a file (`stage_2.` of an
    iFAM checkpoint). `classes` replaces the head by a new one, initialised from `seed`. `revision` overrides the pinned
    commit of a hub repository.
    """
    text = str(name_or_path)
    if text.startswith("random:"):
        return random_backbone(text.removeprefix("random:"), classes, seed)
    backbone = BACKBONES.get(text) or BY_REPOSITORY.get(text)
    if backbone and like is not None:
        raise UserError(f"{text}: a registered backbone; like={like!r} is only for local files")
    if backbone is None and revision is not None:
        raise UserError(f"{text}: revision={revision!r} is only for backbones on the Hugging Face hub")
    if backbone:
        path, commit = download_backbone(backbone, revision)
        origin = Origin(backbone.name, path.name, backbone.repository, commit)
        config = config or backbone.config
    else:
        path = find_weights_file(text)
        origin = Origin(like, path.name)
    tensors, metadata = read_tensors(path)
    tensors = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    if METADATA_KEY not in metadata:  # our own files need no renaming
        tensors = to_our_names(tensors)
    if not tensors:
        raise UserError(f"{path}: contains no weights" + (f" under {prefix!r}" if prefix else ""))
    config = config or config_for_file(tensors, metadata, like, path)
    vit = fit_weights(tensors, config, path, classes, seed)
    vit.origin = origin
    return vit


def random_backbone(name: str, classes: int | None, seed: int) -> ViT:
    """A registered architecture with random weights: a baseline, or a small model for experiments."""
    if name != "nano" and name not in BACKBONES:
        raise UserError(f"random:{name}: no such backbone; known backbones: nano, {', '.join(sorted(BACKBONES))}")
    config = NANO if name == "nano" else BACKBONES[name].config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = ViT(replace(config, classes=classes or 0))
    vit.origin = Origin(None, f"random:{name}")
    return vit.eval()


def save_backbone(vit: ViT, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a self-describing file for `load_backbone`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: weights are saved as .safetensors; use that suffix")
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in vit.state_dict().items()}
    save_with_checksum(path, tensors, {METADATA_KEY: json.dumps(asdict(vit.config))})


# ---- reading ---------------------------------------------------------------------------------------------------------


def find_weights_file(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_dir():
        for name in ("model.safetensors", "model.safetensors.index.json"):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path}: no model.safetensors in this folder; give the weights file itself")
    if not path.is_file():
        names = ", ".join(sorted(BACKBONES))
        raise UserError(f"{text}: no such file or backbone; known backbones: {names}")
    return path


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its header's metadata."""
    if path.name.endswith(".index.json"):
        shards = [_read_safetensors(path.parent / shard)[0] for shard in _shard_files(path)]
        return {name: tensor for shard in shards for name, tensor in shard.items()}, {}
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (".pth", ".pt", ".bin", ".ckpt"):
        return _read_torch(path), {}
    raise UserError(f"{path}: unknown format; weights must be .safetensors, or tensors in .pth, .pt, .bin or .ckpt")


def _shard_files(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if outside := next((shard for shard in shards if Path(shard).name != shard), None):
            raise ValueError(f"{outside[:60]!r} is not a file beside it")
        return shards
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: not an index of safetensors shards ({error})") from error


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        check_content(path, tensors, metadata, "restore it, or download it again")
        return tensors, metadata
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); is the download complete?") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a zip, pickle or format error, of several unrelated types
        text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]  # without torch's advice
        reason = re.split(r"\. | Check the documentation", text)[0][:200] or type(error).__name__
        raise UserError(
            f"{path}: not a file of plain tensors ({reason}). Sightline runs no code from files: if you trust it, "
            "load it yourself and save its state dict as safetensors"
        ) from error
    return state_dict_of(content, path)


def download_backbone(backbone: Backbone, revision: str | None) -> tuple[Path, str | None]:
    """The weights file in the hub's cache, downloaded if needed, and its commit; or the file in this package."""
    if backbone.embedded is not None:
        if revision is not None:
            raise UserError(f"{backbone.name}: included in this package; revision={revision!r} is only for the hub")
        return Path(__file__).parent / "embedded" / backbone.embedded, None
    if backbone.repository is None:
        raise UserError(
            f"{backbone.name}: not published as safetensors. {backbone.note} Then load it with like={backbone.name!r}"
        )
    path = _fetch(backbone.name, backbone.repository, backbone.file, revision or backbone.revision)
    commit = next((p.name for p in path.parents if re.fullmatch("[0-9a-f]{40}", p.name)), None)
    if path.name.endswith(".index.json"):
        for shard in _shard_files(path):
            _fetch(backbone.name, backbone.repository, shard, commit)
    return path, commit


def _fetch(name: str, repository: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import errors, hf_hub_download

    messages = {
        errors.GatedRepoError: "requires accepting its licence there and logging in with `hf auth login`",
        errors.RepositoryNotFoundError: "does not exist or is private; for a private one log in with `hf auth login`",
        errors.RevisionNotFoundError: f"has no revision {revision}",
        errors.LocalEntryNotFoundError: "is neither cached nor reachable: download it while online, "
        "use a weights FILE or sightline-nano (included) as --backbone, or `sightline pretrain` one of your own",
        errors.EntryNotFoundError: f"has no {file}",
    }  # subclasses first
    try:
        return Path(hf_hub_download(repository, file, revision=revision, local_files_only=not hub_is_known()))
    except Exception as error:  # also disk full, interrupted transfer, invalid token: of several unrelated types
        other = f"could not be downloaded ({' '.join(str(error).split())[:200]})"
        message = next((text for kind, text in messages.items() if isinstance(error, kind)), other)
        raise UserError(f"{name}: {repository} on the Hugging Face hub {message}") from error


def hub_is_known() -> bool:
    """Whether the hub's name can be resolved: without a network this says so at once, the hub's library after half a
    minute of attempts, each with a warning. A proxy resolves names itself."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies() or host.hostname is None:
        return True
    try:
        socket.getaddrinfo(host.hostname, host.port or 443)
    except OSError:
        return False
    return True


# ---- fitting ---------------------------------------------------------------------------------------------------------


def fit_weights(tensors: dict[str, Tensor], config: ViTConfig, path: Path, classes: int | None, seed: int) -> ViT:
    """A ViT of this config with these tensors, or an error that lists what does not fit."""
    config = _adapt_config(config, tensors, classes)
    check_plausible(config, elements_of(tensor.shape for tensor in tensors.values()), path)
    if classes is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD_PREFIXES)}
    with torch.random.fork_rng(devices=[]):  # loading does not change the caller's random state
        torch.manual_seed(seed)
        vit = ViT(config)
    ours = vit.state_dict()
    new_head = {name for name in ours if classes is not None and name.startswith(HEAD_PREFIXES)}
    missing = sorted(set(ours) - set(tensors) - new_head)
    unexpected = sorted(set(tensors) - set(ours))
    misshapen = [
        f"{name} is {list(tensors[name].shape)} instead of {list(ours[name].shape)}"
        for name in sorted(set(ours) & set(tensors))
        if tensors[name].shape != ours[name].shape
    ]
    if missing or unexpected or misshapen:
        problems = [
            f"{len(names)} {kind}: {', '.join(names[:6])}{', …' * (len(names) > 6)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
            if names
        ]
        raise UserError(f"{path}: does not fit. {'. '.join(problems)}. It looks like {describe_weights(tensors)}")
    vit.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=not new_head)
    return vit.eval()


def _adapt_config(config: ViTConfig, tensors: Mapping[str, Tensor], classes: int | None) -> ViTConfig:
    """Adapt what may differ between files of the same backbone: the head, and DINOv3's biases, which some omit."""
    if not any(name.endswith(".attn.qkv.bias") for name in tensors):
        config = replace(config, qkv_bias="none")
    if classes is not None:  # a new head follows the config, not the file
        return replace(config, classes=classes)
    head = tensors.get("head.weight")
    return replace(
        config,
        classes=0 if head is None else len(head),
        head_bias=config.head_bias if head is None else "head.bias" in tensors,
        head_norm="fc_norm.weight" in tensors,
    )


def config_for_file(tensors: dict[str, Tensor], metadata: dict[str, str], like: str | None, path: Path) -> ViTConfig:
    """The config of a local file: from `like`, from its header, or of the only registered backbone of its shape."""
    if like is not None:
        if like not in BACKBONES:
            raise UserError(f"like={like!r}: no such backbone; known backbones: {', '.join(sorted(BACKBONES))}")
        return BACKBONES[like].config
    if METADATA_KEY in metadata:
        return config_from_json(metadata[METADATA_KEY], path)
    shape = shape_of(tensors)
    if shape is None:
        raise UserError(f"{path}: not a known Vision Transformer. It looks like {describe_weights(tensors)}")
    candidates = {name: b.config for name, b in BACKBONES.items() if has_shape(b.config, shape)}
    if len(set(candidates.values())) == 1:
        return next(iter(candidates.values()))
    remedy = (
        "Their preprocessing differs; choose one with like=" if candidates else "Give its architecture with config="
    )
    raise UserError(f"{path}: contains {describe_weights(tensors)}. {remedy}")


def config_from_json(text: str, path: Path | str) -> ViTConfig:
    try:
        values: dict[str, Any] = json.loads(text, object_hook=_lists_to_tuples)
        values["input"] = Input(**values["input"])
        return ViTConfig(**values)
    except UserError as error:
        raise UserError(f"{path}: impossible architecture ({error})") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: its header is from another version of Sightline ({reason})") from error


def _lists_to_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def shape_of(tensors: Mapping[str, Tensor]) -> dict[str, object] | None:
    """The fields of a ViTConfig that follow from the names and shapes of tensors."""
    required = ("cls_token", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
    if any(name not in tensors for name in required):
        return None
    cls, proj, fc1, fc2 = (tensors[name] for name in required)
    hidden = fc2.shape[1]
    shape = {
        "width": cls.shape[-1],
        "depth": 1 + max(int(name.split(".")[1]) for name in tensors if re.match(r"blocks\.\d{1,6}\.", name)),
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
    derived = {
        "hidden": config.hidden or 4 * config.width,
        "gated": config.mlp == "swiglu",
        "rotary": config.positions == "rotary",
        "layer_scale": config.layer_scale is not None,
    }
    return all(derived.get(name, getattr(config, name, None)) == value for name, value in shape.items())


def describe_weights(tensors: Mapping[str, Tensor]) -> str:
    """A description of a file's architecture for error messages."""
    shape = shape_of(tensors)
    if shape is None:
        names = ", ".join(list(tensors)[:6])
        return f"{len(tensors)} tensors that are not a Vision Transformer: {names}, …"
    details = {"gated": "SwiGLU", "layer_scale": "LayerScale", "rotary": "rotary positions"}
    details |= {"pre_norm": "a norm before the blocks (CLIP)"}
    extras = [f"{shape['registers'] or 'no'} registers", *(text for key, text in details.items() if shape[key])]
    similar = ", ".join(name for name, backbone in BACKBONES.items() if has_shape(backbone.config, shape))
    architecture = f"a ViT of width {shape['width']}, {shape['depth']} blocks, patch {shape['patch']}"
    return f"{architecture}, {', '.join(extras)}" + (f" (like {similar})" if similar else "")


def weights_sha256(module: nn.Module, *, without: tuple[str, ...] = ()) -> str:
    """SHA-256 over every parameter and buffer, persistent or not: name, type, shape and content."""
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        if not name.startswith(without or ("\0",)):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
