"""Models that leave their run folder: one ONNX file that was held against torch before it was kept, what one must know
to use it (model.json), and a model card.

    sightline export runs/x --out exported
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..config import Export
from ..console.files import replace_durably, save_text
from ..console.terminal import bar
from ..errors import UserError
from ..interventions.file import Intervention
from ..load import Model, announce, load_as_trained
from ..report.card import example
from ..vit.weights import weights_sha256
from .check import Agreement, compare
from .graph import Traced, WithParts, need_onnx, to_onnx, traceable

if TYPE_CHECKING:
    from ..verify.verify import Certificate
    from ..vit.model import Input

LARGEST = 2 << 30  # bytes in one file of protocol buffers
WORDS = {
    "images": "pictures, RGB in [0, 1], resized and cut as `picture` says; normalised inside",
    "mask": "True where a picture may be seen, in the same size",
    "parts_kept": "False leaves a part out: its patches become background",
    "parts_forced": "True keeps a part wherever it is more likely than the other parts",
    "distance_limits": "patches farther than that from their part's prototype become background; infinite: none do",
    "logits": "scores of the classes",
    "probabilities": "of the classes, in the order of `classes`",
    "keep": "patches that were seen",
    "keep_pixels": "pixels that were seen, inside of these patches",
    "boxes": "left, top, right, bottom of what was seen, in pixels, the latter two excluded",
    "parts": "shares of the parts and, last, of the background, patch by patch",
}


@dataclass(frozen=True)
class Exported:
    folder: Path
    agreement: Agreement
    pictures: str  # which they were, in words
    bytes: int  # of the ONNX file


def export(command: Export, step: Callable[[int], None] | None = None) -> Exported:
    """A folder with model.onnx, model.json and README.md; nothing of it where the file says anything else than torch.
    `step` is told when one of four steps is done."""
    from ..report.card import card

    done = step or (lambda _: None)
    need_onnx()
    model = load_as_trained(command.run)
    kept = intervention_of(model) if command.intervention else None
    if kept is not None and kept.changes:
        announce(model.run.folder, kept.words)
    traced = traceable(model.method, str(command.run))
    images, words = pictures_of(model, command.images, command.limit)
    masks = discs(len(images), model.expects.size) if "mask" in traced.more_inputs(model.expects.size) else None
    make_folder(command.folder)
    done(1)
    proto = with_defaults(to_onnx(traced, model.expects), traced, kept)
    done(2)
    agreement = compare(serialised(proto), traced, model.method, kept, images, masks)
    done(3)
    facts = about(model, traced, kept, agreement, proto)
    for name, value in facts_for_metadata(facts).items():
        proto.metadata_props.add(key=name, value=value)
    content = serialised(proto)
    replace_durably(command.folder / "model.onnx", lambda partial: partial.write_bytes(content))
    save_text(command.folder / "model.json", json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    certificate = certificate_of(model, kept, images, masks)
    save_text(command.folder / "README.md", card(model, kept, certificate, words, agreement=agreement))
    done(4)
    return Exported(command.folder, agreement, words, len(content))


def serialised(proto: Any) -> bytes:
    if proto.ByteSize() >= LARGEST:
        size = f"{proto.ByteSize() / 1e9:.1f} GB"
        raise UserError(f"the graph has {size}, and one ONNX file holds 2: use a smaller backbone")
    return proto.SerializeToString()


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from error


def intervention_of(model: Model) -> Intervention | None:
    """Also one that only names parts."""
    from ..interventions.apply import kept

    return kept(model)


def with_defaults(proto: Any, traced: Traced, kept: Intervention | None) -> Any:
    """Inputs that may be left out: then they are as the intervention that is kept with the run has them."""
    from onnx import numpy_helper

    for name, value in defaults(traced, kept).items():
        proto.graph.initializer.append(numpy_helper.from_array(value.numpy(), name))
    return proto


def defaults(traced: Traced, kept: Intervention | None) -> dict[str, Tensor]:
    if not isinstance(traced, WithParts):
        return {}
    said, kept = traced.more_inputs((1, 1)), kept or Intervention()
    parts = torch.arange(traced.method.where.parts)
    said["parts_kept"] &= ~torch.isin(parts, torch.tensor(kept.drop, dtype=parts.dtype))
    said["parts_forced"] |= torch.isin(parts, torch.tensor(kept.force, dtype=parts.dtype))
    if kept.quantile is not None and kept.thresholds is not None:
        limits = [math.inf if math.isnan(distance) else distance for distance in kept.thresholds]
        said["distance_limits"] = torch.tensor(limits)
    return said


# ---- pictures to try it on -------------------------------------------------------------------------------------------


def pictures_of(model: Model, given: tuple[Path, ...], limit: int) -> tuple[Tensor, str]:
    """float [n, 3, h, w] and what they are: as given, or from all over a split of the run's data, or drawn here."""
    from ..data.images import Canvas, decode, find_images, read_image, to_tensor
    from ..data.rows import read_rows
    from ..datasets.toy_images import make_toy

    if limit < 1:
        raise UserError(f"--limit {limit}: at least 1")
    if given:
        files = find_images(given)[:limit]
        return torch.stack([to_tensor(read_image(file), model.expects) for file in files]), f"{len(files)} pictures"
    data = model.run.facts["data"]
    if Path(data["path"]).exists():
        seed = model.run.facts["config"].get("split_seed", 0)
        rows = read_rows(Path(data["path"]), layout=data["layout"], seed=seed)
        split = next(one for one in ("test", "val", "train") if len(rows.where(one)))
        every = rows.where(split)
        some = every[np.linspace(0, len(every) - 1, min(limit, len(every))).round().astype(int)]
        samples = [decode(rows, int(i), Canvas.of(model.expects), mask=False).image for i in some]
        return torch.stack(samples).float() / 255, f"{len(samples)} pictures of {rows.name}, split {split}"
    h, w = model.expects.size
    drawn = make_toy(limit, size=max(h, w)).images[:, :, :h, :w].float() / 255
    return drawn, f"{limit} toy pictures, because the run's data are not here"


