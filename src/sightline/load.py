"""A trained model, back from its run folder, or from the Hugging Face hub: `hf:OWNER/NAME`."""

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
from .data.images import mask_to_tensor, read_image, read_mask, to_tensor, upright_rgb
from .data.rows import Rows, fingerprint, read_rows
from .errors import UserError
from .interventions.apply import intervened, kept
from .interventions.file import FILE
from .methods.restore import Restored, restore
from .metrics.estimates import Metrics
from .metrics.groups import evaluate
from .metrics.predictions import Predictions
from .sight import Sight
from .training.distributed import make_accelerator
from .training.run_folder import Run, read_run, train_counts

if TYPE_CHECKING:
    from .report.notebook import Answer

Picture = str | Path | Image.Image | np.ndarray | Tensor
HUB = "hf:"
LOADED = ("run.json", "best.safetensors", FILE, "metrics.json", "localization.json")  # all that is downloaded
LOG_IN = "log in with `hf auth login`, with a token that may write"


@dataclass(frozen=True)
class Model(Restored):
    """A trained model: ask it about images."""

    @torch.no_grad()
    def predict(self, pictures: Picture | list[Any], mask: str | Path | None = None) -> Answer:
        """Answers for one picture or several: files, Pillow images, arrays [h, w, 3] or tensors [3, h, w] of bytes or
        of floats in [0, 1]. A `mask` of one picture, bright where it may be seen, takes the place of where the method
        would look."""
        from .report.notebook import answer_of

        opened = [open_image(one) for one in as_list(pictures)]
        if not opened:
            raise UserError("no pictures: give one, or a list of them")
        device = next(self.method.parameters()).device
        images = torch.stack([to_tensor(one, self.expects) for one in opened]).to(device)
        sight = self.method.look(images) if mask is None else self._drawn(Path(mask), opened, images)
        return answer_of(self.method.judge(images, sight), images, self.classes)

    def _repr_html_(self) -> str:
        from .report.notebook import model_html

        return model_html(self)

    def _drawn(self, path: Path, pictures: list[Image.Image], images: Tensor) -> Sight:
        if len(pictures) != 1:
            raise UserError(f"{path}: one mask is for one picture, not for {len(pictures):,}")
        mask, picture = read_mask(path), pictures[0]
        if mask.size != picture.size:
            sizes = " but its picture has ".join("{}×{} pixels".format(*one.size) for one in (mask, picture))
            raise UserError(f"{path}: {sizes}")
        return self.method.look_at(images, mask_to_tensor(mask, self.expects)[None].to(images.device))


def as_list(pictures: Picture | list[Any]) -> list[Any]:
    if isinstance(pictures, np.ndarray | Tensor):
        return list(pictures) if pictures.ndim in (1, 4) else [pictures]
    return list(pictures) if isinstance(pictures, list | tuple) else [pictures]


def open_image(one: Any) -> Image.Image:
    if isinstance(one, Image.Image):
        return upright_rgb(one)
    if isinstance(one, str | Path):
        return read_image(one)
    if isinstance(one, Tensor) and one.ndim == 3:
        one = one.detach().cpu().movedim(0, -1).numpy()
    if not isinstance(one, np.ndarray):
        raise UserError(f"a picture is a path, a Pillow image or an array, not a {type(one).__name__}")
    if one.ndim not in (2, 3) or (one.ndim == 3 and one.shape[2] not in (1, 3, 4)):
        raise UserError(f"an array of {list(one.shape)} is no picture: [h, w], [h, w, 3] or [h, w, 4]")
    if np.issubdtype(one.dtype, np.floating):
        if not (np.isfinite(one).all() and one.min() >= 0 and one.max() <= 1):
            raise UserError("an array of floats is a picture where all are between 0 and 1: divide by 255, perhaps")
        one = np.round(one * 255).astype(np.uint8)
    if one.dtype != np.uint8:
        raise UserError(f"an array of {one.dtype} is no picture: bytes (uint8), or floats between 0 and 1")
    return upright_rgb(Image.fromarray(one[..., 0] if one.ndim == 3 and one.shape[2] == 1 else one))


