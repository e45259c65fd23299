"""From decoded images to the columns of a result: predictions (`Scorer`) or features and sights (`Embedder`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images import Preprocess, ResizeCrop
from ..data.remote import StorageError
from ..errors import UserError
from ..load import Model, announce_intervention, load_as_trained, with_saved_intervention
from ..vit.weights import weights_sha256
from .calibration import Reference, features_of, reference_of, temperature_of
from .parts import Column
from .sources import Item, read_item

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..sight import Prediction

Values = dict[str, Any]  # of each column, one entry per image


# ---- decoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Decoded:
    """The readable images of a batch, and why the others are not."""

    images: Tensor  # uint8 [readable, 3, h, w]
    errors: list[str | None]  # one per image of the batch


@dataclass(frozen=True)
class DecodeBatch:
    """Reads and preprocesses a batch, in threads if there are several: Pillow decodes outside of Python's lock."""

    preprocess: Preprocess
    threads: int = 1

    def __call__(self, items: Sequence[Item]) -> Decoded:
        if self.threads > 1:
            with ThreadPoolExecutor(self.threads) as pool:
                results = list(pool.map(self.decode, items))
        else:
            results = list(map(self.decode, items))
        images = [one for one in results if not isinstance(one, str)]
        # NumPy, because torch would copy in several threads, which compete with those that predict.
        stacked = np.stack(images) if images else np.empty((0, 3, *self.preprocess.size), np.uint8)
        return Decoded(torch.from_numpy(stacked), [one if isinstance(one, str) else None for one in results])

    def decode(self, item: Item) -> np.ndarray | str:
        try:
            image = read_item(item)
            return ResizeCrop.of(image.size, self.preprocess).image(image).numpy()
        except StorageError:
            raise
        except UserError as error:
            return str(error)


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedRun:
    """A model, and what identifies it in a result."""

    model: Model
    weights: str
    intervention: str | None


def open_run(run: str | Path, device: str, *, intervention: bool, announce: bool = True) -> OpenedRun:
    trained = load_as_trained(run, device)
    weights = weights_sha256(cast(nn.Module, trained.method))
    model = with_saved_intervention(trained) if intervention else trained
    applied = model.run.facts.get("intervention")
    if applied is None:
        return OpenedRun(model, weights, None)
    if announce:
        announce_intervention(model.run.folder, applied["words"])
    return OpenedRun(model, weights, intervention_hash(applied))


def intervention_hash(facts: Mapping[str, Any]) -> str:
    """Of what it does to predictions, whatever the parts are called."""
    effect = {name: facts[name] for name in ("drop", "force", "quantile", "thresholds")}
    return hashlib.sha256(json.dumps(effect, sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class Judged:
    """A prediction of a batch with what every result says about its sight."""

    prediction: Prediction
    visible: Tensor  # bool [b, h, w]

    @property
    def columns(self) -> Values:
        coverage = self.visible.flatten(1).float().mean(dim=1)
        return {"coverage": coverage.cpu().numpy(), "saw_nothing": (coverage == 0).cpu().tolist()}


@torch.no_grad()
def judge(model: Model, images: Tensor) -> Judged:
    """Look and judge; `images` are bytes, on any device."""
    device = next(model.method.parameters()).device
    floats = images.to(device).float() / 255
    prediction = model.method.judge(floats, model.method.look(floats))
    return Judged(prediction, prediction.sight.visible(model.expects.size))


def blank_batch(model: Model) -> Judged:
    """Of one black image, to learn what the method returns."""
    return judge(model, torch.zeros((1, 3, *model.expects.size), dtype=torch.uint8))


# ---- predictions -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Scorer:
    """Predictions with everything that a part holds of them."""

    model: Model
    temperature: float | None = None
    reference: Reference | None = None
    columns: list[Column] = field(init=False)
    notes: Values = field(init=False)
    kind = "predict"

    def __post_init__(self) -> None:
        parts = blank_batch(self.model).prediction.sight.parts
        single = [Column("predicted", "string"), *(Column(name, "float32") for name in
                  ("probability", "calibrated", "coverage", "distance"))]  # fmt: skip
        vectors = [Column("probabilities", "float32", len(self.model.classes))]
        vectors += [] if parts is None else [Column("parts", "float32", parts.shape[1])]
        self.columns = [*single, Column("saw_nothing", "bool_"), *vectors]
        self.notes = {"classes": list(self.model.classes), "temperature": self.temperature}

    def __call__(self, images: Tensor) -> Values:
        judged = judge(self.model, images)
        logits, parts = judged.prediction.logits.float(), judged.prediction.sight.parts
        probabilities, labels = logits.softmax(dim=-1), logits.argmax(dim=-1)
        features, calibrated, distance = features_of(judged.prediction), None, None
        if self.temperature is not None:
            calibrated = at_labels((logits / self.temperature).softmax(dim=-1), labels)
        if self.reference is not None and features is not None:
            distance = self.reference.distances(features).cpu().numpy()
        nothing = [None] * len(images)
        values = judged.columns | {
            "predicted": [self.model.classes[k] for k in labels.tolist()],
            "probability": at_labels(probabilities, labels),
            "calibrated": nothing if calibrated is None else calibrated,
            "distance": nothing if distance is None else distance,
            "probabilities": probabilities.cpu().numpy(),
        }
        return values if parts is None else values | {"parts": parts.float().mean(dim=(2, 3)).cpu().numpy()}


def at_labels(probabilities: Tensor, labels: Tensor) -> np.ndarray:
    return probabilities.gather(1, labels[:, None])[:, 0].cpu().numpy()


# ---- features --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Embedder:
    """Features, and the sight as one bit per pixel (NumPy's packbits over the rows)."""

    model: Model
    columns: list[Column] = field(init=False)
    notes: Values = field(init=False)
    kind = "embed"

    def __post_init__(self) -> None:
        features = features_of(blank_batch(self.model).prediction)
        if features is None:
            raise UserError(f"{self.model.run.facts['method']}: does not return its features")
        single = [Column("coverage", "float32"), Column("saw_nothing", "bool_"), Column("sight", "binary")]
        self.columns = [Column("features", "float32", features.shape[1]), *single]
        self.notes = {"sight_size": list(self.model.expects.size)}

    def __call__(self, images: Tensor) -> Values:
        judged = judge(self.model, images)
        features = features_of(judged.prediction)
        assert features is not None, "checked with a blank image"
        sight = [np.packbits(one).tobytes() for one in judged.visible.cpu().numpy()]
        return judged.columns | {"features": features.cpu().numpy(), "sight": sight}


def unpack_sight(content: bytes, size: Sequence[int]) -> np.ndarray:
    """bool [h, w]: a value of the column `sight`; `size` is in the metadata of the part as sight_size."""
    h, w = size
    return np.unpackbits(np.frombuffer(content, np.uint8), count=h * w).reshape(h, w).astype(bool)


Score = Scorer | Embedder
MakeScore = Callable[[Model], Score]


def scorer_maker(
    opened: OpenedRun, accelerator: Accelerator, *, kind: str, distance: bool, batch: int, workers: int
) -> MakeScore:
    """What makes a `Score` of a model, here or on another machine, where the run's training data are not."""
    if kind == "embed":
        return Embedder
    with accelerator.main_process_first():
        temperature = temperature_of(opened.model, opened.weights, opened.intervention)
    reference = None
    if distance:  # all processes compute it together, unless it is known
        reference = reference_of(
            opened.model, opened.weights, opened.intervention, accelerator, batch=batch, workers=workers
        )
    return partial(Scorer, temperature=temperature, reference=reference)
