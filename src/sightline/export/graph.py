"""Methods as one function of tensors, so that they can be traced: for any number of pictures, parts and distances being
inputs. Hidden patches are masked, not removed, because a graph has the same shape for every picture: equally blind."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.multicrop import resizing
from ..errors import UserError
from ..methods.base import PartMethod
from ..methods.given_mask import GivenMask
from ..methods.ifam import IFam
from ..methods.pair import Pair
from ..sight import Method, Prediction, Sight, inside_boxes
from ..vit.model import Input
from ..what.masked import MaskedViT
from ..what.probe import BoxProbe
from ..what.zeroshot import ZeroShot
from ..where.adapter import AdaptedSight
from ..where.corrections import Correction, PartAssignment
from ..where.crops import CentreSight, CropSight, in_pixels
from ..where.parts import Parts

OPSET = 18
WHOLE = 2.0**42  # attention times that, rounded, adds up exactly in double precision


@dataclass(frozen=True, eq=False, kw_only=True)
class Switches(Correction):
    """A correction that is made of tensors, one entry for each part."""

    kept: Tensor  # bool [K]
    always: Tensor  # bool [K]
    limits: Tensor  # [K]; infinite: none

    def keep_parts(self, claims: PartAssignment) -> Tensor:
        return self.kept.expand(len(claims.scores), -1)

    def forced(self, claims: PartAssignment) -> Tensor:
        return self.always[claims.part]

    def dropped(self, claims: PartAssignment) -> Tensor:
        return ~self.kept[claims.part]

    def too_far(self, claims: PartAssignment) -> Tensor:
        if self.farthest is None:
            return torch.zeros_like(claims.distances, dtype=torch.bool)
        return claims.distances > self.limits[claims.part]


def switches(kept: Tensor, always: Tensor, limits: Tensor) -> Switches:
    # `farthest` only says whether limits count: a method leaves them out where they are of another look.
    return Switches(kept=kept, always=always & kept, limits=limits, farthest=())


class Traced(nn.Module):
    """A method as a graph sees it."""

    cut: tuple[str, ...] = ()  # of the outputs, all that the second half is told about where to look; blind ones only

    def __init__(self, method: nn.Module):
        super().__init__()
        self.method = masking(method)

    def more_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:  # noqa: ARG002 (masks have the pictures' size)
        """Besides pictures, by name, as examples for two of them."""
        return {}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits", "probabilities", *self.cut)


class Whole(Traced):
    """Sees everything."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return answer_of(cast(Method, self.method).judge(images, Sight.everything(images)))


def answer_of(prediction: Prediction) -> tuple[Tensor, Tensor]:
    return prediction.logits, prediction.probabilities


def masking(method: nn.Module) -> nn.Module:
    copied = copy.deepcopy(method).cpu().eval().requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, MaskedViT):
            module.hide = "mask"
    return copied


class WithParts(Traced):
    """iFAM: parts are found, overruled as the switches say, and answered from."""

    method: PartMethod

    def __init__(self, method: PartMethod):
        super().__init__(method)
        exact = isinstance(method, IFam) and method.pixels is not None
        self.cut = ("keep", "keep_pixels") if exact else ("keep",)

    def more_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:  # noqa: ARG002
        parts = self.method.where.parts
        return {
            "parts_kept": torch.ones(parts, dtype=torch.bool),
            "parts_forced": torch.zeros(parts, dtype=torch.bool),
            "distance_limits": torch.full((parts,), torch.inf),
        }

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*super().outputs, "parts")

    def forward(
        self, images: Tensor, parts_kept: Tensor, parts_forced: Tensor, distance_limits: Tensor
    ) -> tuple[Tensor, ...]:
        correction = switches(parts_kept, parts_forced, distance_limits)
        sight = self.method.decide(images, self.method.find(images), correction)
        assert sight.keep is not None
        assert sight.parts is not None
        pixels = [sight.keep_pixels] if sight.keep_pixels is not None else []
        return *answer_of(self.method.judge(images, sight)), sight.keep, *pixels, sight.parts


class Pooled(WithParts):
    """PDiscoFormer: too distant patches are pooled with the background; then, dropped parts do not answer."""

    def forward(
        self, images: Tensor, parts_kept: Tensor, parts_forced: Tensor, distance_limits: Tensor
    ) -> tuple[Tensor, ...]:
        where, found = self.method.where, self.method.find(images)
        correction = switches(parts_kept, parts_forced, distance_limits)
        assert found.features is not None
        shares, scores = replace(correction, kept=torch.ones_like(parts_kept)).shares(found.maps), found.maps.scores
        said = where.part_scores(where.embed(Parts(found.features, scores, scores, shares)))  # [B, C, K]
        answering = parts_kept.to(said.dtype)
        logits = torch.where(parts_kept, said, 0.0).sum(dim=2) / answering.sum()
        sight = self.method.decide(images, found, correction)
        assert sight.keep is not None
        assert sight.parts is not None
        return *answer_of(Prediction(logits, sight)), sight.keep, sight.parts


class Shown(Traced):
    """Early and late masking: a mask is an input."""

    method: GivenMask

    def __init__(self, method: GivenMask):
        super().__init__(method)
        self.cut = ("keep", "keep_pixels") if method.how.pixels else ("keep",)

    def more_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:
        return {"mask": torch.ones(2, *size, dtype=torch.bool)}

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        # A mask that is kept to the pixel is its own output, and a graph's outputs are never its inputs.
        sight = self.method.look_at(images, mask & torch.ones_like(mask))
        assert sight.keep is not None
        pixels = [sight.keep_pixels] if sight.keep_pixels is not None else []
        return *answer_of(self.method.judge(images, sight)), sight.keep, *pixels


