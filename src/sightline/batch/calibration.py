"""What a run keeps to judge predictions by: a temperature, and where its training images lie.

Temperature: predictions are divided by the temperature that maximises the likelihood of the run's validation labels
(Guo et al. 2017). Distance: that of an image's features to the nearest class mean of the training images, as a multiple
of the median of the training images themselves; features are the first token that the prediction is made from,
L2-normalised. Both are computed once and kept in the folder `reference/` of the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..config import Evaluate
from ..console.files import save_text
from ..errors import UserError
from ..metrics.inference import inference_batches, map_batches, sample_evenly
from ..metrics.predictions import Predictions
from ..training.checkpoint import load_tensors, save_tensors

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..load import Model
    from ..sight import Prediction

TRAINING_IMAGES = 2048  # spread evenly over the training split
AS_TRAINED = "as-trained"
LIMITS = math.log(0.01), math.log(100.0)  # of the logarithm of the temperature


@dataclass(frozen=True)
class Reference:
    """The class means [C, D] of the normalised features of training images, and their median distance to these."""

    means: Tensor
    scale: float

    def distances(self, features: Tensor) -> Tensor:
        """[B]: 1 is as far from the nearest class mean as the median training image."""
        nearest = torch.cdist(F.normalize(features.float(), dim=-1), self.means.to(features.device)).amin(dim=1)
        return nearest / self.scale

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.means.numpy().tobytes() + repr(self.scale).encode()).hexdigest()


def features_of(prediction: Prediction) -> Tensor | None:
    """[B, D]: the first token that the prediction is made from, if the method tells."""
    return None if prediction.tokens is None else prediction.tokens[:, 0].float()


# ---- temperature -----------------------------------------------------------------------------------------------------


def temperature_of(model: Model, weights: str, intervention: str | None) -> float | None:
    """Of the validation predictions stored in the run: those with this intervention, if it has one. None, with a note,
    if there are none."""
    file = model.run.folder / "reference" / f"temperature-{(intervention or AS_TRAINED)[:16]}.json"
    predictions = validation_predictions(model)
    if not predictions.is_file():
        with_ = " with this intervention (make them: sightline evaluate RUN --split val)" if intervention else ""
        note(f"{model.run.folder}: no validation predictions{with_}, so probabilities are not calibrated")
        return None
    source = hashlib.sha256(predictions.read_bytes()).hexdigest()
    known = read_kept(file)
    if known.get("weights") == weights and known.get("predictions") == source:
        return known["temperature"]
    fitted = fit_temperature(Predictions.load_csv(predictions))
    keep_text(file, json.dumps(fitted | {"weights": weights, "predictions": source}, indent=1) + "\n")
    return fitted["temperature"]


def validation_predictions(model: Model) -> Path:
    applied = model.run.facts.get("intervention")
    return model.run.folder / (applied["folder"] if applied else "") / "predictions" / "val.csv"


def fit_temperature(predictions: Predictions) -> dict[str, float]:
    """The temperature with the lowest negative log-likelihood, and that before and after."""
    from scipy.optimize import minimize_scalar

    smallest = np.finfo(np.float32).smallest_subnormal
    logits = np.log(predictions.probabilities.astype(np.float64).clip(min=smallest))

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        shifted = scaled - scaled.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=1))
        return float((log_sum - shifted[np.arange(len(shifted)), predictions.labels]).mean())

    best = minimize_scalar(loss, bounds=LIMITS, method="bounded", options={"xatol": 1e-6})
    return {"temperature": math.exp(best.x), "images": len(predictions), "nll": loss(0.0), "nll_calibrated": best.fun}


# ---- distance --------------------------------------------------------------------------------------------------------


def reference_of(
    model: Model, weights: str, intervention: str | None, accelerator: Accelerator, *, batch: int, workers: int
) -> Reference | None:
    """From the run folder, or computed now from its training data. None, with a note, if that is impossible."""
    file = model.run.folder / "reference" / f"training-{(intervention or AS_TRAINED)[:16]}.safetensors"
    known = None
    if accelerator.is_main_process and file.is_file():
        tensors, facts = load_tensors(file)
        if facts.get("weights") == weights and facts.get("intervention") == intervention:
            known = Reference(tensors["means"], facts["scale"])
    (known,) = broadcast_object_list([known])  # all processes must take the same branch
    if known is not None:
        return known
    try:
        reference = measure_reference(model, accelerator, batch=batch, workers=workers)
    except UserError as error:
        note(f"distances to the training images are not measured ({error})")
        return None
    facts = {"weights": weights, "intervention": intervention, "scale": reference.scale}
    try:
        file.parent.mkdir(exist_ok=True)
        save_tensors(file, {"means": reference.means}, facts)
    except (OSError, UserError):
        note(f"{file}: cannot be written, so it is computed again next time")
    return reference


@torch.no_grad()
def measure_reference(model: Model, accelerator: Accelerator, *, batch: int, workers: int) -> Reference:
    from ..load import evaluation_data

    rows = evaluation_data(Evaluate(run=model.run.folder), model.run).rows
    indices = sample_evenly(rows.split_indices("train"), TRAINING_IMAGES)
    batches = inference_batches(rows, indices, model.expects, accelerator, batch=batch, workers=workers)

    def embed(images: Tensor, _: Tensor | None) -> Tensor:
        features = features_of(model.method.judge(images, model.method.look(images)))
        if features is None:
            raise UserError(f"{model.run.facts['method']} does not return its features")
        return F.normalize(features, dim=-1)

    with closing(batches):
        features = torch.from_numpy(map_batches(embed, batches, accelerator))
    labels = torch.from_numpy(rows.labels[indices])
    means = torch.stack([features[labels == k].mean(dim=0) for k in labels.unique()])
    scale = float(torch.cdist(features, means).amin(dim=1).median())
    return Reference(means, max(scale, 1e-6))


# ---- what is kept ----------------------------------------------------------------------------------------------------


def read_kept(file: Path) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def keep_text(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(exist_ok=True)
        save_text(file, text)
    except (OSError, UserError):
        note(f"{file}: cannot be written, so it is computed again next time")


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
