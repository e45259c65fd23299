"""`sightline strips`: the same images over several runs, background swaps, heat maps, and the page."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.config import Ifam, Pdiscoformer, Probe, Strips
from sightline.data.rows import Rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.interventions.file import Intervention
from sightline.report.contact_sheet import Note, SheetRow, centre_of_mass, draw_cross, draw_sheet, heat_map, shorten
from sightline.report.figures import PartFigures, find_counterparts, heat_map_rows, part_fractions
from sightline.report.strips import distinct_names, draw, part_removal_section, resize_for_sheet
from sightline.sight import Sight
from sightline.train import train

from ..commands import QUICK, copied, typed

SMALL = {"size": 32, "epochs": 1, "batch": 12, "workers": 0, "device": "cpu", "backbone": "random:nano", "lr": 1e-6}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of iFAM and one of PDiscoFormer, on the same toy images."""
    folder = tmp_path_factory.mktemp("strips")
    write_toy(folder / "toy", train=24, val=12, test=16, size=32)
    train(Ifam(folder / "toy", out=folder / "k2", parts=2, selector="learned", refine=False, selector_size=32, **SMALL))
    train(Pdiscoformer(folder / "toy", out=folder / "k3", parts=3, **SMALL))
    return folder


def figures_of_run(command: Strips, folder: Path, first: PartFigures | None = None) -> PartFigures:
    return PartFigures.open(command, folder, None, first)


def settings(*runs: Path, **more) -> Strips:
    return Strips(runs, examples=4, limit=16, workers=0, device="cpu", **more)


# ---- a page ----------------------------------------------------------------------------------------------------------


def test_one_self_contained_page_shows_every_kind_of_every_run(made, tmp_path):
    flags = ("--examples", 4, "--limit", 16, "--out", tmp_path / "out", *QUICK)
    code, out, err = typed("strips", made / "k2", made / "k3", *flags)
    assert (code, err) == (0, "")
    assert f"Figures saved to {tmp_path / 'out' / 'index.html'}" in out
    assert f"`sightline intervene {made / 'k3'} --find`" in out
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"parts.png", "occupancy.png", "swapped-k2.png", "swapped-k3.png"}
    page = (tmp_path / "out" / "index.html").read_text()
    sources = re.findall(r'src="([^"]{30})', page)
    assert len(sources) == 4
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert page.index("Discovered parts on the same") < page.index("Background swaps") < page.index("Part locations")
    assert "K = 3: PDiscoFormer, k3. Cut out along the object mask" in page
    assert "in 16 training images" in page  # as many as the limit allows


