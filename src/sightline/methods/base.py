"""What the methods share: opening a backbone, parameter groups, and the base of all methods that discover parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from ..config import Erm, Ifam, Pdiscoformer, Shaping, Train
from ..console.terminal import say
from ..data.augment import Affine, random_affine
from ..errors import UserError
from ..metrics.coverage import PLAUSIBLE_COVERAGE, mean_coverage
from ..sight import Method, Prediction, Sight
from ..training.trainable import ParameterGroup, Trainable, TrainBatch, TrainContext
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import config_from_json, load_backbone, weights_sha256
from ..where.corrections import Correction, PartAssignment
from ..where.part_losses import shaping_losses
from ..where.parts import PartDiscovery, Parts, freeze
from .clustering import Teacher, start_by_clustering

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.batches import Batches
    from ..data.rows import Rows
    from ..training.run_folder import Run


# ---- backbones -------------------------------------------------------------------------------------------------------


def backbone_groups(vit: ViT, head_lr_factor: float) -> list[ParameterGroup]:
    """Parameter groups of a ViT: weight decay for matrices only (not for biases, norms, tokens and position
    embeddings); new layers (head, fc_norm) have the learning rate times `head_lr_factor`."""
    named = [(name, p) for name, p in vit.named_parameters() if p.requires_grad]
    new = {name for name, _ in named if name.startswith(("head.", "fc_norm."))}

    def decays(name: str, p: nn.Parameter) -> bool:
        return p.ndim > 1 and not name.endswith(("_token", "pos_embed"))

    return [
        ParameterGroup([p for name, p in named if (name in new) == is_new and decays(name, p) == decay], rate, decay)
        for is_new, rate in ((False, 1.0), (True, head_lr_factor))
        for decay in (True, False)
    ]


def open_backbone(config: Train, classes: int) -> tuple[ViT, Input]:
    """The backbone with a new head for `classes`, and its input at the configured image size."""
    vit = load_backbone(config.backbone, classes=classes, seed=config.seed)
    return vit, fitted_input(resized_input(vit, config.size, config.backbone), config.fit)


def resized_input(vit: ViT, side: int | None, name: str) -> Input:
    """The input a ViT expects, with images of side × side pixels where `--size` is given."""
    expects, patch = vit.config.input, vit.config.patch
    size = expects.size if side is None else (side, side)
    for length in size:
        if length < patch or length % patch:
            near = max(1, length // patch) * patch
            raise UserError(f"--size {length}: must be a multiple of {name}'s patch, {patch}, such as {near}")
    return replace(expects, size=size)


def fitted_input(expects: Input, fit: Literal["crop", "squash"] | None) -> Input:
    """With images cropped or squashed as `--fit` says; a squashed image is not cropped at all."""
    if fit is None:
        return expects
    return replace(expects, fit=fit, crop=1.0 if fit == "squash" else expects.crop)


def record_backbone(run: Run, vit: ViT, expects: Input, config: Train) -> None:
    """Write to run.json which weights training starts from, and the input that the model expects now."""
    origin = asdict(vit.origin) if vit.origin else {}
    if Path(config.backbone).is_file():
        with Path(config.backbone).open("rb") as file:
            origin["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    run.note(vit=asdict(replace(vit.config, input=expects)), backbone=origin or None)


def record_selector(run: Run, where: ViT | None) -> None:
    """Write to run.json the selector's backbone, where it is another one than the predictor's."""
    origin = None if where is None else asdict(where.origin) | {"weights": weights_sha256(where)[:16]}
    run.note(where=None if where is None else {"vit": asdict(where.config), "backbone": origin})


def recorded_selector(facts: dict[str, Any]) -> ViT | None:
    """The selector's backbone that `record_selector` wrote, without its weights."""
    where = facts.get("where")
    return None if where is None else ViT(config_from_json(json.dumps(where["vit"]), "run.json"))


