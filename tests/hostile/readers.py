"""What is fuzzed: for each kind of file a valid one, and how Sightline reads it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sightline.config import Erm, Ifam
from sightline.config.schema import read_json
from sightline.config.stored import stored_config
from sightline.data.formats import FORMATS
from sightline.data.images import Preprocess, decode, read_image, read_mask
from sightline.data.rows import read_rows
from sightline.interventions.file import Intervention
from sightline.load import load
from sightline.metrics.predictions import Predictions
from sightline.training.run_folder import read_run
from sightline.vit.backbones import NANO
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone, save_backbone
from sightline.where.saliency import U2Net

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    name: str  # of the file
    seeds: tuple[bytes, ...]  # valid ones
    read: Read
    costly: bool = False  # read rarely: its reader builds a model


def kinds(home: Path, run: Path | None = None) -> dict[str, Kind]:
    """By name; with a trained run also its folder's files."""
    home.mkdir(parents=True, exist_ok=True)
    found = {
        "table": Kind("rows.csv", tables(home), lambda path: read_table_and_images(path)),
        "predictions": Kind("test.csv", predictions(), Predictions.load_csv),
        "image": Kind("x.png", images(), read_image),
        "mask": Kind("m.png", images(mask=True), read_mask),
        "config": Kind("config.json", configs(), read_config),
        "intervention": Kind("intervention.json", interventions(), Intervention.load),
        "weights": Kind("w.safetensors", (weights(home, "safetensors"),), load_backbone, costly=True),
        "pickle": Kind("w.pth", (weights(home, "pth"),), lambda path: load_backbone(path, config=SMALL), costly=True),
    }
    if importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxruntime"):
        found["onnx"] = Kind("u2net.onnx", (onnx_graph(),), look_with_onnx, costly=True)
    if run is not None:
        facts = (run / "run.json").read_bytes()
        best = (run / "best.safetensors").read_bytes()
        found["run"] = Kind("run.json", (facts,), lambda path: read_run(path.parent))
        found["run and weights"] = Kind("run.json", (facts,), lambda path: load_with(path, best), costly=True)
    return found


def read_table_and_images(path: Path) -> None:
    rows = read_rows(path)
    for i in range(min(2, len(rows))):
        decode(rows, i, Preprocess((16, 16)))


def read_config(path: Path) -> object:
    values = read_json(path)
    return stored_config(Ifam, values) if isinstance(values, dict) else None


def load_with(path: Path, best: bytes) -> object:
    (path.parent / "best.safetensors").write_bytes(best)
    return load(path.parent, intervention=False)


def look_with_onnx(path: Path) -> object:
    return U2Net(path).look(torch.rand(1, 3, 16, 16))


# ---- valid files -----------------------------------------------------------------------------------------------------

SMALL = replace(NANO, width=24, depth=1, heads=2, grid=(2, 2), classes=2, input=replace(NANO.input, size=(16, 16)))


def tables(home: Path) -> tuple[bytes, ...]:
    rng = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(home / f"{number}.png")
        Image.fromarray(rng.random((20, 16)) > 0.5).save(home / f"m{number}.png")
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["image", "label", "group_place", "mask", "box", "split"])
    for number, split in enumerate(["train", "train", "val", "test"] * 3):
        image = number % 3
        writer.writerow([f"{image}.png", "aab"[image], "land", f"m{image}.png", "1 2 9 9", split])
    lines = [["image", "label"], *([f"{number}.png", "abc"[number]] for number in range(3))]
    plain = "\n".join(",".join(line) for line in lines)
    return text.getvalue().encode(), plain.encode(), b"image;label\n0.png;a\n"


def predictions() -> tuple[bytes, ...]:
    lines = ["image,label,predicted,group,split,p_a,p_b"]
    lines += [f"{i}.png,{'ab'[i % 2]},a,{'ab'[i % 2]}/x,test,0.{i},0.{9 - i}" for i in range(6)]
    return ("\n".join(lines).encode(),)


def images(*, mask: bool = False) -> tuple[bytes, ...]:
    rng = np.random.default_rng(0)
    made = []
    for form in FORMATS:
        held = io.BytesIO()
        pixels = rng.random((18, 12)) > 0.5 if mask else rng.integers(0, 256, (18, 12, 3), dtype=np.uint8)
        try:
            Image.fromarray(pixels).convert("L" if mask else "RGB").save(held, form)
        except (KeyError, OSError):
            continue  # this Pillow cannot write it
        made.append(held.getvalue())
    for array in (rng.random((9, 9), dtype=np.float32), rng.integers(0, 60_000, (9, 9)).astype(np.uint16)):
        held = io.BytesIO()
        Image.fromarray(array).save(held, "TIFF")
        made.append(held.getvalue())
    return tuple(made)


def configs() -> tuple[bytes, ...]:
    made = (Ifam(Path("data")), Ifam(Path("data"), parts=2, sight="patches", soft_mask=True), Erm(Path("data")))
    return tuple(json.dumps(asdict(config), default=str).encode() for config in made)


def interventions() -> tuple[bytes, ...]:
    made = (
        Intervention(drop=(1,), quantile=0.99, thresholds=(1.0, float("nan"), 3.0), names={0: "head"}),
        Intervention(force=(2,), facts={"weights": "0" * 64, "found": {"gain": 0.1}}),
    )
    return tuple(json.dumps(one.to_dict()).encode() for one in made)


def onnx_graph() -> bytes:
    """Of the inputs and outputs of U²-Net."""
    from onnx import TensorProto, helper

    pixels = helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, U2Net.SIDE, U2Net.SIDE])
    salience = helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1, U2Net.SIDE, U2Net.SIDE])
    kernel = helper.make_tensor("kernel", TensorProto.FLOAT, [1, 3, 1, 1], [0.3, 0.3, 0.3])
    nodes = [
        helper.make_node("Conv", ["input", "kernel"], ["mixed"]),
        helper.make_node("Sigmoid", ["mixed"], ["output"]),
    ]
    graph = helper.make_graph(nodes, "u2net", [pixels], [salience], [kernel])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def weights(home: Path, kind: str) -> bytes:
    torch.manual_seed(0)
    vit = ViT(SMALL)
    path = home / f"seed.{kind}"
    if kind == "pth":
        torch.save({"model": vit.state_dict(), "epoch": 3}, path)
    else:
        save_backbone(vit, path)
    return path.read_bytes()
