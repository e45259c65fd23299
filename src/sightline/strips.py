"""Pictures of interventions: what the model would see of the same pictures, without each part, and without doubt."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from PIL import Image
from torch import Tensor

from .audit.maps import as_seen, sheet, with_parts
from .interventions import Intervention
from .methods.pdiscoformer import PartLearner
from .search import WORDS, Search, Trial

STRIP = (0.99, 0.97)


@torch.no_grad()
def strips(method: PartLearner, images: Tensor, found: Search) -> dict[str, Image.Image]:
    """`parts`: every part left out, and what that does on validation data; `quantiles`: more and more removed."""
    looked = method.find(images)
    plain = method.decide(images, looked)
    assert plain.parts is not None

    def row(intervention: Intervention) -> Tensor:
        return as_seen(images, method.decide(images, looked, intervention.correction))

    def captioned(trials: Iterable[Trial]) -> dict[str, Tensor]:
        what = WORDS[found.objective]
        return {f"{t.step}: {what} {100 * t.score:.1f} % ({t.gain.figure})": row(t.intervention) for t in trials}

    by_quantile = {trial.intervention.quantile: trial for trial in found.trials}
    whole = {"the picture": images, "what the model sees": as_seen(images, plain)}
    parts = whole | {"its parts": with_parts(images, plain)}
    parts |= captioned(trial for trial in found.trials if trial.intervention.quantile is None)
    quantiles = whole | captioned(by_quantile[q] for q in STRIP if q in by_quantile)
    if found.chosen.changes:
        quantiles[f"chosen: {found.chosen.words}"] = row(found.chosen)
    return {"parts": sheet(parts), "quantiles": sheet(quantiles)}
