"""Is a map faithful? What becomes of answers when the pixels that it calls most relevant turn black, or the least.

A faithful map makes accuracy fall early when its most relevant pixels go first (positive), and late when its least
relevant ones do (negative); a map drawn at random says what any map would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..metrics.estimates import Estimate
from ..metrics.groups import RESAMPLES
from ..metrics.inference import sight_for, sight_for_prediction
from ..metrics.intervals import TAIL, resample
from ..sight import Method, Sight, cell_share

SHARES = tuple(k / 10 for k in range(1, 10))
STEP = 0.1
WIDEST = STEP * (len(SHARES) - 1)  # the trapezoid of answers that are all right
Direction = Literal["positive", "negative"]
DIRECTIONS: tuple[Direction, ...] = ("positive", "negative")
OF_A_CLASS = ("gae", "gradient")
TRUE = ", true class"  # after the name of a map that is not of the class that a picture is taken for
RANDOM = "random"
Size = tuple[int, int]


# ---- maps ------------------------------------------------------------------------------------------------------------


def explained(method: Method, images: Tensor, sight: Sight, name: str, classes: Tensor | None = None) -> Tensor | None:
    """[B, H, W]: the map of this name; None where the method has none."""
    from ..where.relevance import MAPS, can_be_explained

    if name in MAPS and can_be_explained(method):
        return MAPS[name](method, images, classes)
    if name == "sight":
        return map_of_sight(sight, (images.shape[2], images.shape[3]))
    return method.maps(images).get(name)


def names_of_maps(method: Method, images: Tensor, sight: Sight) -> list[str]:
    """Of all that `explained` finds, and of the one that is drawn at random."""
    from ..where.relevance import MAPS, can_be_explained

    relevance = MAPS if can_be_explained(method) else ()
    of_sight = ["sight"] if map_of_sight(sight, (images.shape[2], images.shape[3])) is not None else []
    return list(dict.fromkeys([*relevance, *of_sight, *method.maps(images), RANDOM]))


def map_of_sight(sight: Sight, size: Size) -> Tensor | None:
    """How much of each patch may be seen, or is of a part; None where everything is seen by definition."""
    if sight.parts is not None:
        return 1 - sight.parts[:, -1].float()
    if sight.keep is not None and sight.keep[0].numel() > 1 and sight.keep_pixels is None:
        return sight.keep.float()
    if sight.keep_pixels is None and sight.boxes is None:
        return None
    from ..metrics.overlap import patch_grid

    return cell_share(sight.visible(size), patch_grid(sight, {}, size))


def random_maps(indices: Sequence[int], grid: Size, seed: int) -> Tensor:
    """[B, H, W]: of each picture its own, whatever batch it comes in."""
    return torch.from_numpy(np.stack([np.random.default_rng([seed, 11, i]).random(grid) for i in indices])).float()


def at_pixels(maps: Tensor, size: Size) -> Tensor:
    return F.interpolate(maps[:, None].float(), size, mode="bilinear")[:, 0]


# ---- pixels turn black -----------------------------------------------------------------------------------------------


def ranks(maps: Tensor, size: Size, direction: Direction) -> Tensor:
    """int64 [B, h, w]: when each pixel's turn comes; of equals, the first comes first."""
    pixels = at_pixels(maps, size).flatten(1)
    order = pixels.argsort(dim=1, descending=direction == "positive", stable=True)
    turns = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, turns).unflatten(1, size)


def blackened(images: Tensor, turns: Tensor, share: float) -> Tensor:
    """Before normalisation, on all channels (RobustViT, App. N)."""
    return images * (turns >= int(share * turns[0].numel()))[:, None]


def predicted(method: Method, images: Tensor, told: Tensor | None) -> Tensor:
    return method.judge(images, sight_for_prediction(method, images, told)).logits.argmax(dim=1)


@torch.no_grad()
def answers_while_blackened(method: Method, images: Tensor, told: Tensor | None, maps: Tensor) -> Tensor:
    """int64 [B, directions, shares]: what each picture is taken for."""
    found = []
    for direction in DIRECTIONS:
        turns = ranks(maps, (images.shape[2], images.shape[3]), direction)
        found += [predicted(method, blackened(images, turns, share), told) for share in SHARES]
    return torch.stack(found, dim=1).unflatten(1, (len(DIRECTIONS), len(SHARES)))


