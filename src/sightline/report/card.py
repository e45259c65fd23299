"""The model card in Markdown, made from a run folder, for readers and for the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import UserError
from ..interventions.file import Intervention
from ..methods.base import PartMethod
from ..metrics.estimates import Metrics, read_metrics
from ..metrics.localization import LOCALIZATION_LABELS, Localization
from ..vit.model import Input

if TYPE_CHECKING:
    from ..export.check import Agreement
    from ..load import Model
    from ..verify.verify import Certificate

EXAMPLE = """\
import json, numpy, onnxruntime
from PIL import Image, ImageOps
facts = json.load(open("model.json"))
session = onnxruntime.InferenceSession("model.onnx")
(height, width), crop = facts["input"]["size"], facts["input"]["crop"]
image = ImageOps.exif_transpose(Image.open("image.jpg")).convert("RGB")
scale = max(int(height / crop) / image.height, int(width / crop) / image.width)
resized = max(width, round(image.width * scale)), max(height, round(image.height * scale))
left, top = round((resized[0] - width) / 2), round((resized[1] - height) / 2)
image = image.resize(resized, {resample}).crop((left, top, left + width, top + height))
inputs = {{"images": numpy.asarray(image, numpy.float32).transpose(2, 0, 1)[None] / 255{more}}}
outputs = dict(zip(facts["outputs"], session.run(list(facts["outputs"]), inputs)))
print(facts["classes"][outputs["probabilities"][0].argmax()], outputs["probabilities"][0].max())
"""
TEMPLATE = Path(__file__).with_name("card.md.j2")
MAX_ROWS = 40  # of a table
LIMITS = (
    "The model always predicts one of its classes, possibly with high confidence, also for images of anything else.",
    "Metrics hold for images like those they were measured on; evaluate on your own data with `sightline evaluate`.",
)
BLIND_LIMIT = (
    "The selector sees the whole image. Content outside the sight does not reach the prediction, but it can influence "
    "the sight, whose shape may carry information about the label (`sightline shape`)."
)
NOT_BLIND_LIMIT = (
    "The model sees the whole image and may use anything that correlates with a class. Its maps are approximate "
    "explanations."
)


def card(
    model: Model,
    intervention: Intervention | None,
    certificate: Certificate | None,
    checked_on: str,
    *,
    agreement: Agreement | None = None,
    where: str | None = None,
) -> str:
    """The card of a model with its saved intervention and its certificate; `checked_on` describes the images of the
    certificate, `where` is the address to load the model from, if not its folder."""
    facts = model.run.facts
    tables, corrected = metric_tables(model, intervention), intervention is not None and intervention.changes
    current = next((table for table in tables if table["corrected"] == corrected), None)
    blind = certificate is not None and certificate.verdict == "blind"
    part_method = cast(PartMethod, model.method) if model.method.part_count else None
    return template().render(
        name=model.run.folder.resolve().name,
        tags=["sightline", facts["method"], *(["blind-outside-its-sight"] if blind else [])],
        results=hub_results(current),
        what=describe_method(facts["method"]),
        sees="It sees nothing outside its sight."
        if blind
        else "It sees the whole image."
        if certificate is None
        else "",
        headline=current["metrics"].headline() + copies_sentence(facts, current["split"]) if current else "",
        unmeasured=f"sightline evaluate {'RUN' if where else model.run.folder}" if tables and not current else "",
        data=facts["data"],
        class_list=class_list(model.classes),
        **count_rows(facts["data"]),
        tables=tables,
        selection=describe_selection(facts),
        proof=describe_proof(certificate, checked_on),
        onnx=None if agreement is None else " ".join(filter(None, (agreement.sentence, agreement.proof))),
        localization=localization_rows(model.run.folder, intervention),
        parts=None if part_method is None else part_names(part_method, intervention),
        intervention=describe_intervention(intervention),
        limits=[*LIMITS, BLIND_LIMIT if blind else NOT_BLIND_LIMIT],
        where=where or str(model.run.folder),
        needs_mask=model.method.needs_masks,
        example=None if agreement is None else example(model.expects, model.method.needs_masks),
        facts=training_facts(facts),
    )


def copies_sentence(facts: dict[str, Any], split: str) -> str:
    """About test images that are also in train or val, if training was allowed to use them."""
    return f" {facts['copies']}." if split == "test" and facts.get("copies") else ""


def template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["md"] = escape_markdown
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def escape_markdown(text: object) -> str:
    """One line of Markdown in which no class or group name becomes a column or a tag."""
    line = " ".join(str(text).split())
    for sign in ("\\", "|", "`", "*", "_", "<", "]("):
        line = line.replace(sign, f"\\{sign}" if len(sign) == 1 else "]\\(")
    return line


def describe_method(method: str) -> str:
    """The first sentence of the method's help text."""
    from .. import config

    kinds = [kind for kind in vars(config).values() if getattr(kind, "method", None) == method]
    doc = next((kind.__doc__ for kind in kinds if kind.__doc__), None)
    if doc is None:
        return f"An image classifier ({method})."
    sentence = " ".join(doc.split()).partition(". ")[0].rstrip(".")
    return f"An image classifier, `{method}`: {sentence[0].lower()}{sentence[1:]}."


def class_list(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:12])
    return f"{shown}{', …' if len(classes) > 12 else ''}"


