"""The app without its page: stage 1 runs once per image, for any number of predictions and users."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import sightline.app.session as session
from sightline.app.lock import FairLock
from sightline.app.panels import drawn_mask, panel, plain
from sightline.app.session import Viewer
from sightline.config import A2, App, EarlyMask, Erm, Ifam, Pdiscoformer
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.interventions.apply import apply_intervention, calibrate
from sightline.interventions.file import Intervention
from sightline.load import load_as_trained as load
from sightline.metrics.inference import inference_batches
from sightline.train import train
from sightline.training.distributed import make_accelerator

from ..commands import QUICK, typed

SIDE = 32
SMALL = {"backbone": "sightline-nano", "size": SIDE, "batch": 16, "workers": 0, "device": "cpu"}
BRIEF = {"epochs": 1, "lr": 1e-4}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=32, val=32, test=4, size=SIDE)


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """A run of each kind, by name."""
    folder = tmp_path_factory.mktemp("runs")
    parts = {"parts": 3, "ema": None, "balance": "none", **BRIEF}
    configs = {
        "ifam": Ifam(toy, out=folder / "ifam", selector_size=SIDE, **parts, **SMALL),
        "patches": Ifam(toy, out=folder / "patches", sight="patches", **parts, **SMALL),
        "pdiscoformer": Pdiscoformer(toy, out=folder / "pdiscoformer", parts=3, **BRIEF, **SMALL),
        "a2": A2(toy, out=folder / "a2", crop_size=("0.5",), **SMALL),
        "early": EarlyMask(toy, out=folder / "early", sight="pixels", **BRIEF, **SMALL),
        "erm": Erm(toy, out=folder / "erm", **BRIEF, **SMALL),
    }
    return {name: train(one) for name, one in configs.items()}


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained["ifam"], tmp_path / "run")


def opened(run, **settings) -> Viewer:
    return Viewer.open(App(run, device="cpu", **settings))


def counted(viewer, name: str, patch) -> list:
    calls, real = [], getattr(viewer.method, name)
    patch.setattr(viewer.method, name, lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    return calls


def image_file(toy) -> str:
    return toy / "val" / sorted(path.name for path in (toy / "val").iterdir())[0]


@pytest.mark.parametrize("kind", ["ifam", "patches", "pdiscoformer"])
def test_toggling_parts_equals_the_intervention_to_the_bit_and_stage_1_runs_once(trained, toy, kind, monkeypatch):
    viewer = opened(trained[kind])
    detections = counted(viewer, "detect", monkeypatch)
    image = viewer.read(image_file(toy))
    predictions = {drop: viewer.predict(image, Intervention(drop=drop)) for drop in ((), (0,), (1,), (0, 2))}
    assert len(detections) == 1
    assert len({tuple(prediction.probabilities.tolist()) for prediction in predictions.values()}) > 2
    model = load(trained[kind])
    for drop, prediction in predictions.items():
        method = apply_intervention(model.method, Intervention(drop=drop)) if drop else model.method
        images = image.pixels[None].float() / 255
        with torch.no_grad():
            expected = method.judge(images, method.look(images))
        assert torch.equal(prediction.probabilities, expected.probabilities[0])
        assert torch.equal(prediction.sight.visible((SIDE, SIDE)), expected.sight.visible((SIDE, SIDE)))
        assert torch.equal(prediction.before, predictions[()].probabilities)


def test_a_saved_intervention_gives_the_same_in_predict(run, toy):
    viewer = opened(run)
    intervention = viewer.make_intervention(shown=[0, 2], removed=5)
    assert (intervention.drop, intervention.quantile) == ((1,), 0.95)
    prediction = viewer.predict(viewer.read(image_file(toy)), intervention)
    viewer.save(intervention, {0: "head", 1: "  ", 2: "<legs>"})
    kept = json.loads((run / "intervention.json").read_text())
    assert kept["names"] == {"0": "head", "2": "<legs>"}
    assert kept["facts"]["calibrated"]["images"] == 32
    code, out, err = typed("predict", run, image_file(toy), "--device", "cpu")
    assert (code, "without part 1" in err) == (0, True), err
    expected = [float(share) for share in out.splitlines()[1].split(",")[2:]]
    assert expected == pytest.approx(prediction.probabilities.tolist(), abs=1e-7)


def test_a_forced_part_that_is_switched_off_is_not_forced(run):
    typed("intervene", run, "--force", 1)
    intervention = opened(run).make_intervention(shown=[0, 2])
    assert (intervention.drop, intervention.force) == ((1,), ())


def test_the_slider_uses_the_distances_of_intervene(run, toy):
    viewer = opened(run)
    intervention = viewer.make_intervention(shown=[0, 1, 2], removed=3)
    assert typed("intervene", run, "--quantile", 0.97, *QUICK)[0] == 0
    assert intervention.thresholds == Intervention.load(run / "intervention.json").thresholds
    assert viewer.make_intervention(shown=[0, 1, 2], removed=3) == intervention
    few = opened(run, limit=8)
    rows = few.dataset.rows
    at = rows.split_indices("train")[np.linspace(0, 31, 8).round().astype(int)]
    batches = inference_batches(rows, at, few.model.expects, make_accelerator("cpu"), batch=16, workers=0)
    sketch = calibrate(few.method, batches, few.accelerator)
    assert few.make_intervention(shown=[0, 1, 2], removed=10).thresholds == sketch.quantile(0.9)


def test_the_facts_of_a_search_are_kept_until_another_intervention_is_saved(run):
    assert typed("intervene", run, "--drop", 1, "--name", "2=legs")[0] == 0
    facts = json.loads((run / "intervention.json").read_text())
    facts["facts"]["found"] = {"split": "val"}
    (run / "intervention.json").write_text(json.dumps(facts))
    (run / "intervention.json.sha256").unlink()  # changed by hand
    viewer = opened(run)
    assert viewer.saved.names == {2: "legs"}
    assert "found" in viewer.save(viewer.make_intervention([0, 2]), {2: "feet"}).facts
    assert "found" not in viewer.save(viewer.make_intervention([0, 1]), {2: "feet"}).facts
    assert viewer.saved.drop == (2,)


def test_a_drawn_mask_is_the_sight(trained, toy):
    viewer = opened(trained["ifam"])
    image, mask = viewer.read(image_file(toy)), torch.zeros(SIDE, SIDE, dtype=torch.bool)
    mask[8:20, 10:22] = True
    prediction = viewer.predict(image, mask=mask)
    assert torch.equal(prediction.sight.visible((SIDE, SIDE))[0] & ~mask, torch.zeros_like(mask))
    changed = viewer.read(image_file(toy))
    changed.pixels[:, ~mask] = 255 - changed.pixels[:, ~mask]
    assert torch.equal(viewer.predict(changed, mask=mask).probabilities, prediction.probabilities)
    with pytest.raises(UserError, match="the drawn mask is empty"):
        viewer.predict(image, mask=torch.zeros(SIDE, SIDE, dtype=torch.bool))


def test_methods_without_parts_show_their_sight_and_relevance(trained, toy):
    boxes = opened(trained["a2"])
    prediction = boxes.predict(boxes.read(image_file(toy)))
    assert (boxes.parts, boxes.draws) == (0, False)
    assert prediction.coverage == pytest.approx(0.25)
    assert prediction.sight.boxes is not None
    everything = opened(trained["erm"])
    prediction = everything.predict(everything.read(image_file(toy)))
    assert prediction.coverage == 1
    assert {"relevance", "attention"} <= set(prediction.maps)
    with pytest.raises(UserError, match="takes no masks"):
        boxes.predict(boxes.read(image_file(toy)), mask=torch.ones(SIDE, SIDE, dtype=torch.bool))


def test_a_method_that_takes_masks_uses_those_of_the_data_or_a_drawn_one(trained, toy):
    viewer = opened(trained["early"])
    known = viewer.predict(viewer.example(viewer.examples()[0]))
    assert 0 < known.coverage < 0.6
    stranger = viewer.read(image_file(toy))
    with pytest.raises(UserError, match="draw what the model may see"):
        viewer.predict(stranger)
    drawn = viewer.predict(stranger, mask=torch.ones(SIDE, SIDE, dtype=torch.bool))
    assert (drawn.coverage, drawn.before) == (1, None)


def test_images_are_read_as_in_predict(trained, toy, tmp_path):
    viewer = opened(trained["ifam"])
    upright = Image.open(image_file(toy)).convert("RGB").resize((96, 64))
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(viewer.read(tmp_path / "turned.png").pixels, viewer.read(saved(upright, tmp_path)).pixels)
    for mode in ("L", "RGBA", "P", "1", "I;16"):
        odd = Image.new(mode, (700, 40)) if mode == "I;16" else upright.convert(mode)
        odd.save(tmp_path / "odd.png")
        assert viewer.read(tmp_path / "odd.png").pixels.shape == (3, SIDE, SIDE)
    (tmp_path / "notes.png").write_text("no picture")
    with pytest.raises(UserError, match=r"notes\.png: not a readable image"):
        viewer.read(tmp_path / "notes.png")


def saved(image, folder):
    image.save(folder / "plain.png")
    return folder / "plain.png"


def test_the_cache_of_looks_is_bounded(trained, monkeypatch):
    monkeypatch.setattr(session, "MAX_LOOKS", 2)
    viewer = opened(trained["ifam"])
    detections = counted(viewer, "detect", monkeypatch)
    images = [viewer.example(row) for row in viewer.examples()[:3]]
    for number in (0, 1, 0, 2, 0, 1):
        viewer.predict(images[number])
    assert len(detections) == 4


def test_examples_are_validation_images_interleaving_the_groups(trained):
    viewer = opened(trained["ifam"])
    rows = viewer.dataset.rows
    assert sorted(viewer.examples()) == rows.split_indices("val").tolist()
    assert len({viewer.example(row).group for row in viewer.examples()[: len(rows.group_names)]}) == 4


def test_effects_on_groups_equal_evaluate_and_stage_1_runs_once(run, monkeypatch):
    viewer = opened(run)
    detections = counted(viewer, "detect", monkeypatch)
    calls = []
    plain_, without = viewer.effects([viewer.make_intervention([0, 1])], lambda done, of: calls.append((done, of)))
    assert calls == [(0, 2), (1, 2)]
    again = viewer.effects([viewer.make_intervention([0, 1]), viewer.make_intervention([1])])
    assert len(detections) == 2
    assert again[1].cells == without.cells
    assert again[0].gain is None
    assert without.gains.keys() == plain_.cells.keys()
    viewer.save(viewer.make_intervention([0, 1]))
    assert typed("evaluate", run, "--split", "val", *QUICK)[0] == 0
    metrics = json.loads((run / "intervened-drop2" / "metrics.json").read_text())["splits"]["val"]
    assert {k: e.value for k, e in without.cells.items()} == {k: e["value"] for k, e in metrics["groups"].items()}


def test_without_its_data_a_run_still_predicts(run, toy, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    facts["data"]["path"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(facts))
    viewer = opened(run)
    assert viewer.examples() == []
    assert "no longer there" in viewer.missing
    assert viewer.predict(viewer.read(image_file(toy)), viewer.make_intervention([0])).coverage < 1
    for impossible in (lambda: viewer.make_intervention([0], removed=5), lambda: viewer.effects([])):
        with pytest.raises(UserError, match="needs the run's data"):
            impossible()
    assert opened(run, data=toy).examples()
    with pytest.raises(UserError, match="no such file"):
        opened(run, data=tmp_path / "gone")


def test_twenty_threads_get_the_same_predictions_and_stage_1_runs_once_per_image(trained, monkeypatch):
    alone, shared = opened(trained["ifam"]), opened(trained["ifam"])
    detections = counted(shared, "detect", monkeypatch)
    rows, interventions = shared.examples()[:4], [Intervention(drop=(k,)) for k in range(3)]
    requests = [(rows[k % 4], interventions[k % 3]) for k in range(20)]
    with ThreadPoolExecutor(20) as pool:
        measured = pool.submit(shared.effects, interventions[:1])
        predictions = [*pool.map(lambda one: shared.predict(shared.example(one[0]), one[1]), requests)]
        assert len(measured.result()) == 2
    assert len(detections) == 4 + 2
    for (row, intervention), prediction in zip(requests, predictions, strict=True):
        assert torch.equal(prediction.probabilities, alone.predict(alone.example(row), intervention).probabilities)


def test_the_lock_is_first_come_first_served_and_survives_errors():
    device_lock, order, begun = FairLock(), [], threading.Event()

    def long():
        for k in range(3):
            with device_lock:
                order.append(f"long {k}")
                if k == 0:
                    begun.wait(5)

    working = threading.Thread(target=long)
    working.start()
    while not order:
        pass

    def short():
        with device_lock:
            order.append("short")

    waiting = threading.Thread(target=short)
    waiting.start()
    while device_lock._given < 2:
        pass
    begun.set()
    working.join(), waiting.join()
    assert order[1] == "short"
    with pytest.raises(ZeroDivisionError), device_lock:
        1 / 0  # noqa: B018
    with device_lock:
        order.append("after")


def test_names_are_escaped(trained, toy):
    viewer = opened(trained["ifam"])
    prediction = viewer.predict(viewer.read(image_file(toy)))
    shown = panel(prediction, ["<script>alert(1)</script>", "${x}{{y}}"], "as <trained>", blind=True)
    assert "<script>" not in shown
    assert not {"${", "{{"} & {shown[i : i + 2] for i in range(len(shown))}
    assert plain("a&b") == "a&amp;b"


def test_invalid_drawings_are_refused():
    assert not drawn_mask("", (8, 8)).any()
    for wrong in ("data:image/png;base64,AAAA", "data:image/png;base64,é", "nonsense"):
        with pytest.raises(UserError, match="cannot be read"):
            drawn_mask(wrong, (8, 8))