@torch.no_grad()
def perturbed(
    method: Method, images: Tensor, told: Tensor | None, labels: Tensor, names: Sequence[str],
    random: Callable[[Size], Tensor],
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """What whole pictures are taken for [B]; the maps; and what is answered while they turn black, map by map.

    Of a map that is of a class there are two: of the class that a picture is taken for, and of the true one.
    """
    from ..metrics.overlap import patch_grid

    sight = sight_for(method, images, told)
    first, maps = predicted(method, images, told), {}
    for name in names:
        one = explained(method, images, sight, name, first)
        if one is not None:
            maps[name] = one
    maps[RANDOM] = random(patch_grid(sight, maps, (images.shape[2], images.shape[3]))).to(images.device)
    answers = {name: answers_while_blackened(method, images, told, one) for name, one in maps.items()}
    wrong = (first != labels).nonzero()[:, 0]
    for name in [name for name in OF_A_CLASS if name in maps]:
        answers[name + TRUE] = answers[name].clone()
        if len(wrong):  # of the others both maps are the same
            some, masks = images[wrong], None if told is None else told[wrong]
            one = explained(method, some, sight[wrong], name, labels[wrong])
            assert one is not None
            answers[name + TRUE][wrong] = answers_while_blackened(method, some, masks, one)
    return first, maps, answers


# ---- figures ---------------------------------------------------------------------------------------------------------


def mean_over(values: np.ndarray, less: np.ndarray | None = None, *, widest: float = 1.0) -> Estimate:
    """Of what is between 0 and `widest` in each picture, perhaps less something else of the same pictures."""
    blocks = [column[:, None] / widest for column in (values, less) if column is not None]
    samples = resample(blocks, np.zeros(len(values), dtype=np.int64), RESAMPLES, 0)
    (value, drawn), *rest = [sample.averages(np.ones(1)) for sample in samples]
    for other, draws in rest:
        value, drawn = value - other, drawn - draws
    low, high = np.quantile(drawn[:, 0], [TAIL, 1 - TAIL])
    how = f"{'paired ' * (less is not None)}bootstrap over images"
    return Estimate(widest * value[0], widest * low, widest * high, len(values), how, difference=less is not None)


def trapezoid(right: np.ndarray) -> np.ndarray:
    """[n]: the area under each picture's curve [n, 9], from 0.1 to 0.9."""
    return STEP * (right.sum(axis=1) - (right[:, 0] + right[:, -1]) / 2)


@dataclass(frozen=True)
class Curve:
    """What answers are worth while pixels turn black in the order of one map."""

    map: str
    direction: Direction
    accuracy: tuple[Estimate, ...]  # at each of SHARES
    mean: Estimate  # over SHARES
    trapezoid: Estimate  # the area from 0.1 to 0.9; at most 0.8
    unchanged: Estimate  # share of answers that stay what they were, over SHARES
    gain: Estimate | None = None  # of the mean over the random map's; above 0: more faithful than chance


def curves(labels: np.ndarray, first: np.ndarray, answers: Mapping[str, np.ndarray]) -> list[Curve]:
    """Answers [n, directions, shares] of every map, the random one among them."""
    right = {name: (some == labels[:, None, None]).astype(np.float64) for name, some in answers.items()}
    found = []
    for name, some in answers.items():
        same = (some == first[:, None, None]).astype(np.float64)
        for k, direction in enumerate(DIRECTIONS):
            mine, chance = right[name][:, k], right[RANDOM][:, k].mean(axis=1)
            pair = (chance, mine.mean(axis=1)) if direction == "positive" else (mine.mean(axis=1), chance)
            found.append(
                Curve(
                    name, direction, tuple(mean_over(column) for column in mine.T), mean_over(mine.mean(axis=1)),
                    mean_over(trapezoid(mine), widest=WIDEST), mean_over(same[:, k].mean(axis=1)),
                    mean_over(*pair) if name != RANDOM else None,
                )
            )  # fmt: skip
    return found


def columns_of(labels: np.ndarray, answers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Per picture, the mean over SHARES of whether the answer is right: what two runs are compared by."""
    return {
        f"{direction} {name}": (some[:, k] == labels[:, None]).mean(axis=1)
        for name, some in answers.items()
        for k, direction in enumerate(DIRECTIONS)
    }


def in_words(found: Sequence[Curve]) -> str:
    """Which maps are more faithful than one drawn at random, in both directions; nothing where there is no other."""
    verdicts: dict[str, list[str]] = {"surely": [], "not surely": [], "surely less": []}
    for name in dict.fromkeys(curve.map for curve in found if curve.gain is not None):
        gains = [curve.gain for curve in found if curve.map == name and curve.gain is not None]
        if all(gain.low > 0 for gain in gains):
            verdicts["surely"].append(name)
        else:
            verdicts["surely less" if any(gain.high < 0 for gain in gains) else "not surely"].append(name)
    said = [f"{how}: {'; '.join(names)}" for how, names in verdicts.items() if names]
    if not said:
        return ""
    n = found[0].mean.n
    return f"More faithful than a random map, pixels going from either end ({n:,} pictures): {', '.join(said)}."
