"""PDiscoFormer: parts are discovered, pooled and classified. Its maps are soft and late, so it is not blind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Pdiscoformer, Shaping
from ..data.augment import Affine, random_affine
from ..errors import UserError
from ..sight import Prediction, Sight
from ..training.context import Group, Learner, Lesson
from ..vit.model import Input, ViT, ViTConfig
from ..where.corrections import Claims, Correction
from ..where.part_losses import shaping_losses
from ..where.parts import PartDiscovery, Parts, freeze
from .erm import backbone_groups, note_backbone, open_backbone

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class How:
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
    def of(cls, config: dict[str, Any]) -> How:
        published = config["preset"] == "published"
        said = {name: config.get(name) for name in ("share_noise", "eval_noise", "mask_gradient")}
        taught = not (published or exact(config))
        preset = {"share_noise": not published, "eval_noise": published, "mask_gradient": taught}
        shaping = Shaping(**config["shaping"])
        shaping = replace(
            shaping,
            orthogonal=shaping.orthogonal or ("channels" if published else "parts"),
            total_variation_at=(0 if published else 37)
            if shaping.total_variation_at is None
            else shaping.total_variation_at,
        )
        return cls(
            shaping, config["classify_parts"], config["prototype_lr"], soft=config.get("soft", False),
            mask_dropout=config.get("mask_dropout"),
            **{name: preset[name] if value is None else value for name, value in said.items()},
        )  # fmt: skip


def exact(config: dict[str, Any]) -> bool:
    """Whether pixels are hidden, or whole patches; a run made before there was a choice hides patches."""
    patches = config["preset"] == "published" or config.get("soft", False)
    return (config.get("sight", "patches") or ("patches" if patches else "pixels")) == "pixels"


@dataclass(frozen=True)
class Draws:
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

    maps: Claims  # of the whole picture
    deciding: Claims  # on what may be seen: the same, but for another draw of noise, or a closer look
    windows: Tensor | None = None  # int [B, 4]: where that closer look was
    views: Tensor | None = None  # [B, 3, h, w]: and at what
    features: Tensor | None = None  # [B, D, H, W], if the answer is pooled from them

    def kept(self) -> Found:
        """On the CPU, without what can be cut out of the pictures again."""
        return replace(self, views=None).to("cpu")

    def to(self, device: torch.device | str) -> Found:
        maps = Claims(*(one.to(device) for one in (self.maps.scores, self.maps.distances)))
        same = self.deciding is self.maps
        deciding = maps if same else Claims(self.deciding.scores.to(device), self.deciding.distances.to(device))
        others = {name: getattr(self, name) for name in ("windows", "views", "features")}
        return Found(maps, deciding, **{k: None if v is None else v.to(device) for k, v in others.items()})

    @property
    def bytes(self) -> int:
        claims = [self.maps] if self.deciding is self.maps else [self.maps, self.deciding]
        tensors = [*(t for c in claims for t in (c.scores, c.distances)), self.windows, self.views, self.features]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PartLearner(Learner):
    """What learns to discover parts, and perhaps something more from them."""

    where: PartDiscovery
    pools = False  # the answer is made of the first stage's own features
    looks_again = False  # closer, at a window

    def __init__(self, where: PartDiscovery, how: How):
        super().__init__()
        self.where, self.how = where, how
        # What no loss reaches must not be waited for by several processes.
        where.head.requires_grad_(how.classify_parts > 0)
        where.modulation.requires_grad_(how.classify_parts > 0 or how.shaping.orthogonality > 0)

    def look(self, images: Tensor) -> Sight:
        """Every patch that is more likely of a part than of the background."""
        return self.decide(images, self.find(images))

    def find(self, images: Tensor) -> Found:
        """The costly half of looking."""
        parts, scores = self.discover(images)
        maps = Claims.of(parts, parts.scores)
        deciding = maps if scores is parts.scores else Claims.of(parts, scores)
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

    def draw(self, lesson: Lesson) -> Draws:
        where, images, (h, w) = self.where, lesson.images, lesson.images.shape[2:]
        noise = where.draw_noise(images)
        return Draws(
            noise=noise,
            affine=random_affine((h, w), seed=lesson.when.seed, step=lesson.when.number),
            noise_moved=where.draw_noise(images),
            noise_mask=noise if self.how.share_noise else where.draw_noise(images),
            keep_parts=where.draw_keep_parts(images),
            keep_masked=where.draw_keep_parts(images, self.how.mask_dropout),
        )

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        losses = self.losses(lesson.images, lesson.labels, self.draw(lesson))
        return {"loss": torch.stack(list(losses.values())).sum()} | losses

    def losses(self, images: Tensor, labels: Tensor, draws: Draws) -> dict[str, Tensor]:
        return self.discovery(images, labels, draws)[1]

    def discovery(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Parts, dict[str, Tensor]]:
        """The parts, and the losses that make them parts."""
        where, how = self.where, self.how
        parts, unwarped = where.discover(images, noise=draws.noise), None
        if how.shaping.equivariance:
            unwarped = where.discover_moved(images, draws.affine, noise=draws.noise_moved)
        embeddings = where.embed(parts)
        losses = shaping_losses(parts, embeddings, unwarped, how.shaping)
        if how.classify_parts:
            answer = self.answer_loss(where.class_logits(embeddings, draws.keep_parts), labels)
            losses["parts"] = how.classify_parts * answer
        return parts, losses

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return [*backbone_groups(self.where.vit, head_lr), *self.where.part_groups(head_lr, self.how.prototype_lr)]


class PDiscoFormer(PartLearner):
    """Answers from the parts' embeddings, which have seen everything."""

    blind = False
    pools = True
    heeds_sight = False  # `judge` discovers the parts itself, so that looking before is in vain

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        parts, _ = self.discover(images)
        return Prediction(self.where.class_logits(self.where.embed(parts)), sight)

    def answer(self, images: Tensor, found: Found, correction: Correction | None = None) -> Prediction:
        """Too distant patches are pooled with the background; then, dropped parts do not answer."""
        correction, scores = correction or Correction(), found.maps.scores
        assert found.features is not None
        shares = replace(correction, drop=()).shares(found.maps)
        embeddings = self.where.embed(Parts(found.features, scores, scores, shares))
        answering = [part for part in range(self.where.parts) if part not in correction.drop]
        logits = self.where.part_scores(embeddings)[:, :, answering].mean(dim=2)
        return Prediction(logits, self.decide(images, found, correction))


