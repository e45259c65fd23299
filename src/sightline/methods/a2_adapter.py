"""A² with an adapter, for attention on the wrong object: it learns which crops a logistic regression can classify.

Every step selects crops under noise (perturbed top-k), fits an unrolled logistic regression on the crops of a support
set, and backpropagates its cross-entropy on a query set through both into the adapter (A², sec. 4.3 and App. G). Group
labels are not used.
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
from ..what.features import cached_features
from ..what.probe import BoxProbe
from ..what.unrolled import fit_unrolled, safe_learning_rate, standardize_by
from ..where.adapter import AdaptedSight, Adapter, CandidateBoxes, FrozenAttention
from ..where.attention import Heads
from ..where.crops import side_in_pixels, vit_input_size
from ..where.topk import perturbed_top_k, top_k
from .a2 import is_crop_side, parse_heads
from .base import open_backbone, record_backbone, record_selector, recorded_selector
from .pair import Pair
from .probe import fit_probe, save_fitted, set_head

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run

CURVE_POINTS = 20  # points of the logged learning curve


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of the selector, which are not in its weights; recorded in run.json."""

    candidates: tuple[str, ...]
    crops: int
    adapter: str
    layer: int
    heads: Heads
    patches: int

    def selector(self, vit: ViT) -> AdaptedSight:
        adapter = Adapter(cast(Any, self.adapter), vit.config.width, self.patches)
        attention = FrozenAttention(vit, self.layer, self.heads)
        candidates = CandidateBoxes([parse_candidate_grid(text) for text in self.candidates])
        return AdaptedSight(attention, candidates, adapter, self.crops)


@dataclass(frozen=True)
class AdapterData:
    """The training data of the adapter, computed once, since both backbones are frozen."""

    attention: Tensor  # [n, H, W]
    tokens: Tensor  # [n, N, D]
    crops: Tensor  # [n, J, E]: the embeddings of all candidates
    labels: Tensor  # int64 [n]
    size: tuple[int, ...]  # of the images, in pixels

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class AdapterResult:
    """The result of training the adapter."""

    losses: list[float]  # query cross-entropy over training, averaged in chunks
    moved: float  # fraction of images whose selected crops have changed
    explored: float  # how often the initial noise selects another crop; if never, there is no gradient


# ---- flags -----------------------------------------------------------------------------------------------------------


def parse_candidate_grid(text: str) -> tuple[float, int | None]:
    """`2/7`, or `2/7x5` for a grid of five by five."""
    side, times, count = text.partition("x")
    if not is_crop_side(side) or (times and not (count.isdecimal() and int(count))):
        raise UserError(f"--candidates {text}: a side is a fraction (2/7) or pixels (64); 2/7x5 is a grid of 5×5")
    return float(Fraction(side)), int(count) if count else None


def check_adapter_config(config: A2Adapter, vit: ViT, size: tuple[int, int]) -> None:
    """Invalid settings are reported before anything is computed."""
    grids = [parse_candidate_grid(text) for text in config.candidates]
    if not grids:
        raise UserError("--candidates: give at least one side, such as 2/7")
    for text, (side, _) in zip(config.candidates, grids, strict=True):
        if side_in_pixels(side, size) > min(size):
            raise UserError(f"--candidates {text}: larger than the image, {min(size)} pixels")
    number, depth = len(CandidateBoxes(grids).boxes(size)), vit.config.depth
    complaints = [
        (
            not 1 <= config.crop_count < number,
            f"--crop-count {config.crop_count}: must be 1 to {number - 1}, of {number} candidates",
        ),
        (not -depth <= config.layer < depth, f"--layer {config.layer}: there are {depth} blocks, 0 to {depth - 1}"),
    ]
    for wrong, complaint in complaints:
        if wrong:
            raise UserError(complaint)


# ---- training --------------------------------------------------------------------------------------------------------