def open_and_record(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[ViT, Input]:
    """`open_backbone` with a head for the dataset's classes, recorded in run.json."""
    vit, expects = open_backbone(config, len(rows.classes))
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
    return vit, expects


def copy_vit(vit: ViT, config: ViTConfig, seed: int = 0) -> ViT:
    """A new ViT of this configuration with the weights of `vit` where names agree; its head is initialised anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        copy = ViT(config)
    own = copy.state_dict()
    same = {name: tensor for name, tensor in vit.state_dict().items() if name in own and not name.startswith("head.")}
    copy.load_state_dict(own | same)
    copy.origin = vit.origin
    return copy


# ---- methods that discover parts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartSettings:
    """The part settings of a configuration; what it leaves open is decided by its preset."""

    shaping: Shaping
    classify_parts: float
    prototype_lr_factor: float
    share_noise: bool  # one Gumbel draw for part maps and mask, instead of two
    eval_noise: bool  # Gumbel noise in evaluation too, as in the published code
    mask_gradient: bool  # straight-through gradient from stage 2 to stage 1
    soft_mask: bool  # iFAM's ablation: patches are weighted, not hidden
    mask_dropout: float | None  # part dropout of the mask; None: the same as that of the part classifier
    clusters: bool = False  # stage 1 is found by clustering before training, and stays as it is

    @classmethod
    def of(cls, config: Pdiscoformer) -> PartSettings:
        published, ifam = config.preset == "published", config if isinstance(config, Ifam) else None
        shaping, at = config.shaping, config.shaping.total_variation_grid
        gradient = ifam.mask_gradient if ifam else None
        return cls(
            replace(
                shaping,
                orthogonality_over=shaping.orthogonality_over or ("channels" if published else "parts"),
                total_variation_grid=at if at is not None else 0 if published else 37,
            ),
            config.classify_parts,
            config.prototype_lr_factor,
            share_noise=not published if config.share_noise is None else config.share_noise,
            eval_noise=published if config.eval_noise is None else config.eval_noise,
            mask_gradient=not (published or config.masks_pixels) if gradient is None else gradient,
            soft_mask=ifam is not None and ifam.soft_mask,
            mask_dropout=ifam.mask_dropout if ifam else None,
            clusters=config.clusters,
        )


@dataclass(frozen=True)
class RandomDraws:
    """All random draws of a training step."""

    noise: Tensor  # Gumbel noise [B, K+1, H, W], like the next two: of the part maps,
    noise_moved: Tensor  # of the part maps of the transformed images,
    noise_mask: Tensor  # of the mask
    affine: Affine  # the transformation of the equivariance loss
    keep_parts: Tensor  # bool [B, K]: part dropout of the part classifier
    keep_masked: Tensor  # bool [B, K]: part dropout of the mask that stage 2 sees


@dataclass(frozen=True)
class PartDetections:
    """What stage 1 detected in B images. Detecting is costly; making a sight of detections is cheap, so interventions
    are tried many times on detections made once."""

    maps: PartAssignment  # of the whole image: the part maps
    mask_assignment: PartAssignment  # decides the mask: `maps`, or of another noise draw or of the refined look
    windows: Tensor | None = None  # int [B, 4]: the windows of the refined look
    views: Tensor | None = None  # [B, 3, h, w]: the enlarged windows
    features: Tensor | None = None  # [B, D, H, W], if the prediction is pooled from them

    def for_cache(self) -> PartDetections:
        """On the CPU, without the views, which `PartMethod.restore_views` makes again from the images."""
        return replace(self, views=None).to("cpu")

    def to(self, device: torch.device | str) -> PartDetections:
        maps = self.maps.to(device)
        mask_assignment = maps if self.mask_assignment is self.maps else self.mask_assignment.to(device)
        others = {name: getattr(self, name) for name in ("windows", "views", "features")}
        moved = {name: None if value is None else value.to(device) for name, value in others.items()}
        return PartDetections(maps, mask_assignment, **moved)

    @property
    def bytes(self) -> int:
        assignments = [self.maps] if self.mask_assignment is self.maps else [self.maps, self.mask_assignment]
        tensors = [tensor for each in assignments for tensor in (each.scores, each.distances)]
        tensors += [each for each in (self.windows, self.views, self.features) if each is not None]
        return sum(tensor.nbytes for tensor in tensors)


class PartMethod(Trainable, Method):
    """A method with a stage 1 that discovers K parts, `where`; the base of iFAM and PDiscoFormer."""

    where: PartDiscovery
    part_count = 1  # replaced by each instance
    pools = False  # the prediction is pooled from the features of stage 1
    refines = False  # stage 1 looks a second time, at an enlarged window
    hides_pixels = False  # the sight is exact to the pixel, not to the patch
    teacher: Teacher | None = None  # finds the foreground before training, if stage 1 is found by clustering

    def __init__(self, where: PartDiscovery, settings: PartSettings):
        super().__init__()
        self.where, self.settings, self.part_count = where, settings, where.parts
        # Distributed training waits for the gradient of every trainable parameter, so those without a loss are frozen.
        learned = not settings.clusters
        where.prototypes.requires_grad_(learned)
        where.head.requires_grad_(learned and settings.classify_parts > 0)
        where.modulation.requires_grad_(learned and (settings.classify_parts > 0 or settings.shaping.orthogonality > 0))

    def look(self, images: Tensor) -> Sight:
        """Every patch that more likely belongs to a part than to the background."""
        return self.sight_from(images, self.detect(images))

    def detect(self, images: Tensor) -> PartDetections:
        """Stage 1, the costly half of `look`."""
        parts, scores = self.discover(images)
        maps = PartAssignment.of(parts, parts.scores)
        mask_assignment = maps if scores is parts.scores else PartAssignment.of(parts, scores)
        return PartDetections(maps, mask_assignment, features=parts.features if self.pools else None)

    def restore_views(self, images: Tensor, found: PartDetections) -> PartDetections:  # noqa: ARG002 (for those that refine)
        """Cached detections, with the views that `PartDetections.for_cache` left out."""
        return found

    def sight_from(self, images: Tensor, found: PartDetections, correction: Correction | None = None) -> Sight:  # noqa: ARG002
        """The cheap half of `look`: detections, perhaps corrected by an intervention, as a sight."""
        correction = correction or Correction()
        return Sight(keep=correction.keep(found.mask_assignment), parts=correction.probabilities(found.maps))

    def predict_from(self, images: Tensor, found: PartDetections, correction: Correction | None = None) -> Prediction:
        """Predict from detections, perhaps corrected by an intervention."""
        return self.judge(images, self.sight_from(images, found, correction))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        raise NotImplementedError

    def discover(self, images: Tensor) -> tuple[Parts, Tensor]:
        """In evaluation: the parts, and the scores that decide the mask. Without Gumbel noise both are the same; with
        `eval_noise` (the published behaviour) the noise is at least the same at every call."""
        if not self.settings.eval_noise:
            parts = self.where.discover(images)
            return parts, parts.scores
        generator = torch.Generator(images.device).manual_seed(0)
        parts = self.where.discover(images, noise=self.where.draw_noise(images, generator))
        if self.settings.share_noise:
            return parts, parts.scores
        return parts, self.where.scores(parts.logits, self.where.draw_noise(images, generator))

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)

    def look_with_maps(self, images: Tensor) -> tuple[Sight, dict[str, Tensor]]:
        sight = self.look(images)
        if sight.parts is None or self.settings.eval_noise:  # the noise is in the sight, not in the maps
            return sight, self.maps(images)
        return sight, self.where.named_maps(sight.parts)

    # ---- training ----------------------------------------------------------------------------------------------------

    def prepare(self, context: TrainContext, train: Callable[[Train], Path]) -> None:  # noqa: ARG002 (nothing to train)
        """Find foreground and parts by clustering the patch tokens of some training images, if so configured."""
        teacher, self.teacher = self.teacher, None
        if teacher is None or context.run.last.exists():
            return
        facts = start_by_clustering(self.where, teacher, context)
        if context.accelerator.is_main_process:
            context.run.note(foreground=facts)
            covers = facts["coverage"]
            say(f"Stage 1 by clustering: the foreground covers {covers:.0%} of {facts['images']} training images")
            if not PLAUSIBLE_COVERAGE[0] <= covers <= PLAUSIBLE_COVERAGE[1]:
                say(
                    "note: that is hardly an object, so the selector has probably failed; try --selector learned, "
                    "another --selector-size, or early-mask with masks that are given or made by U2-Net"
                )

    def draw(self, batch: TrainBatch) -> RandomDraws:
        where, images, (h, w) = self.where, batch.images, batch.images.shape[2:]
        noise = where.draw_noise(images)
        return RandomDraws(
            noise=noise,
            affine=random_affine((h, w), seed=batch.info.seed, step=batch.info.number),
            noise_moved=where.draw_noise(images),
            noise_mask=noise if self.settings.share_noise else where.draw_noise(images),
            keep_parts=where.draw_keep_parts(images),
            keep_masked=where.draw_keep_parts(images, self.settings.mask_dropout),
        )

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        losses = self.losses(batch.images, batch.labels, self.draw(batch))
        return {"loss": torch.stack(list(losses.values())).sum()} | losses

    def losses(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> dict[str, Tensor]:
        return self.discovery(images, labels, draws)[1]

    def discovery(self, images: Tensor, labels: Tensor, draws: RandomDraws) -> tuple[Parts, dict[str, Tensor]]:
        """Stage 1 in training: the parts, the losses that shape them, and the loss of the part classifier."""
        where, settings = self.where, self.settings
        if settings.clusters:  # nothing of stage 1 is trained
            with torch.no_grad():
                return where.discover(images, noise=draws.noise), {}
        parts, unwarped = where.discover(images, noise=draws.noise), None
        if settings.shaping.equivariance:
            unwarped = where.discover_transformed(images, draws.affine, noise=draws.noise_moved)
        embeddings = where.embed(parts)
        losses = shaping_losses(parts, embeddings, unwarped, settings.shaping)
        if settings.classify_parts:
            loss = self.classification_loss(where.class_logits(embeddings, draws.keep_parts), labels)
            losses["parts"] = settings.classify_parts * loss
        return parts, losses

    def validate(self, val_batches: Batches, context: TrainContext, select: str) -> dict[str, float]:
        """Also the mean and spread of the visible fraction, with a warning if that is hardly an object."""
        metrics, indices = super().validate(val_batches, context, select), context.rows.split_indices("val")
        mean, spread = mean_coverage(self, context.rows, indices, context.expects, context.accelerator)
        low, high = PLAUSIBLE_COVERAGE
        if context.accelerator.is_main_process and not low <= mean <= high:
            what = "hardly an object" if mean < low else "nearly everything"
            say(
                f"warning: the model sees {mean:.1%} of the image on average, {what}; if that stays, stop and try "
                "another --selector-size, --seed or backbone, or early-mask with given masks"
            )
        return metrics | {"coverage": round(mean, 6), "coverage_sd": round(spread, 6)}

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        return [
            *backbone_groups(self.where.vit, head_lr_factor),
            *self.where.part_groups(head_lr_factor, self.settings.prototype_lr_factor),
        ]


def part_method(method: Method, name: str) -> PartMethod:
    """The method as a `PartMethod`; a user's error if it has no parts."""
    if not method.part_count:
        raise UserError(f"{name}: discovers no parts to intervene on; ifam and pdiscoformer do")
    return cast(PartMethod, method)


def make_selector(
    vit: ViT, config: Pdiscoformer, classes: int, size: int | None = None, depth: int | None = None
) -> PartDiscovery:
    """Stage 1: part discovery on a copy of this backbone's first blocks (all if `depth` is None), without its head."""
    registers, depth = vit.config.registers * config.registers, depth or vit.config.depth
    bare = copy_vit(vit, replace(vit.config, classes=0, registers=registers, depth=depth))
    if config.tune_selector != "all" or config.clusters:
        freeze(bare, tokens=config.tune_selector == "none" or config.clusters)
    return PartDiscovery(
        bare, config.parts, classes, dropout=config.part_dropout, size=size, seed=config.seed, gated=config.clusters
    )


def check_part_config(config: Pdiscoformer, accelerator: Accelerator, *, mask_gradient: bool = False) -> None:
    shaped = replace(config.shaping, orthogonality_over=None, total_variation_grid=None) != Shaping.none()
    if not (shaped or config.classify_parts or mask_gradient or config.clusters):
        raise UserError(
            "No loss reaches the part selector: enable --classify-parts, a --shaping loss or --mask-gradient"
        )
    if (config.grad_accum or 1) > 1 and config.compares_images and accelerator.is_main_process:
        print(
            "note: with --grad-accum the presence loss asks for every part in each micro-batch, not in the whole batch"
        )


def check_selector_size(selector_side: int | None, vit: ViT, expects: Input) -> None:
    """The patches of stage 1, which may see images of another size, must be whole cells of the image."""
    patch = vit.config.patch
    for length in expects.size:
        if not patches_divide(length, selector_side or length, patch):
            near = patch * max(n for n in range(1, length + 1) if length % n == 0 and n * patch <= 2 * length)
            flag = f"--selector-size {selector_side}" if selector_side else f"--size {length}"
            raise UserError(
                f"{flag}: the selector's {patch}-pixel patches do not divide images of {length} pixels evenly; "
                f"choose --selector-size {near}"
            )


def patches_divide(length: int, side: int, patch: int) -> bool:
    """Whether the patches of an image resized to `side` are whole cells of the image, `length` pixels long."""
    return side >= patch and side % patch == 0 and length % (side // patch) == 0
