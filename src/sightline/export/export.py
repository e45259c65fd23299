"""`sightline export`: a run as one ONNX file, checked against torch before it is saved, with a description for programs
(model.json) and a model card (README.md).

    sightline export runs/x --out exported
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import __version__
from ..config import Export
from ..console.checksums import replace_with_checksum, write_json_with_checksum
from ..console.files import make_folder, save_text
from ..console.terminal import bar
from ..errors import UserError
from ..interventions.apply import apply_intervention, load_intervention
from ..interventions.file import Intervention
from ..load import Model, announce_intervention, load_as_trained
from ..metrics.inference import sample_evenly
from ..report.card import card, example
from ..vit.weights import weights_sha256
from .check import Agreement, check_against_torch
from .graph import ExportGraph, build_graph, need_onnx, to_onnx

if TYPE_CHECKING:
    from ..verify.verify import Certificate
    from ..vit.model import Input

MAX_BYTES = 2 << 30  # limit of one protocol buffer file
DESCRIPTIONS = {
    "images": "RGB images in [0, 1], resized and cropped as `input` says; normalised inside the graph",
    "mask": "True for visible pixels, in the size of the images",
    "parts_kept": "part removal: False removes a part, its patches become background",
    "parts_forced": "True keeps a part wherever it is more likely than the other parts, whatever the background",
    "distance_limits": "token removal: patches farther from their part's prototype become background; infinite: none",
    "logits": "class logits",
    "probabilities": "class probabilities, in the order of `classes`",
    "keep": "visible patches",
    "keep_pixels": "visible pixels inside the visible patches",
    "boxes": "visible boxes in pixels: left, top, right, bottom, the last two exclusive",
    "parts": "part probabilities of every patch, background last",
}


@dataclass(frozen=True)
class Exported:
    folder: Path
    agreement: Agreement
    checked_on: str  # the images of the check, in words
    bytes: int  # of the ONNX file


def export(command: Export, step: Callable[[int], None] | None = None) -> Exported:
    """Write a folder with model.onnx, model.json and README.md; nothing is written if the file disagrees with torch.
    `step` is called after each of four steps."""
    done = step or (lambda _: None)
    need_onnx()
    model = load_as_trained(command.run)
    saved = load_intervention(model) if command.intervention else None
    if saved is not None and saved.changes:
        announce_intervention(model.run.folder, saved.description)
    graph = build_graph(model.method, str(command.run))
    images, checked_on = sample_images(model, command.images, command.limit)
    masks = disc_masks(len(images), model.expects.size) if "mask" in graph.extra_inputs(model.expects.size) else None
    make_folder(command.folder)
    done(1)
    proto = with_defaults(to_onnx(graph, model.expects), graph, saved)
    done(2)
    agreement = check_against_torch(serialize(proto), graph, model.method, saved, images, masks)
    done(3)
    facts = model_facts(model, graph, saved, agreement, proto)
    for name, value in onnx_metadata(facts).items():
        proto.metadata_props.add(key=name, value=value)
    content = serialize(proto)
    replace_with_checksum(command.folder / "model.onnx", lambda partial: partial.write_bytes(content))
    facts["onnx_sha256"] = hashlib.sha256(content).hexdigest()
    write_json_with_checksum(command.folder / "model.json", facts, nan=False)
    certificate = certify(model, saved, images, masks)
    save_text(command.folder / "README.md", card(model, saved, certificate, checked_on, agreement=agreement))
    done(4)
    return Exported(command.folder, agreement, checked_on, len(content))


def serialize(proto: Any) -> bytes:
    if proto.ByteSize() >= MAX_BYTES:
        size = f"{proto.ByteSize() / 1e9:.1f} GB"
        raise UserError(f"the graph has {size}, but one ONNX file holds at most 2 GB: use a smaller backbone")
    return proto.SerializeToString()


def with_defaults(proto: Any, graph: ExportGraph, saved: Intervention | None) -> Any:
    """Give the intervention inputs default values, those of the run's saved intervention, so that they are optional."""
    from onnx import numpy_helper

    for name, value in default_inputs(graph, saved).items():
        proto.graph.initializer.append(numpy_helper.from_array(value.numpy(), name))
    return proto


def default_inputs(graph: ExportGraph, saved: Intervention | None) -> dict[str, Tensor]:
    if not graph.part_count:
        return {}
    inputs, saved = graph.extra_inputs((1, 1)), saved or Intervention()
    parts = torch.arange(graph.part_count)
    inputs["parts_kept"] &= ~torch.isin(parts, torch.tensor(saved.drop, dtype=parts.dtype))
    inputs["parts_forced"] |= torch.isin(parts, torch.tensor(saved.force, dtype=parts.dtype))
    if saved.quantile is not None and saved.thresholds is not None:
        limits = [math.inf if math.isnan(distance) else distance for distance in saved.thresholds]
        inputs["distance_limits"] = torch.tensor(limits)
    return inputs


# ---- images for the check --------------------------------------------------------------------------------------------


