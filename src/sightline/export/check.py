"""The check of an exported ONNX file against the torch model, on real images, before the file is saved.

The same class and the same probabilities for every image, several batch sizes and several interventions; and for a
blind method the proof on the file itself: redrawing hidden pixels changes no bit of its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..interventions.apply import apply_intervention
from ..interventions.file import Intervention
from ..methods.base import PartMethod
from ..metrics.inference import sight_for
from ..sight import Method, Prediction, Sight
from ..verify.perturbations import fill, redraws
from .graph import ExportGraph, need_onnx

TOLERANCE = 1e-3  # of probabilities
SIGHT_TOLERANCE = 0.005  # fraction of an image's sight that may differ: rounding can decide a pixel at a threshold
DRAWS = 2
BATCH_SIZES = (1, 3)


@dataclass(frozen=True)
class Agreement:
    """How far the file's output is from torch's, over everything that was compared. Stored in model.json."""

    images: int
    trials: int  # one image, in one batch, with one setting of the intervention inputs
    probabilities: float  # the largest difference, given the same sight
    sight: float  # the largest fraction of an image's sight that differs
    settings: tuple[str, ...]
    redrawn: int | None  # redraws of hidden pixels, none of which changed a bit; None: the method is not blind
    tolerance: float = TOLERANCE

    @property
    def sentence(self) -> str:
        many = len(self.settings) > 1
        tried = f"{len(self.settings)} settings of the intervention inputs" if many else "several batch sizes"
        return (
            f"Checked against torch on {self.images} images with {tried}: same class in {self.trials:,} of "
            f"{self.trials:,} cases, maximal difference {self.probabilities:.1e} in probabilities (tolerance "
            f"{self.tolerance:g}) and {self.sight:.2%} of an image in sight."
        )

    @property
    def proof(self) -> str | None:
        if self.redrawn is None:
            return None
        return (
            f"Blind outside its sight: {self.redrawn:,} redraws of hidden pixels changed no bit of the file's output."
        )


def open_session(proto: bytes | str) -> Any:
    need_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns about inputs with a default value, which are intended
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # while torch computes
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {name: value.numpy() for name, value in inputs.items()})
    return {name: torch.from_numpy(np.array(value)) for name, value in zip(names, outputs, strict=True)}


# ---- the same predictions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One setting of the intervention inputs: as inputs of the file, and as an intervention in torch."""

    name: str
    inputs: dict[str, Tensor] = field(default_factory=dict)
    intervention: Intervention | None = None  # None: the one saved in the run


