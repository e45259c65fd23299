"""`sightline intervene` on a run whose third part learned the shortcut."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sightline.config import Ifam, Intervene, Pdiscoformer
from sightline.intervene import InterventionSession
from sightline.interventions.apply import Intervened, apply_intervention
from sightline.interventions.file import Intervention
from sightline.interventions.search import next_interventions
from sightline.load import load_as_trained as load
from sightline.load import with_saved_intervention
from sightline.train import train
from sightline.training.checkpoint import load_tensors, save_tensors
from sightline.verify.verify import verify

from ..commands import QUICK, edit, typed

COLOURS = ((230, 205, 25), (25, 205, 230), (230, 25, 155), (25, 40, 50))  # things of two kinds, a tag, and the ground
COUNTS = {"train": 24, "val": 48, "test": 24}


def drawn(label: int, tagged: bool, generator) -> tuple[Image.Image, np.ndarray]:
    """An image of 4 × 4 patches, and the colour of each patch."""
    colour = np.full((4, 4), 3)
    row, column = generator.integers(0, 3), generator.integers(0, 3)
    colour[row : row + 2, column : column + 2] = label
    colour[(0, 0, 3, 3)[k := generator.integers(4)], (0, 3, 0, 3)[k]] = 2 if tagged else 3
    pixels = np.array(COLOURS)[colour].repeat(8, axis=0).repeat(8, axis=1) + generator.integers(-12, 13, (32, 32, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), colour


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Things of two kinds, with a tag or without; and the colours of the training pictures' patches."""
    folder, generator, colours = tmp_path_factory.mktemp("tags"), np.random.default_rng(0), []
    with (folder / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "group", "split"])
        for split, count in COUNTS.items():
            for i in range(count):
                label, tagged = i % 2, bool(i // 2 % 2)
                photo, colour = drawn(label, tagged, generator)
                photo.save(folder / f"{split}{i}.png")
                words = ("round", "square")[label], ("plain", "tagged")[tagged]
                rows.writerow([f"{split}{i}.png", words[0], " ".join(words), split])
                colours += [colour] * (split == "train")
    return folder, np.stack(colours)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """It has learned that parts are colours, and that what is tagged is square, whatever it looks like."""
    folder, colours = data
    settings = {"parts": 3, "sight": "patches", "size": 32, "epochs": 1, "batch": 8, "balance": "none", "ema": None}
    where = {"out": tmp_path_factory.mktemp("runs") / "run", "workers": 0, "device": "cpu"}
    run = train(Ifam(folder, backbone="sightline-nano", **settings, **where))
    method = load(run).method
    photos = [np.asarray(Image.open(folder / f"train{i}.png")) for i in range(COUNTS["train"])]
    images = torch.tensor(np.stack(photos)).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        features = method.where.discover(images).features.movedim(1, -1)
        means = [features[torch.tensor(colours == part)].mean(dim=0) for part in range(4)]
        method.where.prototypes.copy_(torch.stack(means))
        head, tokens, wanted = method.what.vit.head, [], []
        handle = head.register_forward_hook(lambda _, given, __: tokens.append(given[0]))
        for drop in ((), (2,)):
            sight = apply_intervention(method, Intervention(drop=drop)).look(images)
            method.judge(images, sight)
            tagged = torch.tensor((colours == 2).any(axis=(1, 2)) & (not drop)).float()
            wanted.append(4 * tagged + torch.tensor((colours == 1).any(axis=(1, 2))).float() * 2 - 1)
        handle.remove()
        solution = torch.linalg.lstsq(torch.cat(tokens), torch.cat(wanted)[:, None], driver="gelsd").solution[:, 0]
        head.weight.copy_(torch.stack([-solution, solution]))
    save_tensors(run / "best.safetensors", method.state_dict(), load_tensors(run / "best.safetensors")[1])
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def worst(folder, split="test") -> float:
    return json.loads((folder / "metrics.json").read_text())["splits"][split]["worst_group"]["value"]


def typed_well(*arguments) -> tuple[str, str]:
    code, out, err = typed(*arguments)
    assert code == 0, err
    return out, err


def test_the_part_that_learned_the_shortcut_is_found_saved_applied_and_cleared(run, data):
    out, err = typed_well("evaluate", run, *QUICK)
    assert "intervention" not in err
    before = (run / "predictions" / "test.csv").read_bytes()
    assert worst(run) < 0.5

    out, _ = typed_well("intervene", run, "--find", "--name", "2=tag", *QUICK)
    assert "Without part 2 (tag)" in out
    assert "expect a smaller gain on others" in out
    kept = Intervention.load(run / "intervention.json")
    assert 2 in kept.drop
    assert kept.names == {2: "tag"}
    found = kept.facts["found"]
    assert (found["split"], found["n"], found["objective"]) == ("val", COUNTS["val"], "worst-group")
    assert found["gain"]["low"] > 0
    for name in ("parts", "quantiles"):
        assert Image.open(run / "interventions" / f"{name}.png").width > 8 * 32

    out, _ = typed_well("intervene", run)
    assert "without part 2 (tag)" in out
    assert "round tagged" in out
    assert "2 = tag" in out

    out, err = typed_well("evaluate", run, *QUICK)
    assert f"{run / 'intervention.json'}: {kept.description}" in err
    assert worst(run / kept.folder) > 0.9
    assert (run / "predictions" / "test.csv").read_bytes() == before
    assert (run / kept.folder / "predictions" / "test.csv").read_bytes() != before
    assert json.loads((run / kept.folder / "metrics.json").read_text())["intervention"]["drop"] == list(kept.drop)
    out, _ = typed_well("compare", run, run / kept.folder, "--details")
    assert "better" in out

    typed_well("evaluate", run, "--no-intervention", *QUICK)
    assert (run / "predictions" / "test.csv").read_bytes() == before
    out, _ = typed_well("intervene", run, "--clear")
    assert "no intervention is saved" in out
    assert Intervention.load(run / "intervention.json") == Intervention(names={2: "tag"})
    assert "2 = tag" in out


def test_clear_removes_nothing_if_the_command_fails_and_keeps_the_part_names(run, tmp_path):
    typed_well("intervene", run, "--drop", 0, "--name", "2=tag")
    kept = (run / "intervention.json").read_bytes()
    code, _, err = typed("intervene", run, tmp_path / "nowhere", "--clear", "--quantile", ".9", *QUICK)
    assert (code, "no such file or folder" in err) == (2, True)
    assert (run / "intervention.json").read_bytes() == kept
    typed_well("intervene", run, "--clear", "--drop", 1)
    now = Intervention.load(run / "intervention.json")
    assert (now.drop, now.names) == ((1,), {2: "tag"})
    edit(run / "intervention.json", "{")
    typed_well("intervene", run, "--clear")
    assert not (run / "intervention.json").exists()


def test_a_removed_part_is_no_longer_forced_and_a_forced_part_is_never_removed_by_the_search(run):
    typed_well("intervene", run, "--force", 1, "--force", 2)
    out, _ = typed_well("intervene", run, "--drop", 1)
    assert "without part 1; part 2 forced" in out
    typed_well("intervene", run, "--force", 1)
    now = Intervention.load(run / "intervention.json")
    assert (now.drop, now.force) == ((), (1,))
    assert "without part 1" not in next_interventions(now, 3, {})
    typed_well("audit", run, "--quick", *QUICK)


def test_a_run_with_an_intervention_is_still_blind(run, data):
    typed_well("intervene", run, "--drop", 2)
    model = with_saved_intervention(load(run))
    assert isinstance(model.method, Intervened)
    images = torch.stack([torch.tensor(np.asarray(Image.open(data[0] / f"val{i}.png"))) for i in range(2)])
    certificate = verify(model.method, images.permute(0, 3, 1, 2).float() / 255, draws=1, ascent_steps=2)
    assert certificate.verdict == "blind", certificate.sentence
    out, err = typed_well("verify", run, data[0] / "val0.png", "--draws", 1, "--limit", 1)
    assert "Blind outside its sight" in out
    assert "without part 2" in err


def test_the_search_reports_the_intervention_that_it_replaces(run):
    typed_well("intervene", run, "--drop", 0, "--force", 1)
    out, _ = typed_well("intervene", run, "--find", *QUICK)
    assert "It replaces: without part 0; part 1 forced." in out
    assert Intervention.load(run / "intervention.json").force == ()
    out, _ = typed_well("intervene", run, "--find", *QUICK)
    assert "It replaces" not in out


def test_each_flag_replaces_only_its_own_setting(run):
    typed_well("intervene", run, "--drop", 2, "--drop", 1, "--name", "0=round one", "--name", "1=square one")
    out, _ = typed_well("intervene", run, "--quantile", 0.97, *QUICK)
    assert "without part 1 (square one), part 2; token removal beyond the 0.97 distance quantile" in out
    kept = Intervention.load(run / "intervention.json")
    assert (kept.drop, kept.quantile, len(kept.thresholds)) == ((1, 2), 0.97, 3)
    assert kept.facts["calibrated"]["split"] == "train"
    assert sum(kept.facts["calibrated"]["patches"]) > 24 * 4
    typed_well("intervene", run, "--drop", 2, "--force", 0)
    kept = Intervention.load(run / "intervention.json")
    assert (kept.drop, kept.force, kept.quantile) == ((2,), (0,), 0.97)
    assert kept.names == {0: "round one", 1: "square one"}


def test_part_names_alone_change_nothing(run):
    typed_well("intervene", run, "--name", "2=tag")
    _, err = typed_well("evaluate", run, *QUICK)
    assert "intervention" not in err


def test_a_new_part_name_keeps_the_metrics_of_other_splits(run):
    typed_well("intervene", run, "--drop", 2)
    typed_well("evaluate", run, "--split", "val", *QUICK)
    typed_well("intervene", run, "--name", "2=tag")
    typed_well("evaluate", run, *QUICK)
    path = run / "intervened-drop2" / "metrics.json"
    content = json.loads(path.read_text())
    assert {*content["splits"]} == {"val", "test"}
    assert content["intervention"]["words"] == "without part 2 (tag)"
    path.write_text(json.dumps(content | {"intervention": content["intervention"] | {"drop": [1, 2]}}))
    path.with_name("metrics.json.sha256").unlink()  # changed by hand
    typed_well("evaluate", run, *QUICK)
    assert {*json.loads(path.read_text())["splits"]} == {"test"}


def test_predict_applies_the_saved_intervention_and_says_so(run, data):
    image = data[0] / "test2.png"  # round and tagged: the one that is taken for square
    plain, _ = typed_well("predict", run, image)
    typed_well("intervene", run, "--drop", 2)
    changed, err = typed_well("predict", run, image)
    assert "without part 2 (--no-intervention: as trained)" in err
    assert (plain.splitlines()[1].split(",")[1], changed.splitlines()[1].split(",")[1]) == ("square", "round")
    assert typed_well("predict", run, image, "--no-intervention")[0] == plain


def test_parquet_names_the_intervention_and_holds_the_parts_of_every_image(run, data, tmp_path):
    """The hash is that of the effect: a new name for a part does not change it, another effect does."""

    def rows(name: str, *flags) -> list[dict]:
        typed_well("predict", run, data[0] / "test2.png", "--out", tmp_path / name, *flags, *QUICK)
        return pq.read_table(tmp_path / name).to_pylist()

    (plain,) = rows("plain.parquet")
    hashes = {}
    for name, flags in (("drop", ("--drop", 2)), ("named", ("--name", "2=tag")), ("other", ("--drop", 1))):
        typed_well("intervene", run, *flags)
        (changed,) = rows(f"{name}.parquet")
        hashes[name] = changed["intervention"]
        assert changed["weights"] == plain["weights"]
        if name == "drop":
            assert (plain["predicted"], changed["predicted"]) == ("square", "round")
            assert changed["coverage"] < plain["coverage"]
            assert changed["calibrated"] is None  # there are no validation predictions with it yet
    assert plain["intervention"] is None
    assert hashes["drop"] == hashes["named"] != hashes["other"]
    assert rows("as-trained.parquet", "--no-intervention") == [plain]
    model = load(run)
    shares = model.predict(data[0] / "test2.png").sight.parts[0].mean(dim=(1, 2))
    assert plain["parts"] == pytest.approx(shares.tolist(), abs=1e-6)
    assert sum(plain["parts"]) == pytest.approx(1, abs=1e-5)
    assert len(plain["parts"]) == 3 + 1  # and the background


def test_a_mask_given_by_the_user_is_the_sight(run, data, tmp_path):
    photo, colour = drawn(0, True, np.random.default_rng(5))
    photo.save(tmp_path / "one.png")
    mask = (colour == 0).repeat(8, axis=0).repeat(8, axis=1)
    Image.fromarray((255 * mask).astype(np.uint8)).save(tmp_path / "mask.png")
    plain, _ = typed_well("predict", run, tmp_path / "one.png")
    shown, _ = typed_well(
        "predict", run, tmp_path / "one.png", "--mask", tmp_path / "mask.png", "--overlay", tmp_path / "o"
    )
    assert (plain.splitlines()[1].split(",")[1], shown.splitlines()[1].split(",")[1]) == ("square", "round")
    for photo, message in (((data[0],), "a mask is for a single image"), ((data[0] / "val0.png",), None)):
        code, _, err = typed("predict", run, *photo, "--mask", tmp_path / "mask.png")
        assert (code, message in err if message else True) == (2 if message else 0, True)
    Image.new("L", (8, 8)).save(tmp_path / "small.png")
    code, _, err = typed("predict", run, tmp_path / "one.png", "--mask", tmp_path / "small.png")
    assert (code, "8×8 pixels but its image has 32×32" in err) == (2, True)
    Image.new("L", (32, 32)).save(tmp_path / "nothing.png")
    _, err = typed_well("predict", run, tmp_path / "one.png", "--mask", tmp_path / "nothing.png")
    assert "empty sight for 1 image" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drop", 3), "part 3: does not exist; the model has parts 0 to 2"),
        (("--drop", 0, "--drop", 1, "--drop", 2), "keep at least one"),
        (("--find", "--drop", 1), "--find searches by itself"),
        (("--quantile", 2), "--quantile 2.0: must lie between 0 and 1"),
        (("--name", "head"), "such as 2=head"),
        (("--name", "8=head"), "part 8"),
    ],
)
def test_an_impossible_intervention_is_an_error_of_one_line(run, arguments, message):
    code, _, err = typed("intervene", run, *arguments)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err
    assert not (run / "intervention.json").exists()