# ---- from a run folder -----------------------------------------------------------------------------------------------


def load(folder: str | Path, device: str = "cpu", *, intervention: bool = True) -> Model:
    """`sightline.load`: a run with the intervention that is kept in it, if one is; or as it was trained."""
    model = load_as_trained(folder, device)
    return with_kept(model) if intervention else model


def load_as_trained(folder: str | Path, device: str = "cpu") -> Model:
    if str(folder).startswith(HUB):
        folder = fetch(str(folder).removeprefix(HUB))
    return Model(**vars(restore(folder, device)))


def load_corrected(folder: Path, device: str, intervention: bool, *, aloud: bool = True) -> Model:
    """With the intervention that is kept in the run, if one is and if that is wanted, and a line that says so."""
    model = load(folder, device, intervention=intervention)
    if aloud and (said := model.run.facts.get("intervention")):
        announce(model.run.folder, said["words"])
    return model


def announce(folder: Path, words: str) -> None:
    """That the intervention kept in this run is applied."""
    print(f"sightline: with {folder / FILE}: {words} (--no-intervention: as trained)", file=sys.stderr)


def with_kept(model: Model) -> Model:
    """The model with the intervention kept in its run, if one is; its run then says so."""
    intervention = kept(model)
    if intervention is None or not intervention.changes:
        return model
    said = {name: value for name, value in intervention.to_dict().items() if name not in ("names", "facts")}
    said |= {"folder": intervention.folder, "words": intervention.words}
    # Seeds that were corrected each by its own search are one method.
    said["kind"] = "found" if "found" in intervention.facts else intervention.folder
    facts = model.run.facts | {"intervention": said}
    return replace(model, method=intervened(model.method, intervention), run=Run(model.run.folder, facts))


def opened(folder: Path, device: str, *, intervention: bool = False) -> tuple[Accelerator, Model]:
    """A trained model, and where to measure it: as exactly as it was trained; or with what was kept to correct it."""
    accelerator = make_accelerator(device, read_run(folder).facts.get("config", {}).get("precision", "fp32"))
    return accelerator, load_corrected(folder, str(accelerator.device), intervention, aloud=accelerator.is_main_process)


def check_odd_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        fine = repository.count("/") == 1
    except HFValidationError:
        fine = False
    if not fine:
        raise UserError(f"{repository}: a repository is called OWNER/NAME, of letters, digits, -, _ and .")


def refused(repository: str, error: Exception) -> UserError:
    """What the hub said, in one line."""
    from huggingface_hub import errors

    where = f"{repository} on the Hugging Face hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{where}: cannot be reached while HF_HUB_OFFLINE is set; unset it")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return UserError(f"{where} does not exist, or is private: then log in with `hf auth login`")
    if status == 401:
        return UserError(f"{where}: your token is not accepted; {LOG_IN}")
    if status == 403:
        return UserError(f"{where}: your token may not do that; {LOG_IN} there, or choose another OWNER")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{where} has no such revision")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"{where}: {reason}")


def fetch(said: str) -> Path:
    """The folder of a run from the hub, OWNER/NAME or OWNER/NAME@REVISION: downloaded once, then from its cache."""
    from huggingface_hub import errors, snapshot_download

    repository, _, revision = said.partition("@")
    check_odd_name(repository)
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(LOADED)))
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{HUB}{said}: is neither in the local cache nor reachable: load it once while online"
        ) from error
    except Exception as error:  # as above
        raise refused(repository, error) from error
    if not (folder / "run.json").is_file():
        raise UserError(f"{HUB}{said}: is no run of Sightline (no run.json); `sightline push` publishes one")
    return folder


# ---- the data a run is measured on -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationData:
    """The data that a run is measured on."""

    rows: Rows
    path: Path
    fingerprint: str
    own: bool  # those that it was trained on