def train_adapter(sight: AdaptedSight, data: AdapterData, classes: int, config: A2Adapter) -> AdapterResult:
    """Train the adapter of `sight`, on the device of `data`. The noise decays linearly to 0."""
    device, adapter = data.labels.device, sight.adapter.train()
    order, noise = torch.Generator().manual_seed(config.seed), torch.Generator(device).manual_seed(config.seed)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=config.lr)
    before, explored, losses = selected_candidates(sight, data), exploration_rate(sight, data, config), []
    for step in range(config.steps):
        batch = torch.randperm(len(data), generator=order)[: config.support + config.query].to(device)
        support = max(1, len(batch) * config.support // (config.support + config.query))
        sigma = config.noise * (1 - step / config.steps)
        loss = query_loss(sight, data, batch, support, classes, config, sigma, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    adapter.eval()
    moved = (selected_candidates(sight, data) != before).any(dim=1).float().mean().item()
    curve = [chunk.mean().item() for chunk in torch.stack(losses).chunk(CURVE_POINTS)] if losses else []
    return AdapterResult(curve, moved, explored)


def query_loss(
    sight: AdaptedSight, data: AdapterData, batch: Tensor, support: int, classes: int, config: A2Adapter,
    sigma: float, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Cross-entropy on the rest of `batch` (query) after a fit on its first `support` images (A², App. G)."""
    scores = sight.scores(data.attention[batch], data.tokens[batch], data.size)
    weights = perturbed_top_k(scores, sight.count, sigma=sigma, draws=config.noise_samples, generator=generator)
    features = torch.einsum("bkj,bjd->bkd", weights, data.crops[batch]).flatten(1)
    features, labels = standardize_by(features, features[:support]), data.labels[batch]
    known = features[:support]
    lr = config.fit_lr * safe_learning_rate(known)
    head = fit_unrolled(known, labels[:support], classes, steps=config.fit_steps, lr=lr)
    return F.cross_entropy(head.logits(features[support:]), labels[support:])


@torch.no_grad()
def selected_candidates(sight: AdaptedSight, data: AdapterData) -> Tensor:
    """int64 [n, k]: the candidates that it looks at."""
    chunks = zip(data.attention.split(256), data.tokens.split(256), strict=True)
    return torch.cat([top_k(sight.scores(*chunk, data.size), sight.count) for chunk in chunks])


@torch.no_grad()
def exploration_rate(sight: AdaptedSight, data: AdapterData, config: A2Adapter) -> float:
    """How often the initial noise selects another crop than without noise."""
    scores = sight.scores(data.attention[:256], data.tokens[:256], data.size)
    generator = torch.Generator(scores.device).manual_seed(config.seed)
    weights = perturbed_top_k(scores, sight.count, sigma=config.noise, draws=config.noise_samples, generator=generator)
    return 1 - weights.gather(2, top_k(scores, sight.count)[..., None]).mean().item()


def collect_adapter_data(
    config: A2Adapter, sight: AdaptedSight, what: BoxProbe, expects: Input, rows: Rows, run: Run,
    accelerator: Accelerator,
) -> AdapterData:  # fmt: skip
    """Attention, patch tokens and the embeddings of all candidates, of at most `--train-images` training images."""
    indices = rows.split_indices("train")
    if len(indices) > config.train_images:
        sample = np.random.default_rng(config.seed).choice(len(indices), config.train_images, replace=False)
        indices = indices[np.sort(sample)]
    folder = config.cache or run.folder / "features"
    options: Any = {"decoded": config.cache, "batch": config.batch, "workers": config.workers}

    def attend(images: Tensor) -> Tensor:
        attention, tokens = sight.glance(images)
        return torch.cat([attention.flatten(1)[..., None], tokens], dim=2)

    def embed_candidates(images: Tensor) -> Tensor:
        return what.embed(images, sight.candidates.look(images)).unflatten(1, (what.boxes, -1))

    patch, (h, w) = sight.glance.vit.config.patch, sight.glance.input_size(expects.size)
    seen = cached_features(attend, [sight.glance], rows, indices, expects, accelerator, folder, **options)
    crops = cached_features(
        embed_candidates, [sight.candidates, what], rows, indices, expects, accelerator, folder, **options
    )
    maps, tokens, crops, labels = (
        torch.from_numpy(array).to(accelerator.device)
        for array in (seen[..., 0], seen[..., 1:], crops, rows.labels[indices])
    )
    return AdapterData(maps.unflatten(1, (h // patch, w // patch)), tokens, crops, labels.long(), expects.size)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_a2_adapter(config: A2Adapter, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, 0)
    where = load_backbone(config.where or config.backbone, classes=0, seed=config.seed)
    check_adapter_config(config, where, expects.size)
    size, (seen_h, seen_w) = vit_input_size(vit, expects.size), vit_input_size(where, expects.size)
    settings = AdapterSettings(
        config.candidates, config.crop_count, config.adapter, config.layer, parse_heads(config.heads, where.config),
        seen_h * seen_w // where.config.patch**2,
    )  # fmt: skip
    sight = settings.selector(where)
    sight.adapter.initialize(torch.Generator().manual_seed(config.seed))  # the same on every device
    sight.to(accelerator.device)
    candidates = len(sight.candidates.boxes(expects.size))
    data = collect_adapter_data(config, sight, BoxProbe(vit, size, candidates), expects, rows, run, accelerator)
    result = train_adapter(sight, data, len(rows.classes), config)
    (weights,) = broadcast_object_list([{name: value.cpu() for name, value in sight.adapter.state_dict().items()}])
    sight.adapter.load_state_dict(weights)  # from the main process: all must look at the same crops
    what = BoxProbe(vit, size, config.crop_count, len(rows.classes))
    features = {
        split: cached_features(
            lambda images: what.embed(images, sight.look(images)), [sight, what], rows, rows.split_indices(split),
            expects, accelerator, config.cache or run.folder / "features",
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
        run.note(adapted=asdict(settings) | {"size": list(size), "of_candidates": candidates, "parameters": parameters})
        save_fitted(run, model, fitted, config, asdict(result) | {"images": len(data)})
        print(result_sentence(result, parameters))
    return model, expects


def result_sentence(result: AdapterResult, parameters: int) -> str:
    if not result.losses:
        return "The adapter was not trained: these are the crops of plain attention."
    advice = f" The initial noise changed only {result.explored:.1%} of the crops: a larger --noise would explore more."
    return (
        f"The adapter ({parameters:,} parameters) selects other crops in {result.moved:.0%} of the images; "
        f"cross-entropy on held-out training images {result.losses[0]:.3f} → {result.losses[-1]:.3f}."
        f"{advice if result.explored < 0.01 else ''}"
    )


def recorded_candidates(candidates: tuple[str, ...], number: int, size: tuple[int, int]) -> tuple[str, ...]:
    """The candidates of a recorded run. Older runs had another number of them where a side is no whole number of
    pixels; they keep it."""
    grids = [parse_candidate_grid(text) for text in candidates]
    if len(CandidateBoxes(grids).boxes(size)) == number:
        return candidates
    counts = [count or min(size) // side_in_pixels(side, size) for side, count in grids]
    return tuple(f"{text.partition('x')[0]}x{count}" for text, count in zip(candidates, counts, strict=True))


def build_a2_adapter(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    recorded, where = facts["adapted"], recorded_selector(facts)
    assert where is not None, "run.json records the backbone that attends"
    names = ("crops", "adapter", "layer", "heads", "patches")
    candidates = recorded_candidates(tuple(recorded["candidates"]), recorded["of_candidates"], vit_config.input.size)
    settings = AdapterSettings(candidates, **{name: recorded[name] for name in names})
    what = BoxProbe(ViT(vit_config), tuple(recorded["size"]), settings.crops, len(facts["data"]["classes"]))
    return Pair(settings.selector(where), what, export_graph="crops")
