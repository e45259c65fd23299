"""A² where attention looks at the wrong thing: an adapter learns which crops a logistic regression can answer from.

Every step chooses crops under noise, fits a small logistic regression on some pictures' crops, asks it about others',
and goes back through both, into the adapter (A², sec. 4.3 and App. G). Group labels are not used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..config import A2Adapter, Train
from ..errors import UserError
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.features import kept_features
from ..what.probe import BoxProbe
from ..what.unrolled import fit_unrolled, standardised, sure_rate
from ..where.adapter import AdaptedSight, Adapter, Candidates, Glance
from ..where.attention import Heads
from ..where.crops import in_pixels
from ..where.topk import perturbed_top_k, top_k
from .a2 import heads_of, is_side
from .base import open_backbone, record_backbone, record_selector, recorded_selector
from .pair import Pair
from .probe import fit_probe, keep_fitted, set_head

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run

POINTS = 20  # of the learning curve that is logged


@dataclass(frozen=True)
class Plan:
    """What of the sight is not in the weights."""

    candidates: tuple[str, ...]
    crops: int
    adapter: str
    layer: int
    heads: Heads
    patches: int

    def sight(self, vit: ViT) -> AdaptedSight:
        adapter = Adapter(cast(Any, self.adapter), vit.config.width, self.patches)
        glance = Glance(vit, self.layer, self.heads)
        return AdaptedSight(glance, Candidates([as_grid(text) for text in self.candidates]), adapter, self.crops)


@dataclass(frozen=True)
class Pictures:
    """All that the adapter learns from, computed once. The backbones are frozen."""

    attention: Tensor  # [n, H, W]
    tokens: Tensor  # [n, N, D]
    crops: Tensor  # [n, J, E]: the embedding of every candidate
    labels: Tensor  # int64 [n]
    size: tuple[int, ...]  # of the pictures, in pixels

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Learned:
    """What came of it."""

    losses: list[float]  # cross-entropy on pictures that the fit had not seen, from the first steps to the last
    moved: float  # share of the pictures in which other crops are chosen now
    explored: float  # how often noise chose another crop at first; where it never does, there is nothing to learn from


# ---- what is asked for -----------------------------------------------------------------------------------------------


def as_grid(text: str) -> tuple[float, int | None]:
    """`2/7`, or `2/7x5` for rows of five."""
    side, times, count = text.partition("x")
    if not is_side(side) or (times and not (count.isdecimal() and int(count))):
        raise UserError(f"--candidates {text}: a side as a share (2/7) or in pixels (64), or, 2/7x5, in rows of five")
    return float(Fraction(side)), int(count) if count else None


def check_value(config: A2Adapter, vit: ViT, size: tuple[int, int]) -> None:
    """What cannot work, said before anything is computed."""
    grids = [as_grid(text) for text in config.candidates]
    if not grids:
        raise UserError("--candidates: name at least one side, such as 2/7")
    for text, (side, _) in zip(config.candidates, grids, strict=True):
        if in_pixels(side, size) > min(size):
            raise UserError(f"--candidates {text}: larger than the picture, {min(size)} pixels")
    number, depth = len(Candidates(grids).boxes(size)), vit.config.depth
    complaints = [
        (not 1 <= config.crops < number, f"--crops {config.crops}: choose 1 to {number - 1} of {number} candidates"),
        (not -depth <= config.layer < depth, f"--layer {config.layer}: there are {depth} blocks, 0 to {depth - 1}"),
        (config.draws < 2, f"--draws {config.draws}: must be at least 2"),
        (not config.noise > 0, f"--noise {config.noise}: must be more than 0"),
        (not config.lr >= 0, f"--lr {config.lr}: must not be negative"),
        (not config.fit_rate > 0, f"--fit-rate {config.fit_rate}: must be more than 0"),
    ]
    least = {"steps": 0, "fit_steps": 1, "support": 2, "query": 1, "pictures": 4}
    complaints += [
        (getattr(config, name) < value, f"--{name.replace('_', '-')} {getattr(config, name)}: must be at least {value}")
        for name, value in least.items()
    ]
    for wrong, complaint in complaints:
        if wrong:
            raise UserError(complaint)


# ---- learning --------------------------------------------------------------------------------------------------------


def learn(sight: AdaptedSight, pictures: Pictures, classes: int, config: A2Adapter) -> Learned:
    """Train the adapter of `sight`, on the device that `pictures` are on. The noise falls to 0 by a line."""
    device, adapter = pictures.labels.device, sight.adapter.train()
    order, noise = torch.Generator().manual_seed(config.seed), torch.Generator(device).manual_seed(config.seed)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=config.lr)
    before, tried, losses = chosen(sight, pictures), explored(sight, pictures, config), []
    for step in range(config.steps):
        mixed = torch.randperm(len(pictures), generator=order)[: config.support + config.query].to(device)
        support = max(1, len(mixed) * config.support // (config.support + config.query))
        sigma = config.noise * (1 - step / config.steps)
        loss = outer_loss(sight, pictures, mixed, support, classes, config, sigma, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    adapter.eval()
    moved = (chosen(sight, pictures) != before).any(dim=1).float().mean().item()
    curve = [part.mean().item() for part in torch.stack(losses).chunk(POINTS)] if losses else []
    return Learned(curve, moved, tried)


def outer_loss(
    sight: AdaptedSight, pictures: Pictures, mixed: Tensor, support: int, classes: int, config: A2Adapter,
    sigma: float, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Cross-entropy on the rest of `mixed` after a fit on the first `support` of them (A², App. G)."""
    scores = sight.scores(pictures.attention[mixed], pictures.tokens[mixed], pictures.size)
    shares = perturbed_top_k(scores, sight.count, sigma=sigma, draws=config.draws, generator=generator)
    features = torch.einsum("bkj,bjd->bkd", shares, pictures.crops[mixed]).flatten(1)
    features, labels = standardised(features, features[:support]), pictures.labels[mixed]
    known = features[:support]
    rate = config.fit_rate * sure_rate(known)
    head = fit_unrolled(known, labels[:support], classes, steps=config.fit_steps, rate=rate)
    return F.cross_entropy(head.logits(features[support:]), labels[support:])


