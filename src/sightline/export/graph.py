"""ONNX graphs: every exportable method as one function of tensors that torch.export can trace, for any batch size.

Interventions (part removal, forced parts, token removal) are inputs of the graph. Hidden patches are masked in the
attention instead of removed, because a graph has the same shapes for every image; the prediction is equally blind.
"""

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

from ..data.multicrop import resize_matrix
from ..errors import UserError
from ..methods.base import PartMethod
from ..methods.given_mask import GivenMask
from ..methods.pair import Pair
from ..sight import Method, Prediction, Sight, inside_boxes
from ..vit.model import Input
from ..what.masked import MaskedViT
from ..what.probe import BoxProbe
from ..what.zeroshot import ZeroShot
from ..where.adapter import AdaptedSight
from ..where.corrections import Correction, PartAssignment
from ..where.crops import CentreSight, CropSight, side_in_pixels
from ..where.parts import Parts

OPSET = 18
EXACT_SCALE = 2.0**42  # attention scaled by this and rounded sums exactly in double precision


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorCorrection(Correction):
    """A correction whose settings are tensors with one entry per part, so that they can be inputs of a graph."""

    kept: Tensor  # bool [K]
    always: Tensor  # bool [K]: forced parts
    limits: Tensor  # [K]: maximal distance from the prototype; infinite: no token removal

    def keep_parts(self, assignment: PartAssignment) -> Tensor:
        return self.kept.expand(len(assignment.scores), -1)

    def forced(self, assignment: PartAssignment) -> Tensor:
        return self.always[assignment.part]

    def dropped(self, assignment: PartAssignment) -> Tensor:
        return ~self.kept[assignment.part]

    def too_far(self, assignment: PartAssignment) -> Tensor:
        if self.max_distances is None:
            return torch.zeros_like(assignment.distances, dtype=torch.bool)
        return assignment.distances > self.limits[assignment.part]


def tensor_correction(kept: Tensor, always: Tensor, limits: Tensor) -> TensorCorrection:
    # `max_distances` only switches the limits on: a method sets it to None for the look that they do not apply to.
    return TensorCorrection(kept=kept, always=always & kept, limits=limits, max_distances=())


class ExportGraph(nn.Module):
    """A method as one function of tensors: subclasses define `forward`."""

    sight_outputs: tuple[str, ...] = ()  # the outputs that make up the sight; empty: the prediction is not blind
    part_count = 0  # discovered parts; with any, the graph has the intervention inputs

    def __init__(self, method: nn.Module):
        super().__init__()
        self.method = with_masked_hiding(method)

    def extra_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:  # noqa: ARG002 (masks have the images' size)
        """The inputs besides `images`, by name, as examples for a batch of two."""
        return {}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits", "probabilities", *self.sight_outputs)