def sample_images(model: Model, given: tuple[Path, ...], limit: int) -> tuple[Tensor, str]:
    """float [n, 3, h, w] and a description: the given images, else some of the run's data, else toy images."""
    from ..data.images import Preprocess, decode, find_images, read_image, to_tensor
    from ..data.rows import read_rows
    from ..datasets.toy_images import make_toy

    if given:
        files = find_images(given)[:limit]
        return torch.stack([to_tensor(read_image(file), model.expects) for file in files]), f"{len(files)} images"
    data = model.run.facts["data"]
    if Path(data["path"]).exists():
        seed = model.run.facts["config"].get("split_seed", 0)
        rows = read_rows(Path(data["path"]), layout=data["layout"], seed=seed)
        split = next(name for name in ("test", "val", "train") if len(rows.split_indices(name)))
        indices = sample_evenly(rows.split_indices(split), limit)
        samples = [decode(rows, int(i), Preprocess.of(model.expects), mask=False).image for i in indices]
        return torch.stack(samples).float() / 255, f"{len(samples)} images of {rows.name}, split {split}"
    h, w = model.expects.size
    toy = make_toy(limit, size=max(h, w)).images[:, :, :h, :w].float() / 255
    return toy, f"{limit} toy images, because the run's data are not available here"


def disc_masks(count: int, size: tuple[int, int]) -> Tensor:
    """bool [n, h, w]: arbitrary masks to check a model with that needs masks."""
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, side) for side in size), indexing="ij")
    return torch.stack([(y - 0.1 * (i % 3)).square() + x.square() < (0.4 + 0.1 * (i % 4)) ** 2 for i in range(count)])


def certify(model: Model, saved: Intervention | None, images: Tensor, masks: Tensor | None) -> Certificate | None:
    """The certificate of the torch model on the same images; None for a method that sees the whole image."""
    from ..verify.verify import verify

    if not model.method.blind:
        return None
    if masks is not None:
        return verify(model.method, images, model.method.look_at(images, masks), draws=1)
    if model.method.sees_everything:
        return None
    return verify(model.method if saved is None else apply_intervention(model.method, saved), images, draws=1)


# ---- model.json ------------------------------------------------------------------------------------------------------


def model_facts(
    model: Model, graph: ExportGraph, saved: Intervention | None, agreement: Agreement, proto: Any
) -> dict[str, Any]:
    """The content of model.json: what a program needs to know to use the file."""
    names = [(saved or Intervention()).names.get(k, f"part {k}") for k in range(graph.part_count)] or None
    inputs = {tensor.name: describe_tensor(tensor) for tensor in proto.graph.input}
    for name, value in default_inputs(graph, saved).items():
        inputs[name]["default"] = [None if x == math.inf else x for x in value.tolist()]
    return {
        "format": 1,
        "made_by": f"sightline {__version__}",
        "method": model.run.facts["method"],
        "blind": bool(graph.sight_outputs) and model.method.blind,
        "classes": list(model.classes),
        "input": input_facts(model.expects),
        "inputs": inputs,
        "outputs": {tensor.name: describe_tensor(tensor) for tensor in proto.graph.output},
        "parts": names,
        "intervention": saved.description if saved is not None and saved.changes else None,
        "weights_sha256": weights_sha256(cast(nn.Module, model.method)),
        "checked": asdict(agreement),
        "example": example(model.expects, "mask" in inputs),
    }


def input_facts(expects: Input) -> dict[str, Any]:
    crop = "resize to cover size / crop, crop size from the centre, divide by 255, channels first"
    how = crop if expects.fit == "crop" else "resize to size, whatever the aspect ratio, divide by 255, channels first"
    inside = "the graph subtracts mean and divides by std"
    return asdict(expects) | {"size": list(expects.size), "how": how, "normalisation": inside}


def describe_tensor(value: Any) -> dict[str, Any]:
    """Shape, type and meaning of an input or output of the graph."""
    from onnx import TensorProto

    tensor = value.type.tensor_type
    shape = [d.dim_param or d.dim_value for d in tensor.shape.dim]
    kind = TensorProto.DataType.Name(tensor.elem_type).lower()
    return {"shape": shape, "type": kind, "words": DESCRIPTIONS[value.name]}


def onnx_metadata(facts: dict[str, Any]) -> dict[str, str]:
    """Metadata of the ONNX file: all facts as JSON under one key, and those that other programs may look for alone."""
    common = {"classes": facts["classes"], "parts": facts["parts"]}
    common |= {name: facts["input"][name] for name in ("size", "mean", "std")}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in ({"sightline": facts} | common).items()}


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Export) -> int:
    with bar("exporting", 4) as progress:
        exported = export(command, progress)
    for sentence in filter(None, (exported.agreement.sentence, exported.agreement.proof)):
        print(sentence)
    folder, size = exported.folder, f"{exported.bytes / 1e6:.1f} MB"
    print(f"Checked on {exported.checked_on}. {folder / 'model.onnx'}: {size}; see `example` in")
    print(f"{folder / 'model.json'} or the model card README.md for how to use it.")
    return 0
