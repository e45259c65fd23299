"""An exported file held against the model it was made from, on pictures: before anybody gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..interventions.apply import intervened
from ..interventions.file import Intervention
from ..sight import Method, Prediction, Sight
from ..verify.perturbations import fill, redraws
from .graph import Traced, WithParts, need_onnx

TOLERANCE = 1e-3  # of probabilities
DRAWS = 2
BATCHES = (1, 3)
SIGHT = 0.005  # share of a sight that may differ: where a float decides, the last digit may


@dataclass(frozen=True)
class Agreement:
    """How far a file's answers are from torch's, over everything that was tried."""

    pictures: int
    trials: int  # a picture, in one batch, with one setting of the switches
    probabilities: float  # the largest difference, from the same sight
    sight: float  # the largest share of a picture's sight that differs
    settings: tuple[str, ...]
    redrawn: int | None  # trials of hidden pixels redrawn, none of which changed a bit; None: it is not blind
    tolerance: float = TOLERANCE

    @property
    def sentence(self) -> str:
        ways = f"{len(self.settings)} settings of its switches" if len(self.settings) > 1 else "several batch sizes"
        same = f"{self.pictures} pictures, {ways}: the same class {self.trials:,} times out of {self.trials:,}"
        far = f"probabilities differ by {self.probabilities:.1e} at most (allowed: {self.tolerance:g})"
        return f"Held against torch on {same}; {far}, sights in {self.sight:.2%} of a picture at most."

    @property
    def proof(self) -> str | None:
        if self.redrawn is None:
            return None
        redraws = f"{self.redrawn:,} redraws of hidden pixels"
        return f"Blind outside its sight: {redraws} changed no bit of the file's answers."


def open_session(proto: bytes | str) -> Any:
    need_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of inputs that have a default, which is meant
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # while torch computes
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def run(session: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {name: value.numpy() for name, value in given.items()})
    return {name: torch.from_numpy(np.array(value)) for name, value in zip(names, found, strict=True)}


# ---- the same answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Switches, as the file has them and as torch has them."""

    words: str
    inputs: dict[str, Tensor] = field(default_factory=dict)
    intervention: Intervention | None = None