class Boxed(Traced):
    """A² and its kin: boxes are found, cut out and answered from."""

    cut = ("boxes",)
    method: Pair

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        where, what = self.method.where, self.method.what
        boxes = boxes_of(where, images)
        assert isinstance(what, BoxProbe | ZeroShot)
        tokens = torch.cat([what.vit(cut_out(images, box, what.size)).cls for box in boxes.unbind(dim=1)], dim=1)
        logits = what.answer(tokens) if isinstance(what, ZeroShot) else cast(nn.Linear, what.head)(tokens)
        return *answer_of(Prediction(logits, Sight(boxes=boxes))), boxes


def boxes_of(where: object, images: Tensor) -> Tensor:
    """int64 [B, k, 4], in operations that graphs have."""
    if isinstance(where, CropSight):
        return most_attended(where, images)
    if isinstance(where, AdaptedSight):
        size = (images.shape[2], images.shape[3])
        best = where.scores(*where.glance(images), size).topk(where.count, dim=1).indices  # the first of equals, too
        return where.candidates.boxes(size)[best.sort(dim=1).values]
    boxes = cast(CentreSight, where).look(images).boxes
    assert boxes is not None
    return boxes.clone()


def most_attended(where: CropSight, images: Tensor) -> Tensor:
    """int64 [B, k, 4]: the same squares as `greedy_crops` finds."""
    size = (images.shape[2], images.shape[3])
    maps = F.interpolate(where.attention(images)[:, None], size, mode="bilinear")[:, 0]
    integral = F.pad((maps.double() * WHOLE).round().cumsum(1).cumsum(2), (1, 0, 1, 0))
    found: list[Tensor] = []
    for side in (in_pixels(share, size) for share in where.sides):
        bands = integral[:, side:] - integral[:, :-side]
        scores = bands[:, :, side:] - bands[:, :, :-side]
        y, x = torch.arange(scores.shape[1]), torch.arange(scores.shape[2])
        for left, top, right, bottom in (box[..., None].unbind(dim=1) for box in found):
            rows, columns = (y > top - side) & (y < bottom), (x > left - side) & (x < right)
            scores = torch.where(rows[:, :, None] & columns[:, None], -1.0, scores)
        best = scores.flatten(1).argmax(dim=1)
        top, left = best // scores.shape[2], best % scores.shape[2]
        box = torch.stack([left, top, left + side, top + side], dim=1)
        room = scores.flatten(1).amax(dim=1, keepdim=True) >= 0
        found.append(torch.where(room, box, found[-1]) if found else box)
    return torch.stack(found, dim=1)


def cut_out(images: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, 3, *size]: the boxes [B, 4], resized as if nothing were around them: all of that weighs nothing, and is black
    beforehand, since nothing times NaN is NaN."""
    inside = inside_boxes(box[:, None], (images.shape[2], images.shape[3]))
    left, top, right, bottom = box.to(images.dtype).unbind(dim=1)
    rows = within(top, bottom, images.shape[2], size[0])
    columns = within(left, right, images.shape[3], size[1])
    shown = torch.where(inside[:, None], images, 0.0)
    return torch.einsum("bcyw,bxw->bcyx", torch.einsum("byh,bchw->bcyw", rows, shown), columns)


def within(start: Tensor, end: Tensor, source: int, target: int) -> Tensor:
    """[B, target, source]: weights of the pixels from `start` to `end`, and of no others."""
    places = torch.arange(source)
    there = (places >= start[:, None]) & (places < end[:, None])
    weights = torch.where(there[:, None], resizing(start, end - start, source, target), 0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


# ---- which method is which -------------------------------------------------------------------------------------------


GRAPHS: dict[str, Callable[[Any], Traced]] = {
    "whole": Whole, "parts": WithParts, "pooled parts": Pooled, "given mask": Shown, "crops": Boxed,
}  # fmt: skip


def traceable(method: Method, name: str) -> Traced:
    """The method as a function of tensors, or an error that says why it cannot be one."""
    if method.export_graph not in GRAPHS:
        raise UserError(
            f"{name}: cannot be exported, because {method.export_obstacle}; use it from Python: "
            "sightline.load(...).predict(...)"
        )
    if method.part_count and cast(PartMethod, method).how.eval_noise:
        raise UserError(
            f"{name}: draws noise also in evaluation, as the published code does, which no graph repeats; train "
            "with --eval-noise False, or use it from Python"
        )
    return GRAPHS[method.export_graph](method)


# ---- tracing ---------------------------------------------------------------------------------------------------------


def to_onnx(traced: Traced, expects: Input) -> Any:
    """The graph, as an onnx ModelProto."""
    need_onnx()
    images = torch.rand(2, 3, *expects.size, generator=torch.Generator().manual_seed(0))
    more = traced.more_inputs(expects.size)
    batch = torch.export.Dim("batch")
    shapes = {"images": {0: batch}} | {name: {0: batch} if name == "mask" else {} for name in more}
    with torch.no_grad(), quietly():
        traced(images, *more.values())  # what is computed once and kept, such as resized positions, is real by then
        program = torch.export.export(traced, (images, *more.values()), dynamic_shapes=shapes, strict=True)
        graph = torch.onnx.export(
            program, (), input_names=["images", *more], output_names=list(traced.outputs), dynamo=True,
            opset_version=OPSET,
        )  # fmt: skip
    assert graph is not None
    return with_named_batch(graph.model_proto)


def with_named_batch(proto: Any) -> Any:
    """The exporter calls the number of pictures s6, or s77, as it comes."""
    made = re.compile(rf"\b{proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param}\b")
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = made.sub("batch", dim.dim_param)
    return proto


def need_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"exporting needs {package}: pip install 'sightline[onnx]'")


@contextmanager
def quietly() -> Generator[None]:
    """Exporters talk a lot, to everybody."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
