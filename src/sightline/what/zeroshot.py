"""Zero-shot CLIP: predicts the class whose text embedding is nearest to the embedding of what may be seen.

    clip = open_clip("laion/CLIP-ViT-L-14-laion2B-s32B-b82K")                      # the text tower needs transformers
    what = ZeroShot(clip.vit, (224, 224), clip.class_embeddings(["cat", "dog"], ["a photo of a {}"]), clip.scale)

Afterwards only `what` is needed: one of our ViTs and an embedding for each class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..sight import Prediction, Sight
from ..vit.backbones import BACKBONES, BY_REPOSITORY
from ..vit.key_names import to_our_names
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import Origin, fit_weights
from .probe import crop_and_resize

BILINEAR = 2  # Pillow's number, as files have it


class ZeroShot(nn.Module):
    """Predicts by cosine similarity with the text embedding of each class (CLIP, sec. 3.1.2). Hidden pixels have the
    mean colour; with a box, only that is seen, resized to `size`. The ViT's head is CLIP's projection.
    """

    blind = True

    text: Tensor
    scale: Tensor

    def __init__(self, vit: ViT, size: tuple[int, int], text: Tensor, scale: float = 1.0):
        super().__init__()
        assert vit.head is not None, "the head of a CLIP ViT is its projection"
        self.vit, self.size = vit, size
        self.register_buffer("text", text)  # [C, P], normalised
        self.register_buffer("scale", torch.tensor(scale))

    def embed(self, images: Tensor, sight: Sight) -> Tensor:
        """[B, D]: the CLS token, before the projection."""
        if sight.boxes is not None and sight.boxes.shape[1] != 1:
            raise ValueError(f"CLIP sees one box per image, and the sight has {sight.boxes.shape[1]}")
        if sight.keep is not None or sight.keep_pixels is not None:
            visible = sight.visible(tuple(images.shape[-2:]))
            images = torch.where(visible[:, None], images, self.vit.mean.to(images.dtype))
        if sight.boxes is not None:
            images = crop_and_resize(images, sight.boxes[:, 0], self.size)
        return self.vit(images).cls

    def logits_of(self, tokens: Tensor) -> Tensor:
        """Class logits [B, C] from CLS tokens; in full precision also under autocast, since cosines differ by
        little."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self.scale * F.normalize(project_tokens(self.vit, tokens), dim=-1) @ self.text.T

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        tokens = self.embed(images, sight)
        return Prediction(self.logits_of(tokens), sight, tokens[:, None])

    def extra_repr(self) -> str:
        return f"size={self.size}"


def project_tokens(vit: ViT, tokens: Tensor) -> Tensor:
    """Tokens projected into CLIP's joint embedding space."""
    assert vit.head is not None
    return vit.head(tokens.to(vit.head.weight.dtype))


# ---- class names -----------------------------------------------------------------------------------------------------


def readable_class_name(name: str) -> str:
    """`Black footed Albatross` from `001.Black_footed_Albatross`, `dog` from `00_dog`."""
    return " ".join(re.sub(r"^\d+[._\s-]+(?=.*[^\W\d_])", "", name).replace("_", " ").split())


def clip_class_names(classes: Sequence[str], file: Path | None) -> list[str]:
    """The class names for the prompts: those in `file`, else `readable_class_name`."""
    given = {} if file is None else read_class_names(file)
    if unknown := sorted(set(given) - set(classes)):
        raise UserError(f"{file}: the dataset has no class {unknown[0]!r}; it has {', '.join(classes[:8])}")
    names = [given.get(name) or readable_class_name(name) for name in classes]
    if numbers := [name for name in names if not re.search(r"[^\W\d_]", name)]:
        raise UserError(f"class {numbers[0]!r}: no name that CLIP could read; give one with --class-names FILE.json")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two classes have the name {twice[0]!r}; give different names with --class-names FILE.json")
    return names


def read_class_names(file: Path) -> dict[str, str]:
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f'{file}: must map classes to names: {{"CLASS": "name"}}')
    return names