@torch.no_grad()
def chosen(sight: AdaptedSight, pictures: Pictures) -> Tensor:
    """int64 [n, k]: the candidates that it looks at."""
    parts = zip(pictures.attention.split(256), pictures.tokens.split(256), strict=True)
    return torch.cat([top_k(sight.scores(*part, pictures.size), sight.count) for part in parts])


@torch.no_grad()
def explored(sight: AdaptedSight, pictures: Pictures, config: A2Adapter) -> float:
    """How often the noise that training begins with chooses another crop than it would without."""
    scores = sight.scores(pictures.attention[:256], pictures.tokens[:256], pictures.size)
    generator = torch.Generator(scores.device).manual_seed(config.seed)
    shares = perturbed_top_k(scores, sight.count, sigma=config.noise, draws=config.draws, generator=generator)
    return 1 - shares.gather(2, top_k(scores, sight.count)[..., None]).mean().item()


def look_over(
    config: A2Adapter, sight: AdaptedSight, what: BoxProbe, expects: Input, rows: Rows, run: Run,
    accelerator: Accelerator,
) -> Pictures:  # fmt: skip
    """Attention, tokens and the embedding of every candidate, of so many training pictures."""
    indices = rows.where("train")
    if len(indices) > config.pictures:
        some = np.random.default_rng(config.seed).choice(len(indices), config.pictures, replace=False)
        indices = indices[np.sort(some)]
    folder = config.cache or run.folder / "features"
    options: Any = {"decoded": config.cache, "batch": config.batch, "workers": config.workers}

    def glanced(images: Tensor) -> Tensor:
        attention, tokens = sight.glance(images)
        return torch.cat([attention.flatten(1)[..., None], tokens], dim=2)

    def embedded(images: Tensor) -> Tensor:
        return what.embed(images, sight.candidates.look(images)).unflatten(1, (what.boxes, -1))

    patch, seen_at = sight.glance.vit.config.patch, sight.glance.size(expects.size)
    grid = seen_at[0] // patch, seen_at[1] // patch
    seen = kept_features(glanced, [sight.glance], rows, indices, expects, accelerator, folder, **options)
    crops = kept_features(embedded, [sight.candidates, what], rows, indices, expects, accelerator, folder, **options)
    maps, tokens, crops, labels = (
        torch.from_numpy(array).to(accelerator.device)
        for array in (seen[..., 0], seen[..., 1:], crops, rows.labels[indices])
    )
    return Pictures(maps.unflatten(1, grid), tokens, crops, labels.long(), expects.size)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_a2_adapter(config: A2Adapter, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, 0)
    where = load_backbone(config.where or config.backbone, classes=0, seed=config.seed)
    check_value(config, where, expects.size)
    patch, made_for = vit.config.patch, vit.config.input.size
    h, w = (min(pair) // patch * patch for pair in zip(expects.size, made_for, strict=True))
    seen_h, seen_w = Glance(where).size(expects.size)
    plan = Plan(
        config.candidates, config.crops, config.adapter, config.layer, heads_of(config.heads, where.config),
        seen_h * seen_w // where.config.patch**2,
    )  # fmt: skip
    sight = plan.sight(where)
    sight.adapter.begin(torch.Generator().manual_seed(config.seed))  # the same on every device
    sight.to(accelerator.device)
    candidates = len(sight.candidates.boxes(expects.size))
    pictures = look_over(config, sight, BoxProbe(vit, (h, w), candidates), expects, rows, run, accelerator)
    learned = learn(sight, pictures, len(rows.classes), config)
    (weights,) = broadcast_object_list([{name: value.cpu() for name, value in sight.adapter.state_dict().items()}])
    sight.adapter.load_state_dict(weights)  # of the main process: all must look at the same crops
    what = BoxProbe(vit, (h, w), config.crops, len(rows.classes))
    features = {
        split: kept_features(
            lambda images: what.embed(images, sight.look(images)), [sight, what], rows, rows.where(split), expects,
            accelerator, config.cache or run.folder / "features",
            decoded=config.cache, batch=config.batch, workers=config.workers,
        )
        for split in ("train", "val")
    }  # fmt: skip
    fitted = fit_probe(config, rows, features)
    set_head(cast(nn.Linear, what.head), fitted.linear)
    model = Pair(sight, what, export_graph="crops").to(accelerator.device).eval()
    if accelerator.is_main_process:
        parameters = sum(p.numel() for p in sight.adapter.parameters())
        record_backbone(run, vit, expects, config)
        record_selector(run, where)
        run.note(adapted=asdict(plan) | {"size": [h, w], "of_candidates": candidates, "parameters": parameters})
        keep_fitted(run, model, fitted, config, asdict(learned) | {"pictures": len(pictures)})
        print(sentence(learned, parameters))
    return model, expects


def sentence(learned: Learned, parameters: int) -> str:
    if not learned.losses:
        return "The adapter has not learned anything: these are the crops of plain attention."
    hardly = f" Noise changed only {learned.explored:.1%} of the choices at first: a larger --noise would try more."
    return (
        f"The adapter ({parameters:,} parameters) looks elsewhere in {learned.moved:.0%} of the pictures; "
        f"cross-entropy on held-out training pictures {learned.losses[0]:.3f} → {learned.losses[-1]:.3f}."
        f"{hardly if learned.explored < 0.01 else ''}"
    )


def as_trained(candidates: tuple[str, ...], number: int, size: tuple[int, int]) -> tuple[str, ...]:
    """Older runs had fewer, or more, where a share of the side is no whole number of pixels: they keep them."""
    grids = [as_grid(text) for text in candidates]
    if len(Candidates(grids).boxes(size)) == number:
        return candidates
    counts = [count or min(size) // in_pixels(side, size) for side, count in grids]
    return tuple(f"{text.partition('x')[0]}x{count}" for text, count in zip(candidates, counts, strict=True))


def build_a2_adapter(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    said, where = facts["adapted"], recorded_selector(facts)
    assert where is not None, "a run notes which backbone attends"
    names = ("crops", "adapter", "layer", "heads", "patches")
    candidates = as_trained(tuple(said["candidates"]), said["of_candidates"], vit_config.input.size)
    plan = Plan(candidates, **{name: said[name] for name in names})
    what = BoxProbe(ViT(vit_config), tuple(said["size"]), plan.crops, len(facts["data"]["classes"]))
    return Pair(plan.sight(where), what, export_graph="crops")
