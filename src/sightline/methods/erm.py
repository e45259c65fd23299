"""ERM: the whole picture, the whole ViT, cross-entropy. The ordinary way, and the baseline."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Erm, Train
from ..errors import UserError
from ..fingerprints import weights_sha256
from ..sight import Prediction, Sight
from ..training.context import Group, Learner, Lesson
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import config_from_json, load_backbone
from ..where.attention import cls_attention_map

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class Classifier(Learner):
    """Sees everything; its map is the attention of the last block, which explains little."""

    def __init__(self, vit: ViT, frozen: bool = False):
        super().__init__()
        self.vit, self.frozen = vit, frozen
        assert vit.head is not None, "a classifier needs a head"
        if frozen:
            vit.requires_grad_(False)
            vit.head.requires_grad_(True)

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        out, head = self.vit(images), self.vit.head
        assert head is not None, "a classifier needs a head"
        # In full precision also under autocast: a head that was fitted elsewhere must answer here as it did there.
        with torch.autocast(images.device.type, enabled=False):
            logits = head(self.vit.fc_norm(out.cls.to(head.weight.dtype)))
        return Prediction(logits, sight, out.tokens)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images)}

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        return {"loss": self.answer_loss(self.vit(lesson.images).logits, lesson.labels)}

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return backbone_groups(self.vit, head_lr)


def backbone_groups(vit: ViT, head_lr: float) -> list[Group]:
    """Matrices decay; biases, norms, tokens and positions do not; new layers learn faster."""
    named = [(name, p) for name, p in vit.named_parameters() if p.requires_grad]
    new = {name for name, _ in named if name.startswith(("head.", "fc_norm."))}

    def decays(name: str, p: nn.Parameter) -> bool:
        return p.ndim > 1 and not name.endswith(("_token", "pos_embed"))

    return [
        Group([p for name, p in named if (name in new) == fresh and decays(name, p) == decay], rate, decay)
        for fresh, rate in ((False, 1.0), (True, head_lr))
        for decay in (True, False)
    ]


def open_backbone(config: Train, classes: int) -> tuple[ViT, Input]:
    """The backbone with a new head, and what it expects of a picture at the size asked for."""
    vit = load_backbone(config.backbone, classes=classes, seed=config.seed)
    expects = vit.config.input
    patch, size = vit.config.patch, expects.size if config.size is None else (config.size, config.size)
    for side in size:
        if side < patch or side % patch:
            near = max(1, side // patch) * patch
            raise UserError(f"--size {side}: must be a multiple of {config.backbone}'s patch, {patch}, such as {near}")
    return vit, replace(expects, size=size)


def note_backbone(run: Run, vit: ViT, expects: Input, config: Train) -> None:
    """Which weights training began from, and what the model expects of a picture now."""
    origin = asdict(vit.origin) if vit.origin else {}
    if Path(config.backbone).is_file():
        with Path(config.backbone).open("rb") as file:
            origin["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    run.note(vit=asdict(replace(vit.config, input=expects)), backbone=origin or None)


def note_where(run: Run, where: ViT | None) -> None:
    """The other backbone, where one says where to look and the other what is there."""
    origin = None if where is None else asdict(where.origin) | {"weights": weights_sha256(where)[:16]}
    run.note(where=None if where is None else {"vit": asdict(where.config), "backbone": origin})


def noted_where(facts: dict[str, Any]) -> ViT | None:
    """The same again, without its weights."""
    where = facts.get("where")
    return None if where is None else ViT(config_from_json(json.dumps(where["vit"]), "run.json"))


def make_erm(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_note(config, rows, run, accelerator)
    return Classifier(vit, config.frozen), expects


def open_and_note(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[ViT, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    if accelerator.is_main_process:
        note_backbone(run, vit, expects, config)
    return vit, expects


def build_erm(vit_config: ViTConfig, _: dict[str, Any]) -> nn.Module:
    return Classifier(ViT(vit_config))