class WholeImageGraph(ExportGraph):
    """A method that sees the whole image."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        sight = Sight.everything(images)
        return graph_outputs(cast(Method, self.method).judge(images, sight), sight)


def graph_outputs(prediction: Prediction, sight: Sight, names: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """Logits, probabilities, and these tensors of the sight."""
    return prediction.logits, prediction.probabilities, *(getattr(sight, name) for name in names)


def with_masked_hiding(method: nn.Module) -> nn.Module:
    """A frozen copy on the CPU whose ViTs hide patches by attention masks instead of removing them."""
    copied = copy.deepcopy(method).cpu().eval().requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, MaskedViT):
            module.hide = "mask"
    return copied


class PartsGraph(ExportGraph):
    """iFAM: discovers parts, applies the intervention inputs, and predicts from the sight that is left."""

    method: PartMethod

    def __init__(self, method: PartMethod):
        super().__init__(method)
        self.part_count = method.part_count
        self.sight_outputs = ("keep", "keep_pixels") if method.hides_pixels else ("keep",)

    def extra_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:  # noqa: ARG002
        return {
            "parts_kept": torch.ones(self.part_count, dtype=torch.bool),
            "parts_forced": torch.zeros(self.part_count, dtype=torch.bool),
            "distance_limits": torch.full((self.part_count,), torch.inf),
        }

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*super().outputs, "parts")

    def forward(
        self, images: Tensor, parts_kept: Tensor, parts_forced: Tensor, distance_limits: Tensor
    ) -> tuple[Tensor, ...]:
        correction = tensor_correction(parts_kept, parts_forced, distance_limits)
        sight = self.method.sight_from(images, self.method.detect(images), correction)
        return graph_outputs(self.method.judge(images, sight), sight, (*self.sight_outputs, "parts"))


class PooledPartsGraph(PartsGraph):
    """PDiscoFormer: pools removed tokens with the background, then averages the logits of the parts that are kept."""

    def forward(
        self, images: Tensor, parts_kept: Tensor, parts_forced: Tensor, distance_limits: Tensor
    ) -> tuple[Tensor, ...]:
        where, found = self.method.where, self.method.detect(images)
        correction = tensor_correction(parts_kept, parts_forced, distance_limits)
        assert found.features is not None
        every_part, scores = replace(correction, kept=torch.ones_like(parts_kept)), found.maps.scores
        probabilities = every_part.probabilities(found.maps)
        part_logits = where.part_scores(where.embed(Parts(found.features, scores, scores, probabilities)))  # [B, C, K]
        logits = torch.where(parts_kept, part_logits, 0.0).sum(dim=2) / parts_kept.to(part_logits.dtype).sum()
        sight = self.method.sight_from(images, found, correction)
        return graph_outputs(Prediction(logits, sight), sight, (*self.sight_outputs, "parts"))


class GivenMaskGraph(ExportGraph):
    """Early and late masking: the mask is an input."""

    method: GivenMask

    def __init__(self, method: GivenMask):
        super().__init__(method)
        self.sight_outputs = ("keep", "keep_pixels") if method.settings.pixels else ("keep",)

    def extra_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:
        return {"mask": torch.ones(2, *size, dtype=torch.bool)}

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        # A pixel-exact mask would be both an input and an output of the graph, which ONNX does not allow.
        sight = self.method.look_at(images, mask & torch.ones_like(mask))
        return graph_outputs(self.method.judge(images, sight), sight, self.sight_outputs)


class CropGraph(ExportGraph):
    """A² and other crop methods: chooses boxes, crops and resizes them, and predicts from the crops."""

    sight_outputs = ("boxes",)
    method: Pair

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        where, what = self.method.where, self.method.what
        boxes = find_boxes(where, images)
        assert isinstance(what, BoxProbe | ZeroShot)
        tokens = torch.cat(
            [what.vit(crop_and_resize(images, box, what.size)).cls for box in boxes.unbind(dim=1)], dim=1
        )
        logits = what.logits_of(tokens) if isinstance(what, ZeroShot) else cast(nn.Linear, what.head)(tokens)
        sight = Sight(boxes=boxes)
        return graph_outputs(Prediction(logits, sight), sight, self.sight_outputs)


def find_boxes(where: object, images: Tensor) -> Tensor:
    """int64 [B, k, 4]: the boxes of the selector, computed with operations that ONNX has."""
    if isinstance(where, CropSight):
        return most_attended_boxes(where, images)
    if isinstance(where, AdaptedSight):
        size = (images.shape[2], images.shape[3])
        best = (
            where.scores(*where.glance(images), size).topk(where.count, dim=1).indices
        )  # ties: the first, as in torch
        return where.candidates.boxes(size)[best.sort(dim=1).values]
    boxes = cast(CentreSight, where).look(images).boxes
    assert boxes is not None
    return boxes.clone()


def most_attended_boxes(where: CropSight, images: Tensor) -> Tensor:
    """int64 [B, k, 4]: the same squares as `greedy_crops` chooses."""
    size = (images.shape[2], images.shape[3])
    maps = F.interpolate(where.attention(images)[:, None], size, mode="bilinear")[:, 0]
    integral = F.pad((maps.double() * EXACT_SCALE).round().cumsum(1).cumsum(2), (1, 0, 1, 0))
    found: list[Tensor] = []
    for side in (side_in_pixels(share, size) for share in where.sides):
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


def crop_and_resize(images: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, 3, *size]: the content of the boxes [B, 4], resized without reading a pixel outside them. Those have weight 0
    and are also blanked first, because 0 times NaN is NaN."""
    inside = inside_boxes(box[:, None], (images.shape[2], images.shape[3]))
    left, top, right, bottom = box.to(images.dtype).unbind(dim=1)
    rows = resize_weights(top, bottom, images.shape[2], size[0])
    columns = resize_weights(left, right, images.shape[3], size[1])
    shown = torch.where(inside[:, None], images, 0.0)
    return torch.einsum("bcyw,bxw->bcyx", torch.einsum("byh,bchw->bcyw", rows, shown), columns)