def settings(graph: ExportGraph, images: Tensor) -> Iterator[Setting]:
    """The saved intervention, none, part removal, a forced part, and token removal."""
    yield Setting("as saved")
    if not graph.part_count:
        return
    parts, plain = graph.part_count, graph.extra_inputs((1, 1))
    yield Setting("as trained", plain, Intervention())
    if parts > 1:
        for part in (0, parts - 1):
            others = torch.arange(parts) != part
            yield Setting(f"without part {part}", plain | {"parts_kept": others}, Intervention(drop=(part,)))
    yield Setting("part 0 forced", plain | {"parts_forced": torch.arange(parts) == 0}, Intervention(force=(0,)))
    with torch.no_grad():
        distances = cast(PartMethod, graph.method).detect(images).mask_assignment.distances.flatten()
    # Half-way inside the widest gap between two patches: at a patch's own distance rounding would decide.
    ordered = distances.sort().values
    gaps = (ordered[1:] - ordered[:-1])[len(ordered) // 4 : 3 * len(ordered) // 4]
    below = int(gaps.argmax()) + len(ordered) // 4
    limit = float((ordered[below] + ordered[below + 1]) / 2)
    limits = torch.full((parts,), limit)
    yield Setting("token removal", plain | {"distance_limits": limits}, Intervention((), 0.5, (limit,) * parts))


@torch.no_grad()
def check_against_torch(
    file: bytes | str, graph: ExportGraph, method: Method, saved: Intervention | None, images: Tensor,
    masks: Tensor | None,
) -> Agreement:  # fmt: skip
    """Compare the file with the model; an error if they differ. `saved` is the run's intervention, if it has one."""
    session, names, trials, difference, sight_change = open_session(file), [], 0, 0.0, 0.0
    every_input = {"images": images} | ({} if masks is None else {"mask": masks})
    for setting in settings(graph, images):
        intervention = saved if setting.intervention is None else setting.intervention
        reference = apply_intervention(method, intervention) if intervention is not None else method
        sight = sight_for(reference, images, masks)
        expected = Prediction(reference.judge(images, sight).logits, sight)
        for size in (len(images),) if names else (len(images), *BATCH_SIZES):
            inputs = {name: value[:size] for name, value in every_input.items()}
            outputs = run_session(session, inputs | setting.inputs)
            check_same_class(outputs["probabilities"], expected.probabilities[:size], setting.name)
            same = reference.judge(inputs["images"], sight_of_file(outputs, expected.sight[:size])).probabilities
            difference = max(difference, float((outputs["probabilities"] - same).abs().max()))
            sight_change = max(sight_change, sight_difference(outputs, expected.sight[:size], images.shape[-2:]))
            trials += len(inputs["images"])
        names.append(setting.name)
    if difference > TOLERANCE or sight_change > SIGHT_TOLERANCE:
        raise UserError(
            f"the exported file differs from the model: probabilities by {difference:.2g} (tolerance {TOLERANCE:g}), "
            f"sight by {sight_change:.2%} (tolerance {SIGHT_TOLERANCE:.1%}); it was not saved. Try other --images"
        )
    redrawn = prove_blind(file, graph, images, masks) if method.blind and graph.sight_outputs else None
    return Agreement(len(images), trials, difference, sight_change, tuple(names), redrawn)


def check_same_class(found: Tensor, expected: Tensor, setting: str) -> None:
    """The same class for every image, unless the two likeliest classes tie within the tolerance."""
    differ = (found.argmax(dim=1) != expected.argmax(dim=1)).nonzero().flatten().tolist()
    top = expected.topk(min(2, expected.shape[1]), dim=1).values
    wrong = [i for i in differ if top[i, 0] - top[i, -1] > TOLERANCE]
    if wrong:
        raise UserError(
            f"the exported file predicts another class for {len(wrong)} of {len(found)} images ({setting}); it was not "
            "saved"
        )


def sight_of_file(outputs: Mapping[str, Tensor], otherwise: Sight) -> Sight:
    """The sight that the file gives out, so that probabilities are compared for the same sight."""
    tensors = {name: outputs[name] for name in ("keep", "keep_pixels", "boxes", "parts") if name in outputs}
    return Sight(**tensors) if tensors else otherwise


def sight_difference(outputs: Mapping[str, Tensor], expected: Sight, size: tuple[int, ...]) -> float:
    """The largest fraction of an image that is visible in one sight and not in the other."""
    differs = sight_of_file(outputs, expected).visible(size) != expected.visible(size)
    return float(differs.float().mean(dim=(1, 2)).max())


# ---- the proof, on the file ------------------------------------------------------------------------------------------


def extract_judge(file: bytes | str, graph: ExportGraph) -> bytes:
    """The part of the file that computes the prediction from the sight. onnxruntime rejects it if it needs any other
    input."""
    import onnx
    from onnx.utils import Extractor

    model = onnx.load(file) if isinstance(file, str) else onnx.load_from_string(file)
    mask = [tensor.name for tensor in model.graph.input if tensor.name == "mask"]  # its shape may give the batch size
    judge = Extractor(model).extract_model(["images", *graph.sight_outputs, *mask], ["logits", "probabilities"])
    return judge.SerializeToString()


def prove_blind(file: bytes | str, graph: ExportGraph, images: Tensor, masks: Tensor | None) -> int:
    """The number of redraws of hidden pixels, NaN among them, after checking that none changed a bit of the output."""
    session, judge = open_session(file), open_session(extract_judge(file, graph))
    outputs = run_session(session, {"images": images} | ({} if masks is None else {"mask": masks}))
    sight = {name: outputs[name] for name in graph.sight_outputs}
    hidden = ~Sight(**sight).visible(images.shape[-2:])
    sight |= {} if masks is None else {"mask": torch.zeros_like(masks)}  # its content must come through the sight
    before, trials = run_session(judge, {"images": images, **sight}), 0
    if (before["probabilities"] - outputs["probabilities"]).abs().max() > TOLERANCE:
        raise UserError("the exported file predicts from more than its sight; it was not saved")
    for _, redrawn in redraws(images, hidden, DRAWS, torch.Generator().manual_seed(0)):
        after = run_session(judge, {"images": redrawn, **sight})
        if not all(torch.equal(before[name], after[name]) for name in before):
            raise UserError("the exported file is not blind outside its sight; it was not saved")
        trials += int(hidden.flatten(1).any(dim=1).sum())
    visible = run_session(judge, {"images": fill(images, ~hidden, 1 - images), **sight})
    assert hidden.all() or not torch.equal(before["logits"], visible["logits"]), "visible pixels change nothing either"
    return trials