def test_token_removal_needs_the_training_data(run, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    facts["data"]["path"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(facts))
    for arguments in (("intervene", run, "--quantile", 0.99), ("audit", run), ("strips", run), ("localize", run)):
        code, _, err = typed(*arguments)
        assert (code, f"no longer there; name their folder: {run} DATA" in err) == (2, True), err
        assert "evaluate" not in err
    typed_well("intervene", run, "--drop", 1)


def test_an_intervention_for_other_weights_is_an_error(run):
    typed_well("intervene", run, "--drop", 1)
    tensors, facts = load_tensors(run / "best.safetensors")
    tensors["where.prototypes"] += 1
    save_tensors(run / "best.safetensors", tensors, facts)
    for command in (("evaluate", run, *QUICK), ("intervene", run)):
        code, _, err = typed(*command)
        assert (code, "made for other weights" in err) == (2, True)
    typed_well("intervene", run, "--clear")


def test_pdiscoformer_accepts_interventions_and_an_untrained_model_gets_none(data, tmp_path):
    settings = {"parts": 3, "size": 32, "epochs": 1, "batch": 8, "workers": 0, "device": "cpu", "lr": 1e-9}
    run = train(Pdiscoformer(data[0], out=tmp_path / "run", backbone="sightline-nano", **settings))
    out, _ = typed_well("intervene", run, "--find", *QUICK)
    assert "No intervention improves validation worst-group accuracy significantly (best of 7: " in out
    assert "no intervention is saved" in out
    assert not (run / "intervention.json").exists()
    assert len(json.loads((run / "interventions" / "search.json").read_text())["trials"]) == 7
    typed_well("intervene", run, "--drop", 0)
    typed_well("evaluate", run, *QUICK)
    assert (run / "intervened-drop0" / "metrics.json").exists()
    code, _, err = typed("predict", run, data[0] / "val0.png", "--mask", data[0] / "val0.png")
    assert (code, "takes no masks" in err) == (2, True)


def test_the_objective_is_auc_where_the_checkpoint_was_selected_by_it_and_there_are_no_groups():
    model = SimpleNamespace(run=SimpleNamespace(facts={"selection": {"metric": "auc"}}))
    without, groups = SimpleNamespace(groups=None), SimpleNamespace(groups=np.zeros(1))
    assert InterventionSession(Intervene(Path("run")), None, model, None)._objective(without) == "auc"
    assert InterventionSession(Intervene(Path("run")), None, model, None)._objective(groups) is None
    command = Intervene(Path("run"), objective="worst-class")
    assert InterventionSession(command, None, model, None)._objective(without) == "worst-class"


def test_a_method_without_parts_is_an_error(runs):
    code, _, err = typed("intervene", runs / "probe", "--drop", 0)
    assert (code, "discovers no parts" in err) == (2, True)