def evaluation_data(command: Evaluate, run: Run) -> EvaluationData:
    """The run's own data are known by their fingerprint, wherever they lie now; they keep the run's splits."""
    data = run.facts["data"]
    seed = run.facts["config"].get("split_seed", run.facts["seed"])
    if command.data is None:
        path = Path(data["path"])
        if not path.exists():
            raise UserError(
                f"{path}: the data of this run are no longer there; say where they are, after the run: "
                f"{command.run} DATA"
            )
        rows = read_rows(path, layout=data["layout"], seed=seed)
        found = fingerprint(rows)
        if found != data["fingerprint"]:
            raise UserError(
                f"{path}: the data have changed since this run was trained (fingerprint {found[:12]} instead of "
                f"{data['fingerprint'][:12]}); restore them, or give them explicitly, as other data, after the "
                f"run: {command.run} {path}"
            )
        return EvaluationData(rows, path, found, own=True)
    if command.layout in (None, data["layout"]):
        try:
            rows = read_rows(command.data, layout=data["layout"], seed=seed)
        except UserError:
            rows = None  # so they are others
        if rows is not None and fingerprint(rows) == data["fingerprint"]:
            return EvaluationData(rows, command.data, data["fingerprint"], own=True)
    rows = read_rows(command.data, layout=command.layout, seed=seed, whole=True)
    found = fingerprint(rows)
    if found == data["fingerprint"]:  # the same by another name, such as metashift-animals:0
        return EvaluationData(rows, command.data, found, own=True)
    if command.data.resolve() == Path(data["path"]).resolve():
        note = "these are the data of the run, but changed: it may have been trained on some of these pictures"
        rows = replace(rows, notes=(*rows.notes, note))
    return EvaluationData(rows, command.data, found, own=False)


def match_classes(model: Model, rows: Rows, path: Path) -> Rows:
    """Other data may have fewer classes, or in another order; none that the model does not know."""
    there = {rows.classes[label] for label in np.unique(rows.labels)}
    unknown = sorted(there - set(model.classes))
    if unknown and rows.name == "imagenet-segmentation":
        raise UserError(f"{path}: has pictures of the class {unknown[0]!r}, so it is for measuring masks, not answers")
    if unknown:
        knows = ", ".join(model.classes[:10])
        raise UserError(f"{path}: the model does not know the class {unknown[0]!r}; it knows {knows}")
    place = np.array([model.classes.index(name) if name in there else -1 for name in rows.classes], dtype=np.int64)
    return replace(rows, classes=model.classes, labels=place[rows.labels])


def results_folder(command: Evaluate, run: Run, asked: EvaluationData) -> Path:
    """Made before the work, so that it is not done in vain."""
    option = (command.layout or "").partition(":")[2]
    changed = run.facts.get("intervention", {}).get("folder")
    other = () if asked.own else ("on", asked.path.resolve().stem, option, asked.fingerprint[:8])
    folder = command.out or run.folder / "-".join(filter(None, (*other, changed)))
    if (changed or not asked.own) and folder.resolve() == run.folder.resolve():
        raise UserError(f"{folder}: is for the run's own data, as it was trained; choose another --out")
    make_folder(folder / "predictions")
    return folder


def same_change(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two interventions do the same to a model, whatever its parts are called."""
    said = [[(each or {}).get(name) for name in ("drop", "force", "quantile", "thresholds")] for each in (one, other)]
    return said[0] == said[1]


def check_other_data(path: Path, known: str, asked: EvaluationData) -> None:
    if known != asked.fingerprint:
        raise UserError(f"{path}: is about other data (fingerprint {known[:12]}); choose another --out")


def measure(answers: Predictions, run: Run) -> Metrics:
    """With the counts of training, where its groups are these."""
    counts = train_counts(run)
    if counts is None or not answers.group_names:
        return evaluate(answers)
    if set(answers.group_names) <= set(counts):
        return evaluate(answers, train_group_counts=counts)
    other = next(name for name in answers.group_names if name not in counts)
    metrics = evaluate(answers)
    note = f"these are other groups than in training, which had no {other!r}: its counts say nothing about them"
    return replace(metrics, warnings=(*metrics.warnings, note))