def selector(vit: ViT, config: dict[str, Any], classes: int) -> PartDiscovery:
    """Part discovery on this backbone, whose head is left behind."""
    bare = resembling(vit, replace(vit.config, classes=0, registers=vit.config.registers * config["registers"]))
    if config["tune_selector"] not in ("all", True):  # True: what runs called it before there were three choices
        freeze(bare, tokens=config["tune_selector"] == "nothing")
    return PartDiscovery(
        bare,
        config["parts"],
        classes,
        dropout=config["part_dropout"],
        size=config.get("look_size"),
        seed=config["seed"],
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


def refuse_hopeless_parts(config: Pdiscoformer, accelerator: Accelerator, *, taught_by_answer: bool = False) -> None:
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


def refuse_odd_look(looked: int | None, vit: ViT, expects: Input) -> None:
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


def make_pdiscoformer(config: Pdiscoformer, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    refuse_hopeless_parts(config, accelerator)
    vit, expects = open_backbone(config, 0)
    refuse_odd_look(config.look_size, vit, expects)
    if accelerator.is_main_process:
        note_backbone(run, vit, expects, config)
    settings = asdict(config)
    return PDiscoFormer(selector(vit, settings, len(rows.classes)), How.of(settings)), expects


def build_pdiscoformer(vit_config: ViTConfig, facts: dict[str, Any]) -> nn.Module:
    settings, classes = facts["config"], len(facts["data"]["classes"])
    return PDiscoFormer(selector(ViT(vit_config), settings, classes), How.of(settings))