def count_rows(data: Mapping[str, Any]) -> dict[str, Any]:
    counts = data["counts"]
    names = list(counts["train"])
    rows = [{"name": n, "counts": [f"{counts[split][n]:,}" for split in ("train", "val", "test")]} for n in names]
    return {"groups": rows[:MAX_ROWS], "others": max(0, len(rows) - MAX_ROWS)}


# ---- figures ---------------------------------------------------------------------------------------------------------


def metric_tables(model: Model, intervention: Intervention | None) -> list[dict[str, Any]]:
    """Metrics with the intervention first, if they were evaluated, then as trained; on test data, or else validation
    data."""
    folder, found = model.run.folder, []
    variants = [(folder, "As trained")]
    if intervention is not None and intervention.changes:
        variants.insert(0, (folder / intervention.folder, f"With the intervention ({intervention.description})"))
    for home, words in variants:
        if not (home / "metrics.json").is_file():
            continue
        splits = read_metrics(home / "metrics.json")["splits"]
        split = next((one for one in ("test", "val") if one in splits), None)
        if split is not None:
            metrics = Metrics.from_dict(splits[split])
            title = f"{words}, {split} data, {metrics.n:,} images:"
            rows = metrics.rows(limit=MAX_ROWS)
            about = {"metrics": metrics, "split": split, "warnings": metrics.warnings, "corrected": home != folder}
            found.append({"title": title, "rows": rows} | about)
    return found


def hub_results(table: dict[str, Any] | None) -> dict[str, Any] | None:
    """For the model index of the Hub."""
    if table is None:
        return None
    metrics: Metrics = table["metrics"]
    worst = ("worst-group accuracy", metrics.worst_group or metrics.worst_class)
    if metrics.worst_group is None:
        worst = ("worst-class accuracy", metrics.worst_class)
    listed = [("accuracy", metrics.accuracy), ("class-balanced accuracy", metrics.balanced), worst]
    named = [{"name": name, "value": round(one.value, 4)} for name, one in listed]
    return {"split": table["split"], "metrics": named}


def describe_selection(facts: Mapping[str, Any]) -> str:
    rule = facts.get("selection") or {}
    if rule.get("metric") is None:
        return "No checkpoint selection: these are the weights at the end of training."
    metric = {"balanced": "class-balanced accuracy"}.get(rule["metric"], rule["metric"])
    return f"Checkpoint selected by {metric} on {rule['on']} data, never on test data."


def describe_proof(certificate: Certificate | None, checked_on: str) -> str:
    if certificate is None:
        return "Not blind: the model sees the whole image, so there is nothing to prove."
    lines = [f"{certificate.sentence} ({checked_on}.)"]
    if certificate.end_to_end:
        lines += ["", "End to end (a measurement, not a proof), with the hidden pixels redrawn:", ""]
        for kind, row in certificate.end_to_end["redrawn_with"].items():
            n = row["n"]
            lines.append(
                f"- {kind}: the sight changed in {row['sight_changed']} of {n} images, the prediction in "
                f"{row['prediction_changed']}"
            )
    return "\n".join(lines)


def localization_rows(folder: Path, intervention: Intervention | None) -> dict[str, Any] | None:
    """Localisation of the model with its intervention, on test data or else validation data."""
    changed = intervention is not None and intervention.changes
    path = (folder / intervention.folder if changed and intervention else folder) / "localization.json"
    if not path.is_file():
        return None
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        split = next((one for one in ("test", "val") if one in splits), None)
        found = None if split is None else Localization.from_dict(splits[split])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); delete it and run `sightline localize` again") from error
    if found is None:
        return None
    rows = [
        (LOCALIZATION_LABELS[name], one.value_text, one.interval, f"{one.n:,}") for name, one in found.figures.items()
    ]
    return {"split": found.split, "n": found.n, "rows": rows}


def part_names(method: PartMethod, intervention: Intervention | None) -> list[str]:
    return [(intervention or Intervention()).part_name(k) for k in range(method.where.parts)]


def describe_intervention(intervention: Intervention | None) -> str:
    if intervention is None or not intervention.changes:
        return "No intervention."
    found = intervention.facts.get("found")
    how = f", selected on {found['split']} data ({found['rule']})" if found else ", set by hand"
    return f"Intervention: {intervention.description}{how}."


def training_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    config = facts["config"]
    names = {"seed": "seed", "epochs": "epochs", "batch": "batch size", "lr": "learning rate", "precision": "precision"}
    origin = facts.get("backbone") or {}
    backbone = origin.get("name") or Path(str(config.get("backbone") or origin.get("file"))).name
    from_hub = f" ({origin['repository']} at {origin.get('revision')})" if origin.get("repository") else ""
    size = "×".join(map(str, facts["vit"]["input"]["size"]))
    listed = [("method", facts["method"]), ("backbone", f"{backbone}{from_hub}"), ("input size", f"{size} pixels")]
    listed += [(words, str(config[name])) for name, words in names.items() if config.get(name) is not None]
    return [*listed, ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))]


def example(expects: Input, needs_mask: bool) -> str:
    mask = ', "mask": numpy.ones((1, height, width), bool)' if needs_mask else ""
    return EXAMPLE.format(resample=f"Image.{expects.resample.upper()}", more=mask)