def test_runs_of_the_same_name_get_distinct_names(made, tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(made / "k2", tmp_path / parent / "run")
    drawn = draw(settings(tmp_path / "a" / "run", tmp_path / "b" / "run", out=tmp_path / "out"))
    assert {"swapped-a-run", "swapped-b-run"} < {*drawn.sheets}
    assert distinct_names([Path("x/k1"), Path("x/k2")]) == ["k1", "k2"]
    assert distinct_names([Path("x/k1"), Path("x/k1")]) == ["k1-0", "k1-1"]


def test_only_the_requested_kind_is_drawn_by_default_in_the_run(made, tmp_path):
    run = copied(made / "k2", tmp_path / "run")
    found = draw(settings(run, kind=("occupancy",)))
    assert found.page == run / "strips" / "index.html"
    assert set(found.sheets) == {"occupancy"}


def test_part_removal_has_a_page_with_table_and_images(made, tmp_path):
    run = copied(made / "k2", tmp_path / "run")
    code, out, err = typed("intervene", run, "--find", *QUICK)
    assert code == 0, err
    path = run / "interventions" / "index.html"
    assert f"Table with images: {path}" in out
    page = path.read_text()
    trials = json.loads((run / "interventions" / "search.json").read_text())["trials"]
    assert all(f"<td>{trial['step']}</td>" in page for trial in trials)
    assert page.count('src="data:image/jpeg') == 2
    measured = json.loads((run / "interventions" / "search.json").read_text())
    assert "Look at it." in part_removal_section(run, measured | {"suspect": {"sentence": "Look at it."}}).about
    found = draw(settings(run, kind=("left-out",), out=tmp_path / "out"))
    assert "without part 1" in found.page.read_text()
    assert found.notes == ()


# ---- the same images -------------------------------------------------------------------------------------------------


def test_every_run_is_drawn_on_the_same_images_of_all_groups(made):
    command = settings(made / "k2", made / "k3")
    first = figures_of_run(command, made / "k2")
    second = figures_of_run(command, made / "k3", first)
    (images, ours), (others, theirs) = first.part_maps(), second.part_maps()
    assert torch.equal(images.images, others.images)
    assert [note.text for note in images.notes] == sorted({note.text for note in images.notes})  # one of each
    assert (ours.caption, theirs.caption) == ("K = 2: iFAM, k2", "K = 3: PDiscoFormer, k3")
    assert (len(ours.legend), len(theirs.legend)) == (2, 3)


def test_removed_parts_are_neither_drawn_nor_listed(made):
    plain = figures_of_run(settings(made / "k2"), made / "k2")
    plain = replace(plain, intervention=Intervention(names={1: "head"}))
    changed = replace(plain, intervention=Intervention(drop=(0,), names={1: "head"}))
    assert [word for word, _ in plain.legend] == ["0", "head"]
    assert [word for word, _ in changed.legend] == ["head"]
    assert "without part 0" in changed.name
    assert [note.text.split(":")[0] for line in changed.occupancy() for note in line.notes] == [
        "true masks",
        "part 1 (head)",
    ]


def test_runs_on_other_data_and_methods_without_parts_are_refused(made, tmp_path):
    other = copied(made / "k3", tmp_path / "other")
    facts = json.loads((other / "run.json").read_text())
    facts["data"]["fingerprint"] = "0" * 64
    (other / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="trained on other data than"):
        draw(settings(made / "k2", other, out=tmp_path / "out"))
    probe = train(Probe(made / "toy", out=tmp_path / "probe", backbone="random:nano", size=32, workers=0, device="cpu"))
    with pytest.raises(UserError, match="discovers no parts"):
        draw(settings(probe, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert settings(made / "k2", made / "toy").runs_and_data == ((made / "k2",), made / "toy")
    with pytest.raises(UserError, match="no runs"):
        _ = Strips(()).runs_and_data


# ---- other backgrounds -----------------------------------------------------------------------------------------------


def test_objects_are_unchanged_on_another_background_and_token_removal_shows_less(made):
    from sightline.data.images import Preprocess, decode

    one = figures_of_run(settings(made / "k2", quantiles=(0.99, 0.2)), made / "k2")
    chosen, images, others, how = one.on_other_backgrounds()
    masks = [decode(one.dataset.rows, int(i), Preprocess.of(one.model.expects)).mask for i in chosen]
    inside = torch.stack([mask for mask in masks if mask is not None])[:, None].expand_as(images)
    assert torch.equal(images[inside], others[inside])
    assert (images[~inside] != others[~inside]).float().mean() > 0.8
    assert how.startswith("Cut out along the object mask")
    removals = [Intervention(quantile=q, thresholds=one.sketch.quantile(q)) for q in one.command.quantiles]
    seen = [one_.sight.coverage((32, 32)) for one_ in one.predict(others, [Intervention(), *removals])]
    assert (seen[0] >= seen[1]).all()
    assert seen[2].mean() < seen[0].mean()
    rows, _ = one.swapped()
    assert [row.caption for row in rows][2:] == [
        "on another background",
        "parts",
        "token removal beyond the 0.99 quantile",
        "token removal beyond the 0.2 quantile",
    ]


def rows_with(images: list[str], groups: list[str], splits: list[int]) -> Rows:
    names = tuple(sorted(set(groups)))
    numbers = np.array([names.index(group) for group in groups])
    labels = np.zeros(len(images), np.int64)
    return Rows("birds", Path(), images, labels, ("tern",), np.array(splits, np.int8), numbers, names)


def test_counterparts_are_found_by_path_and_the_common_background_comes_first():
    images = ["i/original/a.jpg", "i/original/b.jpg", "i/swapped/b.jpg", "i/swapped/c.jpg"]
    groups = ["tern/original", "tern/original", "tern/swapped", "tern/swapped"]
    rows = rows_with(images, groups, [0, 2, 2, 2])
    assert find_counterparts(rows, rows.split_indices("test")) == {1: 2}
    same = rows_with(images, ["tern/original"] * 4, [0, 2, 2, 2])
    assert find_counterparts(same, same.split_indices("test")) == {}


# ---- heat maps -------------------------------------------------------------------------------------------------------


def test_a_cell_belongs_to_a_part_as_far_as_its_visible_pixels_do():
    parts = torch.zeros(1, 3, 2, 2)
    parts[0, 0, 0], parts[0, 1, 1] = 1, 1  # part 0 above part 1
    keep = torch.tensor([[[True, True], [True, False]]])
    first, second = part_fractions(Sight(keep=keep, parts=parts), torch.zeros(1, 3, 8, 8))
    assert first[0].tolist() == [[1, 1], [0, 0]]
    assert second[0].tolist() == [[0, 0], [1, 0]]


def test_heat_maps_are_brightest_at_their_maximum_and_crosses_lie_at_the_centre():
    shares = torch.tensor([[0.0, 0.0], [0.0, 0.5]])
    image = heat_map(shares, 8)
    assert image.shape == (3, 8, 8)
    assert image.sum(dim=0).argmax() == 8 * 4 + 4
    assert centre_of_mass(shares) == (0.75, 0.75)
    assert centre_of_mass(torch.zeros(2, 2)) is None
    marked = draw_cross(image, (0.75, 0.75), (1.0, 1.0, 1.0), reach=2)
    assert marked[:, 6, 6].tolist() == [1, 1, 1]
    assert torch.equal(marked[:, :3, :3], image[:, :3, :3])


def test_many_parts_take_several_rows_under_one_caption():
    lines = heat_map_rows("K = 16", {f"part {k}": torch.rand(4, 4) for k in range(16)}, torch.rand(4, 4))
    assert [len(line.images) for line in lines] == [9, 8]
    assert [line.caption for line in lines] == ["K = 16", ""]
    assert lines[0].notes[0].text.startswith("true masks: max.")


# ---- sheets ----------------------------------------------------------------------------------------------------------


def test_a_sheet_is_as_wide_as_its_widest_row_and_images_keep_their_pixels():
    red = torch.zeros(2, 3, 10, 20)
    red[:, 0] = 1
    second = SheetRow("", red[:1], legend=[("part", (0, 0, 255))])
    page = draw_sheet([SheetRow("a", red, [Note("x"), Note("y")]), second])
    assert page.width == 2 * 28 + 16
    pixels = np.asarray(page)
    assert (pixels == (255, 0, 0)).all(axis=-1).sum() == 3 * 200
    assert (pixels == (0, 0, 255)).all(axis=-1).sum() > 100


def test_long_names_are_cut_at_the_start_and_images_are_resized():
    from PIL import ImageFont

    font = ImageFont.load_default(size=12)
    assert shorten("tern 9 %", 200, font) == "tern 9 %"
    assert shorten("001.Black_footed_Albatross 99 %", 100, font).endswith("Albatross 99 %"[3:])
    assert resize_for_sheet(torch.rand(1, 3, 448, 224)).shape == (1, 3, 224, 112)
    assert resize_for_sheet(torch.rand(1, 3, 32, 32)).shape == (1, 3, 96, 96)
    assert isinstance(draw_sheet([SheetRow("a", torch.rand(1, 3, 4, 4))]), Image.Image)
