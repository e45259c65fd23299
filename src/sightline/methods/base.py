"""What the methods share: opening a backbone, grouping parameters, and the base of all methods that discover parts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..config import Erm, Ifam, Pdiscoformer, Shaping, Train
from ..data.augment import Affine, random_affine
from ..errors import UserError
from ..sight import Method, Prediction, Sight
from ..training.context import Group, Trainable, TrainBatch
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import config_from_json, load_backbone, weights_sha256
from ..where.corrections import Correction, PartAssignment
from ..where.part_losses import shaping_losses
from ..where.parts import PartDiscovery, Parts, freeze

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run

# ---- backbones -------------------------------------------------------------------------------------------------------


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


def record_backbone(run: Run, vit: ViT, expects: Input, config: Train) -> None:
    """Which weights training began from, and what the model expects of a picture now."""
    origin = asdict(vit.origin) if vit.origin else {}
    if Path(config.backbone).is_file():
        with Path(config.backbone).open("rb") as file:
            origin["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    run.note(vit=asdict(replace(vit.config, input=expects)), backbone=origin or None)


def record_selector(run: Run, where: ViT | None) -> None:
    """The other backbone, where one says where to look and the other what is there."""
    origin = None if where is None else asdict(where.origin) | {"weights": weights_sha256(where)[:16]}
    run.note(where=None if where is None else {"vit": asdict(where.config), "backbone": origin})


def recorded_selector(facts: dict[str, Any]) -> ViT | None:
    """The same again, without its weights."""
    where = facts.get("where")
    return None if where is None else ViT(config_from_json(json.dumps(where["vit"]), "run.json"))


def open_and_record(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[ViT, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
    return vit, expects


# ---- methods that discover parts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartSettings:
    """Settings, with the preset's word where nothing else was said."""

    shaping: Shaping
    classify_parts: float
    prototype_lr: float
    share_noise: bool
    eval_noise: bool
    mask_gradient: bool
    soft: bool
    mask_dropout: float | None  # None: that of the parts

    @classmethod
    def of(cls, config: Pdiscoformer) -> PartSettings:
        published, ifam = config.preset == "published", config if isinstance(config, Ifam) else None
        shaping = config.shaping
        shaping = replace(
            shaping,
            orthogonal=shaping.orthogonal or ("channels" if published else "parts"),
            total_variation_at=(0 if published else 37)
            if shaping.total_variation_at is None
            else shaping.total_variation_at,
        )
        gradient = ifam.mask_gradient if ifam else None
        return cls(
            shaping,
            config.classify_parts,
            config.prototype_lr,
            share_noise=not published if config.share_noise is None else config.share_noise,
            eval_noise=published if config.eval_noise is None else config.eval_noise,
            mask_gradient=not (published or config.hides_pixels) if gradient is None else gradient,
            soft=ifam is not None and ifam.soft,
            mask_dropout=ifam.mask_dropout if ifam else None,
        )


@dataclass(frozen=True)
class RandomDraws:
    """All that chance decides in a step."""

    noise: Tensor  # [B, K+1, H, W], like the next two: of the maps,
    noise_moved: Tensor  # of the maps of the moved images,
    noise_mask: Tensor  # of the mask
    affine: Affine  # how images are moved
    keep_parts: Tensor  # bool [B, K]: the parts that answer
    keep_masked: Tensor  # bool [B, K]: the parts that the second stage may see


