"""The model card: what a run's folder says of the model, in Markdown, for people and for the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import UserError
from ..interventions.file import Intervention
from ..methods.base import PartMethod
from ..metrics.estimates import Metrics, read_metrics
from ..metrics.localization import FIGURES, Localization
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
(height, width), crop = facts["picture"]["size"], facts["picture"]["crop"]
picture = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGB")
scale = max(int(height / crop) / picture.height, int(width / crop) / picture.width)
resized = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
left, top = round((resized[0] - width) / 2), round((resized[1] - height) / 2)
picture = picture.resize(resized, {resample}).crop((left, top, left + width, top + height))
inputs = {{"images": numpy.asarray(picture, numpy.float32).transpose(2, 0, 1)[None] / 255{more}}}
found = dict(zip(facts["outputs"], session.run(list(facts["outputs"]), inputs)))
print(facts["classes"][found["probabilities"][0].argmax()], found["probabilities"][0].max())
"""
TEMPLATE = Path(__file__).with_name("card.md.j2")
MOST = 40  # rows of a table
LIMITS = (
    "It knows its classes and nothing else: a picture of something else is answered, too, and perhaps surely.",
    "Figures hold for pictures like the ones they were measured on; measure your own with `sightline evaluate`.",
)
BLIND_LIMIT = (
    "What chooses the sight has seen the whole picture. What lies outside does not reach the answer, but may have "
    "moved the sight, whose shape can say something by itself (`sightline shape`)."
)
NOT_BLIND_LIMIT = "It sees whole pictures: whatever goes with a class there, it may use. Maps of it explain, at best."


def card(
    model: Model,
    kept: Intervention | None,
    certificate: Certificate | None,
    pictures: str,
    *,
    agreement: Agreement | None = None,
    where: str | None = None,
) -> str:
    """Of a model, with what is kept to correct it and its certificate on some `pictures` (in words); `where` is what to
    load it by, if not its folder."""
    facts = model.run.facts
    tables, corrected = measured(model, kept), kept is not None and kept.changes
    as_it_is = next((one for one in tables if one["corrected"] == corrected), None)
    blind = certificate is not None and certificate.verdict == "blind"
    learner = cast(PartMethod, model.method) if model.method.part_count else None
    return template().render(
        name=model.run.folder.resolve().name,
        tags=["sightline", facts["method"], *(["blind-outside-its-sight"] if blind else [])],
        results=results_of(as_it_is),
        what=what_it_is(facts["method"]),
        sees="It sees nothing else." if blind else "It sees the whole picture." if certificate is None else "",
        headline=as_it_is["metrics"].headline() if as_it_is else "",
        unmeasured=f"sightline evaluate {'RUN' if where else model.run.folder}" if tables and not as_it_is else "",
        data=facts["data"],
        class_list=class_list(model.classes),
        **counts_of(facts["data"]),
        tables=tables,
        selection=selection_of(facts),
        proof=proof_of(certificate, pictures),
        on_file=None if agreement is None else " ".join(filter(None, (agreement.sentence, agreement.proof))),
        localization=localization_of(model.run.folder, kept),
        parts=None if learner is None else [(kept or Intervention()).part(k) for k in range(learner.where.parts)],
        correction=correction_of(kept),
        limits=[*LIMITS, BLIND_LIMIT if blind else NOT_BLIND_LIMIT],
        where=where or str(model.run.folder),
        told=model.method.needs_masks,
        example=None if agreement is None else example_of(model),
        facts=made_of(facts),
    )


def template() -> Any:
    from jinja2 import Environment, StrictUndefined

    rooms = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    rooms.filters["md"] = plain
    rooms.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return rooms.from_string(TEMPLATE.read_text(encoding="utf-8"))


def plain(text: object) -> str:
    """As it is, in one line of Markdown: no name of a class or a group becomes a column or a tag."""
    line = " ".join(str(text).split())
    for sign in ("\\", "|", "`", "*", "_", "<", "]("):
        line = line.replace(sign, f"\\{sign}" if len(sign) == 1 else "]\\(")
    return line


def what_it_is(method: str) -> str:
    """The first sentence of what the command line says of the method."""
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


def counts_of(data: Mapping[str, Any]) -> dict[str, Any]:
    counts = data["counts"]
    names = list(counts["train"])
    rows = [{"name": n, "counts": [f"{counts[split][n]:,}" for split in ("train", "val", "test")]} for n in names]
    return {"groups": rows[:MOST], "others": max(0, len(rows) - MOST)}