@dataclass(frozen=True)
class Clip:
    """CLIP: the image tower is one of our ViTs, with the projection as its head; the text tower is of transformers."""

    vit: ViT
    scale: float  # logit scale: the inverse temperature of cosines
    model: Any
    tokenizer: Any

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """[n, P]: normalised text embeddings."""
        tokens = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        most, length = self.model.config.text_config.max_position_embeddings, tokens["input_ids"].shape[1]
        if length > most:
            raise UserError(
                f"{max(texts, key=len)!r}: {length} tokens, and this CLIP reads at most {most}; shorten the prompt"
            )
        out = self.model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return F.normalize(self.model.text_projection(out.pooler_output), dim=-1)

    def class_embeddings(self, names: Sequence[str], prompts: Sequence[str]) -> Tensor:
        """[C, P]: prompt ensembling (CLIP, sec. 3.1.4): per name the normalised mean of the prompts' embeddings."""
        if not prompts:
            raise UserError('--prompts: give at least one, such as "a photo of a {}"')
        if wrong := [prompt for prompt in prompts if prompt.count("{}") != 1]:
            raise UserError(f"--prompts {wrong[0]!r}: needs {{}} exactly once, where the class name goes")
        per_prompt = [self.embed([prompt.replace("{}", name) for name in names]) for prompt in prompts]
        return F.normalize(torch.stack(per_prompt).mean(dim=0), dim=-1)


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_clip(name: str) -> Clip:
    """CLIP from a folder, from the Hugging Face hub, or by one of our names for models there."""
    check_clip_name(name)
    try:
        import transformers
    except ImportError:
        raise UserError(f"--clip {name}: needs transformers: pip install 'sightline[clip]'") from None

    known = BACKBONES.get(name) or BY_REPOSITORY.get(name)
    place, revision = (known.repository or name, known.revision or "main") if known else (name, "main")
    try:
        config = transformers.AutoConfig.from_pretrained(place, revision=revision)
        if config.model_type != "clip":
            raise UserError(f"--clip {name}: is a {config.model_type}, not a CLIP")
        model = transformers.CLIPModel.from_pretrained(place, revision=revision).float().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, revision=revision)
        shipped = transform_of(place, revision)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises for unreadable models
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--clip {name}: transformers cannot read it as a CLIP ({reason})") from error
    vit_config = image_tower(model.config.vision_config, name)
    vit_config = replace(vit_config, input=replace(shipped, size=vit_config.input.size))
    vit = fit_weights(to_our_names(model.state_dict()), vit_config, Path(place), None, 0)
    repository = None if Path(place).is_dir() else place
    commit = getattr(model.config, "_commit_hash", None)
    vit.origin = Origin(known.name if known else None, Path(place).name, repository, commit)
    return Clip(vit, float(model.logit_scale.detach().exp()), model, tokenizer)


def check_clip_name(name: str) -> None:
    """Fails at once, without asking the hub, which may take long."""
    clips = [known for known in BACKBONES.values() if known.config.pre_norm]
    ours = [clip for clip in clips if not str(clip.repository).startswith("timm/")]  # which have no text towers
    known = BACKBONES.get(name) or BY_REPOSITORY.get(name)
    if known in ours or (known is None and ("/" in name or Path(name).is_dir())):
        return
    wrong = "no CLIP has this name" if known is None else "is not a CLIP with a text tower"
    names = ", ".join(each.name for each in ours)
    raise UserError(f"--clip {name}: {wrong}; choose {names}, a folder, or a repository on the hub (OWNER/NAME)")


def image_tower(theirs: Any, name: str) -> ViTConfig:
    """Their image tower as one of our ViTs."""
    if theirs.hidden_act not in ("gelu", "quick_gelu"):
        raise UserError(f"--clip {name}: its image tower has {theirs.hidden_act}, which Sightline's ViT does not have")
    side = theirs.image_size // theirs.patch_size
    return ViTConfig(
        width=theirs.hidden_size, depth=theirs.num_hidden_layers, heads=theirs.num_attention_heads,
        patch=theirs.patch_size, grid=(side, side), hidden=theirs.intermediate_size, mlp=theirs.hidden_act,
        norm_eps=theirs.layer_norm_eps, pre_norm=True, patch_bias=False, head_bias=False,
        input=Input((theirs.image_size, theirs.image_size)),
    )  # fmt: skip


def transform_of(place: str, revision: str) -> Input:
    """The preprocessing shipped with the weights: CLIPs differ in mean and standard deviation."""
    from transformers.utils.hub import cached_file

    path = cached_file(place, "preprocessor_config.json", revision=revision)
    assert path is not None, "cached_file raises if there is none"
    shipped = json.loads(Path(path).read_text(encoding="utf-8"))
    short, cut = side_of(shipped["size"]), side_of(shipped.get("crop_size", shipped["size"]))
    return Input(
        mean=tuple(shipped["image_mean"]), std=tuple(shipped["image_std"]), crop=cut / short,
        resample="bilinear" if shipped.get("resample") == BILINEAR else "bicubic",
    )  # fmt: skip


def side_of(size: Any) -> int:
    return size if isinstance(size, int) else size.get("shortest_edge") or size["height"]