@dataclass(frozen=True)
class Found:
    """What the first stage found in B images, whatever is made of it: to look again costs, to decide again does not."""

    maps: PartAssignment  # of the whole picture
    deciding: PartAssignment  # on what may be seen: the same, but for another draw of noise, or a closer look
    windows: Tensor | None = None  # int [B, 4]: where that closer look was
    views: Tensor | None = None  # [B, 3, h, w]: and at what
    features: Tensor | None = None  # [B, D, H, W], if the answer is pooled from them

    def kept(self) -> Found:
        """On the CPU, without what can be cut out of the pictures again."""
        return replace(self, views=None).to("cpu")

    def to(self, device: torch.device | str) -> Found:
        maps = PartAssignment(*(one.to(device) for one in (self.maps.scores, self.maps.distances)))
        same = self.deciding is self.maps
        deciding = maps if same else PartAssignment(self.deciding.scores.to(device), self.deciding.distances.to(device))
        others = {name: getattr(self, name) for name in ("windows", "views", "features")}
        return Found(maps, deciding, **{k: None if v is None else v.to(device) for k, v in others.items()})

    @property
    def bytes(self) -> int:
        claims = [self.maps] if self.deciding is self.maps else [self.maps, self.deciding]
        tensors = [*(t for c in claims for t in (c.scores, c.distances)), self.windows, self.views, self.features]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PartMethod(Trainable, Method):
    """What learns to discover parts, and perhaps something more from them."""

    where: PartDiscovery
    part_count = 1  # replaced by each instance
    pools = False  # the answer is made of the first stage's own features
    looks_again = False  # closer, at a window

    def __init__(self, where: PartDiscovery, how: PartSettings):
        super().__init__()
        self.where, self.how, self.part_count = where, how, where.parts
        # What no loss reaches must not be waited for by several processes.
        where.head.requires_grad_(how.classify_parts > 0)
        where.modulation.requires_grad_(how.classify_parts > 0 or how.shaping.orthogonality > 0)

    def look(self, images: Tensor) -> Sight:
        """Every patch that is more likely of a part than of the background."""
        return self.decide(images, self.find(images))

    def find(self, images: Tensor) -> Found:
        """The costly half of looking."""
        parts, scores = self.discover(images)
        maps = PartAssignment.of(parts, parts.scores)
        deciding = maps if scores is parts.scores else PartAssignment.of(parts, scores)
        return Found(maps, deciding, features=parts.features if self.pools else None)

    def again(self, images: Tensor, found: Found) -> Found:  # noqa: ARG002 (only a closer look needs them)
        """What was kept of it, with all that deciding needs of the pictures."""
        return found

    def decide(self, images: Tensor, found: Found, correction: Correction | None = None) -> Sight:  # noqa: ARG002
        """The cheap half: what may be seen, perhaps not as the first stage would have it."""
        correction = correction or Correction()
        return Sight(keep=correction.keep(found.deciding), parts=correction.shares(found.maps))

    def answer(self, images: Tensor, found: Found, correction: Correction | None = None) -> Prediction:
        return self.judge(images, self.decide(images, found, correction))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        raise NotImplementedError

    def discover(self, images: Tensor) -> tuple[Parts, Tensor]:
        """In evaluation: the parts, and the scores that decide what is kept. The same ones, without noise, unless the
        published code is followed to the letter; and then at least with the same noise every time."""
        if not self.how.eval_noise:
            parts = self.where.discover(images)
            return parts, parts.scores
        generator = torch.Generator(images.device).manual_seed(0)
        parts = self.where.discover(images, noise=self.where.draw_noise(images, generator))
        if self.how.share_noise:
            return parts, parts.scores
        return parts, self.where.scores(parts.logits, self.where.draw_noise(images, generator))

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)

    def draw(self, lesson: TrainBatch) -> RandomDraws:
        where, images, (h, w) = self.where, lesson.images, lesson.images.shape[2:]
        noise = where.draw_noise(images)
        return RandomDraws(
            noise=noise,
            affine=random_affine((h, w), seed=lesson.when.seed, step=lesson.when.number),
            noise_moved=where.draw_noise(images),
            noise_mask=noise if self.how.share_noise else where.draw_noise(images),
            keep_parts=where.draw_keep_parts(images),
            keep_masked=where.draw_keep_parts(images, self.how.mask_dropout),
        )

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        losses = self.losses(lesson.images, lesson.labels, self.draw(lesson))
        return {"loss": torch.stack(list(losses.values())).sum()} | losses

    def losses(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> dict[str, Tensor]:
        return self.discovery(images, labels, draws)[1]

    def discovery(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> tuple[Parts, dict[str, Tensor]]:
        """The parts, and the losses that make them parts."""
        where, how = self.where, self.how
        parts, unwarped = where.discover(images, noise=draws.noise), None
        if how.shaping.equivariance:
            unwarped = where.discover_moved(images, draws.affine, noise=draws.noise_moved)
        embeddings = where.embed(parts)
        losses = shaping_losses(parts, embeddings, unwarped, how.shaping)
        if how.classify_parts:
            answer = self.classification_loss(where.class_logits(embeddings, draws.keep_parts), labels)
            losses["parts"] = how.classify_parts * answer
        return parts, losses

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return [*backbone_groups(self.where.vit, head_lr), *self.where.part_groups(head_lr, self.how.prototype_lr)]


def part_method(method: Method, name: str) -> PartMethod:
    """The method as one that discovers parts, which it must be."""
    if not method.part_count:
        raise UserError(f"{name}: discovers no parts to intervene in; ifam and pdiscoformer do")
    return cast(PartMethod, method)


def selector(vit: ViT, config: Pdiscoformer, classes: int, size: int | None = None) -> PartDiscovery:
    """Part discovery on this backbone, whose head is left behind."""
    bare = resembling(vit, replace(vit.config, classes=0, registers=vit.config.registers * config.registers))
    if config.tune_selector != "all":
        freeze(bare, tokens=config.tune_selector == "nothing")
    return PartDiscovery(
        bare,
        config.parts,
        classes,
        dropout=config.part_dropout,
        size=size,
        seed=config.seed,
    )


def resembling(vit: ViT, config: ViTConfig, seed: int = 0) -> ViT:
    """Another ViT with the same weights, as far as it has them; a head is new."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        other = ViT(config)
    own = other.state_dict()
    same = {name: tensor for name, tensor in vit.state_dict().items() if name in own and not name.startswith("head.")}
    other.load_state_dict(own | same)
    other.origin = vit.origin
    return other


def check_hopeless_parts(config: Pdiscoformer, accelerator: Accelerator, *, taught_by_answer: bool = False) -> None:
    shaped = replace(config.shaping, orthogonal=None, total_variation_at=None) != Shaping.none()
    for wrong, complaint in (
        (config.parts < 1, f"--parts {config.parts}: must be at least 1"),
        (not 0 <= config.part_dropout < 1, f"--part-dropout {config.part_dropout}: must be at least 0 and below 1"),
        (
            not (shaped or config.classify_parts or taught_by_answer),
            "nothing would teach where to look: leave --classify-parts, a --shaping loss or the mask's gradient on",
        ),
    ):
        if wrong:
            raise UserError(complaint)
    if config.accumulate > 1 and config.shaping.presence and accelerator.is_main_process:
        print("note: with --accumulate, every part has to be present in each piece of a batch, not only in the whole")


def check_odd_look(looked: int | None, vit: ViT, expects: Input) -> None:
    """Parts found in another size must still be whole cells of the picture."""
    patch = vit.config.patch
    for length in expects.size:
        if not fits(length, looked or length, patch):
            near = patch * max(n for n in range(1, length + 1) if length % n == 0 and n * patch <= 2 * length)
            said = f"--look-size {looked}" if looked else f"--size {length}"
            raise UserError(f"{said}: the {patch}-pixel patches of parts must divide it; --look-size, such as {near}")


def fits(length: int, side: int, patch: int) -> bool:
    """Whether the patches of a side are whole cells of a picture so long."""
    return side >= patch and side % patch == 0 and length % (side // patch) == 0
