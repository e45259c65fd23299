"""Load a trained model from its run folder, or from the Hugging Face Hub (`hf:OWNER/NAME`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from .config import Evaluate
from .console.files import make_folder
from .data.fingerprints import fingerprint
from .data.images import mask_to_tensor, read_image, read_mask, to_tensor, to_upright_rgb
from .data.remote import fetch_run, is_url
from .data.rows import Rows, read_rows
from .errors import UserError
from .interventions.apply import apply_intervention, load_intervention
from .interventions.file import FILE
from .methods.restore import Restored, restore
from .metrics.classification import classify
from .metrics.estimates import Metrics
from .metrics.groups import evaluate
from .metrics.predictions import Predictions
from .sight import Sight
from .training.distributed import make_accelerator
from .training.run_folder import Run, check_same_content, has_same_content, read_run, train_counts

if TYPE_CHECKING:
    from .report.notebook import ImagePredictions

ImageLike = str | Path | Image.Image | np.ndarray | Tensor
HUB = "hf:"
LOADED = ("run.json", "best.safetensors", FILE, "metrics.json", "localization.json")  # all that is downloaded
LOG_IN = "log in with `hf auth login`, using a token with write access"


@dataclass(frozen=True)
class Model(Restored):
    """A trained model."""

    @torch.no_grad()
    def predict(self, images: ImageLike | list[Any], mask: str | Path | None = None) -> ImagePredictions:
        """Predict one image or several: files, Pillow images, arrays [h, w, 3] or tensors [3, h, w], of bytes or of
        floats in [0, 1]. A `mask` for a single image, bright where the model may look, replaces its own sight."""
        from .report.notebook import predictions_with_images

        pil_images = [open_image(image) for image in as_list(images)]
        if not pil_images:
            raise UserError("no images: give one, or a list of them")
        device = next(self.method.parameters()).device
        tensors = torch.stack([to_tensor(image, self.expects) for image in pil_images]).to(device)
        sight = self.method.look(tensors) if mask is None else self._sight_from_mask(Path(mask), pil_images, tensors)
        return predictions_with_images(self.method.judge(tensors, sight), tensors, self.classes)

    def _repr_html_(self) -> str:
        from .report.notebook import model_summary_html

        return model_summary_html(self)

    def _sight_from_mask(self, path: Path, images: list[Image.Image], tensors: Tensor) -> Sight:
        if len(images) != 1:
            raise UserError(f"{path}: a mask is for a single image, not for {len(images):,}; predict them one by one")
        mask, image = read_mask(path), images[0]
        if mask.size != image.size:
            sizes = " but its image has ".join("{}×{} pixels".format(*one.size) for one in (mask, image))
            raise UserError(f"{path}: has {sizes}; resize the mask")
        return self.method.look_at(tensors, mask_to_tensor(mask, self.expects)[None].to(tensors.device))


def as_list(images: ImageLike | list[Any]) -> list[Any]:
    if isinstance(images, np.ndarray | Tensor):
        return list(images) if images.ndim in (1, 4) else [images]
    return list(images) if isinstance(images, list | tuple) else [images]


def open_image(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return to_upright_rgb(image)
    if isinstance(image, str | Path):
        return read_image(image)
    if isinstance(image, Tensor) and image.ndim == 3:
        image = image.detach().cpu().movedim(0, -1).numpy()
    if not isinstance(image, np.ndarray):
        raise UserError(f"an image must be a path, a Pillow image or an array, not a {type(image).__name__}")
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise UserError(f"an array of shape {list(image.shape)} is not an image; give [h, w], [h, w, 3] or [h, w, 4]")
    if np.issubdtype(image.dtype, np.floating):
        if not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            raise UserError("an image of floats must have values in [0, 1]; divide by 255, perhaps")
        image = np.round(image * 255).astype(np.uint8)
    if image.dtype != np.uint8:
        raise UserError(f"an array of {image.dtype} is not an image; give bytes (uint8), or floats in [0, 1]")
    return to_upright_rgb(Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image))


# ---- from a run folder -----------------------------------------------------------------------------------------------


def load(folder: str | Path, device: str = "cpu", *, intervention: bool = True) -> Model:
    """`sightline.load`: a run with the intervention saved in it, if any; or, with intervention=False, as trained."""
    model = load_as_trained(folder, device)
    return with_saved_intervention(model) if intervention else model


def load_as_trained(folder: str | Path, device: str = "cpu") -> Model:
    if str(folder).startswith(HUB):
        folder = download_run(str(folder).removeprefix(HUB))
    elif is_url(folder):
        folder = fetch_run(str(folder))
    return Model(**vars(restore(folder, device)))


def load_and_announce(folder: Path, device: str, intervention: bool, *, announce: bool = True) -> Model:
    """As `load`, with a line on standard error if an intervention is applied."""
    model = load(folder, device, intervention=intervention)
    if announce and (applied := model.run.facts.get("intervention")):
        announce_intervention(model.run.folder, applied["words"])
    return model


def announce_intervention(folder: Path, description: str) -> None:
    print(f"sightline: applying {folder / FILE}: {description} (--no-intervention: as trained)", file=sys.stderr)


def with_saved_intervention(model: Model) -> Model:
    """The model with the intervention saved in its run, if any, which is then also in the facts of the run."""
    intervention = load_intervention(model)
    if intervention is None or not intervention.changes:
        return model
    facts = {name: value for name, value in intervention.to_dict().items() if name not in ("names", "facts")}
    facts |= {"folder": intervention.folder, "words": intervention.description}
    # Seeds that were each corrected by a search of their own count as one method.
    facts["kind"] = "found" if "found" in intervention.facts else intervention.folder
    run = Run(model.run.folder, model.run.facts | {"intervention": facts})
    return replace(model, method=apply_intervention(model.method, intervention), run=run)


def open_model(folder: Path, device: str, *, intervention: bool = False) -> tuple[Accelerator, Model]:
    """An accelerator with the precision of training, and the model, as trained or with its saved intervention."""
    accelerator = make_accelerator(device, read_run(folder).facts.get("config", {}).get("precision", "fp32"))
    main = accelerator.is_main_process
    return accelerator, load_and_announce(folder, str(accelerator.device), intervention, announce=main)


# ---- from the Hugging Face Hub ---------------------------------------------------------------------------------------


def check_repository_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        valid = repository.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError(f"{repository}: not a repository name; use OWNER/NAME with letters, digits, -, _ and .")


def hub_error(repository: str, error: Exception) -> UserError:
    """An error of the Hub in one line."""
    from huggingface_hub import errors

    where = f"{repository} on the Hugging Face Hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{where}: cannot be reached while HF_HUB_OFFLINE is set; unset it")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return UserError(f"{where}: does not exist, or is private; log in with `hf auth login`")
    if status == 401:
        return UserError(f"{where}: your token is not accepted; {LOG_IN}")
    if status == 403:
        return UserError(f"{where}: your token lacks the permission; {LOG_IN} there, or choose another OWNER")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{where}: no such revision; leave out @REVISION for the latest")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"{where}: {reason}")


def download_run(name: str) -> Path:
    """The folder of a run on the Hub, OWNER/NAME or OWNER/NAME@REVISION; downloaded once, then cached."""
    from huggingface_hub import errors, snapshot_download

    repository, _, revision = name.partition("@")
    check_repository_name(repository)
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(LOADED)))
    except errors.LocalEntryNotFoundError as error:
        raise UserError(f"{HUB}{name}: neither cached nor reachable; load it once while online") from error
    except Exception as error:  # the Hub raises many kinds
        raise hub_error(repository, error) from error
    if not (folder / "run.json").is_file():
        raise UserError(f"{HUB}{name}: not a Sightline run (no run.json); `sightline push` publishes one")
    return folder


# ---- the data a run is evaluated on ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationData:
    """The data that a run is evaluated on."""

    rows: Rows
    path: Path
    fingerprint: str
    own: bool  # the data that it was trained on


def evaluation_data(command: Evaluate, run: Run) -> EvaluationData:
    """The run's own data are recognised by their fingerprint, wherever they are now, and keep the run's splits."""
    data = run.facts["data"]
    seed = run.facts["config"].get("split_seed", run.facts["seed"])
    if command.data is None:
        path = Path(data["path"])
        if not path.exists():
            raise UserError(f"{path}: the data of this run are no longer there; name their folder: {command.run} DATA")
        rows = read_rows(path, layout=data["layout"], seed=seed)
        found = fingerprint(rows)
        if found != data["fingerprint"]:
            raise UserError(
                f"{path}: the data have changed since this run was trained (fingerprint {found[:12]} instead of "
                f"{data['fingerprint'][:12]}); restore them, or evaluate on them as other data: {command.run} {path}"
            )
        check_same_content(run, rows)
        return EvaluationData(rows, path, found, own=True)
    if command.layout in (None, data["layout"]):
        try:
            rows = read_rows(command.data, layout=data["layout"], seed=seed)
        except UserError:
            rows = None  # other data
        if rows is not None and fingerprint(rows) == data["fingerprint"] and has_same_content(run, rows):
            return EvaluationData(rows, command.data, data["fingerprint"], own=True)
    rows = read_rows(command.data, layout=command.layout, seed=seed, all_test=True)
    found = fingerprint(rows)
    if found == data["fingerprint"] and has_same_content(
        run, rows
    ):  # the same data under another name, such as metashift-animals:0
        return EvaluationData(rows, command.data, found, own=True)
    if command.data.resolve() == Path(data["path"]).resolve():
        note = "the run's data, but changed since: some of these images may have been used in training"
        rows = replace(rows, notes=(*rows.notes, note))
    return EvaluationData(rows, command.data, found, own=False)


def match_classes(model: Model, rows: Rows, path: Path) -> Rows:
    """Map the labels to the model's classes; other data may have fewer classes, or in another order, but no new
    ones."""
    present = {rows.classes[label] for label in np.unique(rows.labels)}
    unknown = sorted(present - set(model.classes))
    if unknown and rows.name == "imagenet-segmentation":
        raise UserError(f"{path}: the model does not know {unknown[0]!r}; use `sightline localize` with these data")
    if unknown:
        known = ", ".join(model.classes[:10])
        raise UserError(f"{path}: the model does not know the class {unknown[0]!r}; its classes are {known}")
    to_model = np.array([model.classes.index(name) if name in present else -1 for name in rows.classes], dtype=np.int64)
    return replace(rows, classes=model.classes, labels=to_model[rows.labels])


def results_folder(command: Evaluate, run: Run, data: EvaluationData) -> Path:
    """The folder for results, made before the work starts."""
    option = (command.layout or "").partition(":")[2]
    intervention = run.facts.get("intervention", {}).get("folder")
    other = () if data.own else ("on", data.path.resolve().stem, option, data.fingerprint[:8])
    folder = command.out or run.folder / "-".join(filter(None, (*other, intervention)))
    if (intervention or not data.own) and folder.resolve() == run.folder.resolve():
        raise UserError(f"{folder}: reserved for the run's own data without intervention; choose another --out")
    make_folder(folder / "predictions")
    return folder


def same_intervention(first: dict[str, Any] | None, second: dict[str, Any] | None) -> bool:
    """Whether two interventions have the same effect, whatever the parts are called."""
    settings = ("drop", "force", "quantile", "thresholds")
    return all((first or {}).get(name) == (second or {}).get(name) for name in settings)


def check_same_data(path: Path, known: str, data: EvaluationData) -> None:
    if known != data.fingerprint:
        raise UserError(f"{path}: holds results on other data (fingerprint {known[:12]}); choose another --out")


def measure(predictions: Predictions, run: Run) -> Metrics:
    """Metrics, class by class too, with the training counts of the groups if the groups are those of training."""
    by_class, counts = classify(predictions), train_counts(run)
    if counts is None or not predictions.group_names:
        return replace(evaluate(predictions), classification=by_class)
    if set(predictions.group_names) <= set(counts):
        return replace(evaluate(predictions, train_group_counts=counts), classification=by_class)
    other = next(name for name in predictions.group_names if name not in counts)
    metrics = evaluate(predictions)
    note = f"groups differ from those of training, which had no {other!r}: training counts are not used"
    return replace(metrics, classification=by_class, warnings=(*metrics.warnings, note))