def settings(traced: Traced, images: Tensor) -> Iterator[Setting]:
    """As it is kept with the run, as trained, without some part, and without distant patches."""
    yield Setting("as it is kept")
    if not isinstance(traced, WithParts):
        return
    parts, plain = traced.method.where.parts, traced.more_inputs((1, 1))
    yield Setting("as trained", plain, Intervention())
    if parts > 1:
        for part in (0, parts - 1):
            others = torch.arange(parts) != part
            yield Setting(f"without part {part}", plain | {"parts_kept": others}, Intervention(drop=(part,)))
    yield Setting("part 0 forced", plain | {"parts_forced": torch.arange(parts) == 0}, Intervention(force=(0,)))
    with torch.no_grad():
        distances = traced.method.find(images).deciding.distances.flatten()
    # Halfway between two patches: on a patch's own distance the last digit would decide.
    ordered = distances.sort().values
    gaps = (ordered[1:] - ordered[:-1])[len(ordered) // 4 : 3 * len(ordered) // 4]
    place = int(gaps.argmax()) + len(ordered) // 4
    limit = float((ordered[place] + ordered[place + 1]) / 2)
    limits = torch.full((parts,), limit)
    yield Setting(
        "without distant patches", plain | {"distance_limits": limits}, Intervention((), 0.5, (limit,) * parts)
    )


@torch.no_grad()
def compare(
    file: bytes | str, traced: Traced, method: Method, kept: Intervention | None, images: Tensor, masks: Tensor | None
) -> Agreement:
    """Refuses a file that says anything else than the model does. `kept` is what corrects the model, if anything."""
    session, ways, trials, far, sights = open_session(file), [], 0, 0.0, 0.0
    told = {} if masks is None else {"mask": masks}
    for way in settings(traced, images):
        correction = kept if way.intervention is None else way.intervention
        reference = intervened(method, correction) if correction is not None else method
        expected = answer(reference, images, masks)
        for size in (len(images),) if ways else (len(images), *BATCHES):
            given = {name: value[:size] for name, value in {"images": images, **told}.items()}
            found = run(session, given | way.inputs)
            check_other_class(found["probabilities"], expected.probabilities[:size], way.words)
            same = reference.judge(given["images"], seen_by(found, expected.sight[:size])).probabilities
            far = max(far, float((found["probabilities"] - same).abs().max()))
            sights = max(sights, other_sight(found, expected.sight[:size], images.shape[-2:]))
            trials += len(given["images"])
        ways.append(way.words)
    if far > TOLERANCE or sights > SIGHT:
        raise UserError(
            f"the exported file differs from the model: probabilities by {far:.2g} (allowed: {TOLERANCE:g}), sights by "
            f"{sights:.2%} (allowed: {SIGHT:.1%}); it was not kept. Other pictures (--images) may tell more"
        )
    blind = method.blind and bool(traced.cut)
    redrawn = prove(file, traced, images, masks) if blind else None
    return Agreement(len(images), trials, far, sights, tuple(ways), redrawn)


def answer(method: Method, images: Tensor, masks: Tensor | None) -> Prediction:
    if masks is not None:
        return method.judge(images, method.look_at(images, masks))
    sight = method.look(images)
    return Prediction(method.judge(images, sight).logits, sight)


def check_other_class(found: Tensor, expected: Tensor, words: str) -> None:
    wrong = (found.argmax(dim=1) != expected.argmax(dim=1)).nonzero().flatten().tolist()
    top = expected.topk(min(2, expected.shape[1]), dim=1).values
    surely = [i for i in wrong if top[i, 0] - top[i, -1] > TOLERANCE]  # two classes alike to so many digits are a tie
    if surely:
        many = f"{len(surely)} of {len(found)} pictures"
        raise UserError(f"the exported file answers {many} with another class, {words}; it was not kept")


def seen_by(found: Mapping[str, Tensor], otherwise: Sight) -> Sight:
    """The file's own sight, so that answers are compared that were made from the same."""
    parts = {name: found[name] for name in ("keep", "keep_pixels", "boxes", "parts") if name in found}
    return Sight(**parts) if parts else otherwise


def other_sight(found: Mapping[str, Tensor], expected: Sight, size: tuple[int, ...]) -> float:
    """The largest share of a picture that is visible in one and not in the other."""
    differs = seen_by(found, expected).visible(size) != expected.visible(size)
    return float(differs.float().mean(dim=(1, 2)).max())


# ---- the proof, on the file ------------------------------------------------------------------------------------------


def second_half(file: bytes | str, traced: Traced) -> bytes:
    """What the file answers from the sight, cut out of it: onnxruntime refuses it if it needs more than its inputs."""
    import onnx
    from onnx.utils import Extractor

    model = onnx.load(file) if isinstance(file, str) else onnx.load_from_string(file)
    told = [one.name for one in model.graph.input if one.name == "mask"]  # it may count them by their masks
    half = Extractor(model).extract_model(["images", *traced.cut, *told], ["logits", "probabilities"])
    return half.SerializeToString()


def prove(file: bytes | str, traced: Traced, images: Tensor, masks: Tensor | None) -> int:
    """The number of redraws of hidden pixels, NaN among them, none of which changed a bit."""
    session, judge = open_session(file), open_session(second_half(file, traced))
    found = run(session, {"images": images} | ({} if masks is None else {"mask": masks}))
    sight = {name: found[name] for name in traced.cut}
    hidden = ~Sight(**sight).visible(images.shape[-2:])
    sight |= {} if masks is None else {"mask": torch.zeros_like(masks)}  # what was in it is in the sight, or nowhere
    before, trials = run(judge, {"images": images, **sight}), 0
    if (before["probabilities"] - found["probabilities"]).abs().max() > TOLERANCE:
        raise UserError("the exported file answers from more than its sight; it was not kept")
    for _, redrawn in redraws(images, hidden, DRAWS, torch.Generator().manual_seed(0)):
        after = run(judge, {"images": redrawn, **sight})
        if not all(torch.equal(before[name], after[name]) for name in before):
            raise UserError("the exported file is not blind outside its sight; it was not kept")
        trials += int(hidden.flatten(1).any(dim=1).sum())
    visible = run(judge, {"images": fill(images, ~hidden, 1 - images), **sight})
    assert hidden.all() or not torch.equal(before["logits"], visible["logits"]), "nothing at all changes its answers"
    return trials