def discs(count: int, size: tuple[int, int]) -> Tensor:
    """bool [n, h, w]: masks to try a model with that is told where to look; any will do."""
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, side) for side in size), indexing="ij")
    return torch.stack([(y - 0.1 * (i % 3)).square() + x.square() < (0.4 + 0.1 * (i % 4)) ** 2 for i in range(count)])


def certificate_of(model: Model, kept: Intervention | None, images: Tensor, masks: Tensor | None) -> Certificate | None:
    """The proof in torch, on the same pictures; None for a method that sees everything, and says so."""
    from ..interventions.apply import intervened
    from ..verify.verify import verify

    if not model.method.blind:
        return None
    if masks is not None:
        return verify(model.method, images, model.method.look_at(images, masks), draws=1)
    if model.method.sees_everything:
        return None
    return verify(model.method if kept is None else intervened(model.method, kept), images, draws=1)


# ---- what one must know to use it ------------------------------------------------------------------------------------


def about(model: Model, traced: Traced, kept: Intervention | None, agreement: Agreement, proto: Any) -> dict[str, Any]:
    names = None
    if isinstance(traced, WithParts):
        names = [(kept or Intervention()).names.get(k, f"part {k}") for k in range(traced.method.where.parts)]
    usual = {name: [None if x == math.inf else x for x in v.tolist()] for name, v in defaults(traced, kept).items()}
    inputs = {one.name: described(one) for one in proto.graph.input}
    inputs = {k: v | ({"default": usual[k]} if k in usual else {}) for k, v in inputs.items()}
    return {
        "format": 1,
        "made_by": f"sightline {__version__}",
        "method": model.run.facts["method"],
        "blind": bool(traced.cut) and model.method.blind,
        "classes": list(model.classes),
        "picture": picture_facts(model.expects),
        "inputs": inputs,
        "outputs": {one.name: described(one) for one in proto.graph.output},
        "parts": names,
        "intervention": kept.words if kept is not None and kept.changes else None,
        "weights_sha256": weights_sha256(cast(nn.Module, model.method)),
        "checked": asdict(agreement),
        "example": example(model.expects, "mask" in inputs),
    }


def picture_facts(expects: Input) -> dict[str, Any]:
    how = "resize so that it covers size / crop, cut size from the centre, divide by 255, channels first"
    inside = "the model subtracts mean and divides by std by itself"
    return asdict(expects) | {"size": list(expects.size), "how": how, "normalisation": inside}


def described(value: Any) -> dict[str, Any]:
    """Of a graph's input or output: its shape, its type and what it is."""
    from onnx import TensorProto

    tensor = value.type.tensor_type
    shape = [d.dim_param or d.dim_value for d in tensor.shape.dim]
    return {"shape": shape, "type": TensorProto.DataType.Name(tensor.elem_type).lower(), "words": WORDS[value.name]}


def facts_for_metadata(facts: dict[str, Any]) -> dict[str, str]:
    """Everything under one key, as JSON; and by itself what any program for ONNX files may look for."""
    picture = facts["picture"]
    alone = {"classes": facts["classes"], "parts": facts["parts"], **{k: picture[k] for k in ("size", "mean", "std")}}
    plain = {name: json.dumps(value, ensure_ascii=False) for name, value in alone.items()}
    return {"sightline": json.dumps(facts, ensure_ascii=False), **plain}


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Export) -> int:
    with bar("exporting", 4) as progress:
        made = export(command, progress)
    for sentence in filter(None, (made.agreement.sentence, made.agreement.proof)):
        print(sentence)
    print(f"Tried on {made.pictures}. {made.folder / 'model.onnx'}: {made.bytes / 1e6:.1f} MB; how to use it is in")
    print(f"{made.folder / 'model.json'} (`example`) and in the model card beside it, README.md.")
    return 0