# ---- figures ---------------------------------------------------------------------------------------------------------


def measured(model: Model, kept: Intervention | None) -> list[dict[str, Any]]:
    """Tables of what is known: with the correction first, if it was measured, then as trained; test data, or else
    validation data."""
    folder, found = model.run.folder, []
    changed = kept is not None and kept.changes
    ways = [(folder / kept.folder, f"With the correction ({kept.words})")] if changed and kept is not None else []
    for where, words in [*ways, (folder, "As trained")]:
        if not (where / "metrics.json").is_file():
            continue
        splits = read_metrics(where / "metrics.json")["splits"]
        split = next((one for one in ("test", "val") if one in splits), None)
        if split is not None:
            metrics = Metrics.from_dict(splits[split])
            title = f"{words}, {split} data, {metrics.n:,} pictures:"
            rows = metrics.rows(limit=MOST)
            about = {"metrics": metrics, "split": split, "warnings": metrics.warnings, "corrected": where != folder}
            found.append({"title": title, "rows": rows} | about)
    return found


def results_of(table: dict[str, Any] | None) -> dict[str, Any] | None:
    """For the hub's own index."""
    if table is None:
        return None
    metrics: Metrics = table["metrics"]
    worst = [("worst group", metrics.worst_group)] if metrics.worst_group else [("worst class", metrics.worst_class)]
    figures = [("accuracy", metrics.accuracy), ("class-balanced accuracy", metrics.balanced), *worst]
    named = [{"name": name, "value": round(one.value, 4)} for name, one in figures if one is not None]
    return {"split": table["split"], "metrics": named}


def selection_of(facts: Mapping[str, Any]) -> str:
    rule = facts.get("selection") or {}
    if rule.get("metric") is None:
        return "Nothing was selected: these are the weights that training ended with."
    return f"Weights were selected by {rule['metric']} on the {rule['on']} data, never on the test data."


def proof_of(certificate: Certificate | None, pictures: str) -> str:
    if certificate is None:
        return "It is not blind to anything: there is no sight to prove something about."
    said = [f"{certificate.sentence} ({pictures}.)"]
    if certificate.end_to_end:
        said += ["", "End to end, which is a figure and no proof, with hidden pixels redrawn:", ""]
        for kind, row in certificate.end_to_end["redrawn_with"].items():
            n = row["n"]
            said.append(
                f"- {kind}: the sight changed in {row['sight_changed']} of {n} pictures, the answer in "
                f"{row['answer_changed']}"
            )
    return "\n".join(said)


def localization_of(folder: Path, kept: Intervention | None) -> dict[str, Any] | None:
    """The figures that fit the model as it is now, of the test data or else of the validation data."""
    path = (folder / kept.folder if kept is not None and kept.changes else folder) / "localization.json"
    if not path.is_file():
        return None
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        split = next((one for one in ("test", "val") if one in splits), None)
        found = None if split is None else Localization.from_dict(splits[split])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it, and localize again") from error
    if found is None:
        return None
    rows = [(FIGURES[name], one.figure, one.interval, f"{one.n:,}") for name, one in found.figures.items()]
    return {"split": found.split, "n": found.n, "rows": rows}


def correction_of(kept: Intervention | None) -> str:
    if kept is None or not kept.changes:
        return "Nothing is corrected."
    found = kept.facts.get("found")
    how = f", found on the {found['split']} data ({found['rule']})" if found else ", by hand"
    return f"Corrected: {kept.words}{how}."


def example_of(model: Model) -> str:
    return example(model.expects, model.method.needs_masks)


def made_of(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    config = facts["config"]
    names = {"seed": "seed", "epochs": "epochs", "batch": "batch", "lr": "learning rate", "precision": "precision"}
    origin = facts.get("backbone") or {}
    backbone = origin.get("name") or Path(str(config.get("backbone") or origin.get("file"))).name
    from_hub = f" ({origin['repository']} at {origin.get('revision')})" if origin.get("repository") else ""
    size = "×".join(map(str, facts["vit"]["input"]["size"]))
    said = [("method", facts["method"]), ("backbone", f"{backbone}{from_hub}"), ("pictures", f"{size} pixels")]
    said += [(words, str(config[name])) for name, words in names.items() if config.get(name) is not None]
    return [*said, ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))]


def example(expects: Input, told: bool) -> str:
    mask = ', "mask": numpy.ones((1, height, width), bool)' if told else ""
    return EXAMPLE.format(resample=f"Image.{expects.resample.upper()}", more=mask)