def resize_weights(start: Tensor, end: Tensor, source: int, target: int) -> Tensor:
    """[B, target, source]: resizing weights of the pixels from `start` to `end`, and of no others."""
    pixels = torch.arange(source)
    inside = (pixels >= start[:, None]) & (pixels < end[:, None])
    weights = torch.where(inside[:, None], resize_matrix(start, end - start, source, target), 0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


# ---- which graph a method has ----------------------------------------------------------------------------------------


GRAPHS: dict[str, Callable[[Any], ExportGraph]] = {
    "whole": WholeImageGraph, "parts": PartsGraph, "pooled parts": PooledPartsGraph, "given mask": GivenMaskGraph,
    "crops": CropGraph,
}  # fmt: skip


def build_graph(method: Method, name: str) -> ExportGraph:
    """The graph of a method, or an error that says why it has none; `name` is the run, for the error."""
    if method.export_graph not in GRAPHS:
        raise UserError(
            f"{name}: cannot be exported because {method.export_obstacle}; use it from Python: "
            "sightline.load(...).predict(...)"
        )
    if method.part_count and cast(PartMethod, method).settings.eval_noise:
        raise UserError(
            f"{name}: cannot be exported because it draws Gumbel noise in evaluation, as the published code does; "
            "train with --eval-noise False, or use it from Python"
        )
    return GRAPHS[method.export_graph](method)


# ---- tracing ---------------------------------------------------------------------------------------------------------


def to_onnx(graph: ExportGraph, expects: Input) -> Any:
    """The traced graph, as an onnx ModelProto."""
    need_onnx()
    images = torch.rand(2, 3, *expects.size, generator=torch.Generator().manual_seed(0))
    more = graph.extra_inputs(expects.size)
    batch = torch.export.Dim("batch")
    shapes = {"images": {0: batch}} | {name: {0: batch} if name == "mask" else {} for name in more}
    with torch.no_grad(), quietly():
        graph(images, *more.values())  # fills caches such as resized position embeddings with real tensors
        program = torch.export.export(graph, (images, *more.values()), dynamic_shapes=shapes, strict=True)
        exported = torch.onnx.export(
            program, (), input_names=["images", *more], output_names=list(graph.outputs), dynamo=True,
            opset_version=OPSET,
        )  # fmt: skip
    assert exported is not None
    return with_named_batch(exported.model_proto)


def with_named_batch(proto: Any) -> Any:
    """Name the batch dimension `batch`; the exporter calls it s6 or s77."""
    symbol = re.compile(rf"\b{proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param}\b")
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = symbol.sub("batch", dim.dim_param)
    return proto


def need_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"sightline export needs the package {package}: pip install 'sightline[onnx]'")


@contextmanager
def quietly() -> Generator[None]:
    """Silence the exporter's log messages, warnings and prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
