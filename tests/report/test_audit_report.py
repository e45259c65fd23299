"""`sightline audit`: one page for every kind of method, with the figures of the other commands."""

import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
import tyro

from sightline.cli import parse
from sightline.config import Audit, Gradmask, Ifam, Masktune, Robustvit, Rrr
from sightline.data.sampling import sample_balanced
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.explain.background_swaps import SwapResults
from sightline.interventions.apply import apply_intervention
from sightline.interventions.file import Intervention
from sightline.load import load_as_trained as load
from sightline.metrics.coverage import SightSummary
from sightline.metrics.estimates import Estimate, Metrics
from sightline.metrics.inference import predict_rows
from sightline.metrics.predictions import Predictions
from sightline.report.case import open_report
from sightline.report.gallery import jpeg_uri, select_images
from sightline.report.proof import Proof
from sightline.report.provenance import flags, metric_label, training_command
from sightline.report.summary import answers, background_matters, cards, of_all_images
from sightline.report.survey import SurveyResults
from sightline.report.text import best_group, breakable, keep_together, mark_code
from sightline.training.distributed import make_accelerator
from sightline.training.run_folder import read_run

from ..commands import QUICK, SMALL, edit, typed
from ..small_runs import table

SECTIONS = (
    "sight",
    "groups",
    "classes",
    "mistakes",
    "proof",
    "shape",
    "backgrounds",
    "looks",
    "without",
    "removal",
    "masks",
    "maps",
    "run",
)
METHODS = {
    "ifam": ("ifam", "--parts", 3, "--epochs", 1, "--sight", "patches", "--balance", "none", "--ema", "None"),
    "pdiscoformer": ("pdiscoformer", "--parts", 2, "--epochs", 1),
    "a2": ("a2", "--crop-size", 0.5, "--heads", 0),
    "early": ("early-mask", "--epochs", 1, "--sight", "pixels"),
    "late": ("late-mask", "--epochs", 1),
    "probe": ("probe",),
}


class Page(HTMLParser):
    """Elements with their attributes, and the text of every section and table row."""

    def __init__(self, html):
        super().__init__()
        html = html.replace("\N{NO-BREAK SPACE}", " ")
        self.html, self.elements, self.rows, self.sections, self.open = html, [], [], {}, ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.elements.append((tag, given))
        if tag == "section":
            self.open = given["id"]
            self.sections[self.open] = ""
        if tag == "tr":
            self.rows.append("")

    def handle_data(self, data):
        if self.open:
            self.sections[self.open] += data
        if self.rows:
            self.rows[-1] += f"{data.strip()} "

    def row(self, name):
        return next(row for row in self.rows if row.strip().startswith(name))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    toy = write_toy(tmp_path_factory.mktemp("data") / "toy", train=40, val=16, test=24, size=32)
    for name, (method, *flags_) in METHODS.items():
        assert typed("train", method, toy, *flags_, *SMALL, "--size", 32, "--out", folder / name)[0] == 0, name
    return folder


@pytest.fixture(scope="module")
def pages(trained):
    """The report of each, written as a user would."""
    found = {}
    for name in METHODS:
        code, out, _ = typed("audit", trained / name, *QUICK, "--quick", "--examples", 60)
        assert code == 0, out
        assert str(trained / name / "audit.html") in out
        found[name] = Page((trained / name / "audit.html").read_text())
    return found


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_every_section_in_order(pages, name):
    page = pages[name]
    assert tuple(page.sections) == SECTIONS
    for section, text in page.sections.items():
        assert len(text.split()) > 10, section
    assert ("no discovered parts" in page.sections["without"]) == (name not in ("ifam", "pdiscoformer"))
    assert "--quick" in page.sections["shape"] or "whole image" in page.sections["shape"]


def test_tests_of_explanations_are_shown_once_they_are_run(pages, trained, tmp_path):
    assert "sightline stress" in pages["probe"].sections["maps"]
    flags_ = ("--tests", "curves", "--maps", "attention", "--no-figures")
    assert typed("stress", trained / "probe", *flags_, *QUICK)[0] == 0
    found = json.loads((trained / "probe" / "stress" / "test.json").read_text())
    assert typed("audit", trained / "probe", *QUICK, "--quick", "--out", tmp_path / "audit.html")[0] == 0
    page = Page((tmp_path / "audit.html").read_text())
    assert found["sentences"][0] in page.sections["maps"]
    mean = next(curve["mean"] for curve in found["curves"] if curve["map"] == "attention")
    assert Estimate(**mean).value_text in page.sections["maps"]


@pytest.mark.parametrize("name", METHODS)
def test_the_page_is_self_contained_and_accessible(pages, name):
    page = pages[name]
    assert not re.search(r"https?:|//[a-z]", re.sub(r"base64,[^\"]*", "", page.html))
    images = [given for tag, given in page.elements if tag == "img"]
    assert 20 <= len(images) <= 60
    assert all(given["src"].startswith("data:image/jpeg;base64,") for given in images)
    assert all(len(given["alt"]) > 10 for given in images)
    assert not [given for tag, given in page.elements if tag in ("script", "iframe")]
    assert len(page.html) < 1_000_000
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))
    assert sum(tag == "table" for tag, _ in page.elements) == sum(tag == "caption" for tag, _ in page.elements)
    assert all("scope" in given for tag, given in page.elements if tag == "th")
    ids = [given["id"] for _, given in page.elements if "id" in given]
    assert len(ids) == len(set(ids))
    inside = {given["href"] for tag, given in page.elements if tag == "a"}
    assert inside <= {f"#{one}" for one in ids}


@pytest.mark.parametrize("name", METHODS)
def test_the_top_answers_what_a_reader_asks_first(pages, name):
    page = pages[name]
    top = page.html.split("<nav")[0]
    for question in ("Where does it fail?", "What does it look at?", "Is that proved?", "Does the background matter?"):
        (section, answer), *others = re.findall(f'<a href="#([a-z]+)">{re.escape(question)}</a></dt><dd>(.*)</dd>', top)
        assert section in SECTIONS
        assert len(answer.split()) > 4
        assert not others
    contents = page.html.split("<nav")[1].split("</nav>")[0]
    assert tuple(re.findall(r'href="#([a-z]+)"', contents)) == SECTIONS
    blind = name in ("ifam", "a2", "early")
    assert ("<strong>proved</strong>" in top) == blind
    assert ("<strong>not blind</strong>" in top) == (not blind)


def test_how_much_is_seen_is_that_of_all_images(pages):
    top, section = pages["ifam"].html.split("<nav")[0], pages["ifam"].sections["sight"]
    (seen, n), *_ = re.findall(r"It sees (\d+) % of the image on average \(± \d+ %, n = (\d+)\)", top)
    assert (n, top.count(f"<strong>{seen} %</strong>")) == ("24", 1)
    assert "by their visible fraction, n = 24." in section


def test_the_confusion_matrix_has_percentages_of_the_label(pages):
    row = pages["ifam"].html.split('class="matrix"')[1].split("<tbody>")[1].split("</tr>")[0]
    counts, shares = re.findall(r">([\d,]+) <span", row), re.findall(r"\((\d+) %\)", row)
    total = sum(map(int, counts))
    assert [f"{100 * int(count) / total:.0f}" for count in counts] == shares


@pytest.mark.parametrize("name", METHODS)
def test_group_accuracies_are_those_of_evaluate(pages, trained, name):
    metrics = Metrics.from_dict(json.loads((trained / name / "metrics.json").read_text())["splits"]["test"])
    for group, estimate in metrics.groups.items():
        figures = f"{estimate.value_text} {estimate.interval} {estimate.n:,}"
        assert any(row.strip().startswith(group) and figures in row for row in pages[name].rows)
    assert metrics.headline() in pages[name].html


def test_verdicts_are_those_of_verify(pages):
    verdicts = {name: page.sections["proof"] for name, page in pages.items()}
    for name in ("ifam", "a2", "early"):
        assert "Proved: no content outside its sight" in verdicts[name], name
    for name in ("pdiscoformer", "late"):
        assert "Not blind" in verdicts[name], name
    assert "Not blind: this method sees the whole image." in verdicts["probe"]
    assert "Redrawn: the background, outside the masks." in verdicts["probe"]


def test_part_removal_equals_the_intervention(pages, trained):
    context = open_report(Audit(trained / "ifam", workers=0, device="cpu"))
    model = load(trained / "ifam")
    accelerator = make_accelerator("cpu")
    before, after = (
        predict_rows(apply_intervention(model.method, one), context.rows, context.indices, model.expects, accelerator)
        for one in (Intervention(), Intervention(drop=(1,)))
    )
    row = pages["ifam"].row("without part 1")
    for group in np.unique(before.groups):
        own = before.groups == group
        change = 100 * (after.correct[own].mean() - before.correct[own].mean())
        assert f"{change:+.1f}".replace("-", "−") in row
    assert "do not select parts on them" in pages["ifam"].sections["without"]


def test_part_names_and_the_intervention_are_on_the_page(trained, tmp_path):
    assert typed("intervene", trained / "ifam", "--drop", 0, "--name", "2=the <i>beak</i>", *QUICK)[0] == 0
    try:
        out = tmp_path / "page.html"
        assert typed("audit", trained / "ifam", *QUICK, "--quick", "--out", out, "--examples", 30)[0] == 0
        page = Page(out.read_text())
        assert "Intervention applied: without part 0." in page.html
        assert "part 2 (the &lt;i&gt;beak&lt;/i&gt;)" in page.html
        assert "<i>" not in page.html
        assert "without part 0, set by hand" in page.sections["run"]
        assert "Removed by the intervention." in page.sections["looks"]
    finally:
        assert typed("intervene", trained / "ifam", "--clear", *QUICK)[0] == 0


def test_reports_with_and_without_the_intervention_are_kept_apart(trained, tmp_path):
    run, few = shutil.copytree(trained / "ifam", tmp_path / "run"), (*QUICK, "--quick", "--examples", 10)
    assert typed("intervene", run, "--drop", 0, *QUICK)[0] == 0
    code, out, errors = typed("audit", run, *few)
    assert code == 0, errors
    assert f"applying {run / 'intervention.json'}: without part 0" in errors
    corrected = run / "intervened-drop0" / "audit.html"
    assert str(corrected) in out
    before = corrected.read_text()
    code, out, errors = typed("audit", run, *few, "--no-intervention")
    assert code == 0, errors
    assert "intervention.json" not in errors
    assert str(run / "audit.html") in out
    assert "<dt>Intervention</dt><dd>none</dd>" in (run / "audit.html").read_text()
    assert corrected.read_text() == before


def test_without_the_intervention_its_file_may_be_damaged(trained, tmp_path):
    run = shutil.copytree(trained / "ifam", tmp_path / "run")
    edit(run / "intervention.json", "{")
    assert open_report(Audit(run, workers=0, device="cpu", intervention=False)).intervention == Intervention()
    with pytest.raises(UserError, match="damaged"):
        open_report(Audit(run, workers=0, device="cpu"))


def test_classes_and_files_cannot_write_into_the_page(tmp_path):
    data = table(tmp_path / "data", ("<b>x</b>", "y&z"))
    (data / "23.png").rename(data / "<script>1.png")
    (data / "rows.csv").write_text((data / "rows.csv").read_text().replace("23.png", "<script>1.png"))
    assert typed("train", "probe", data, *SMALL, "--out", tmp_path / "run")[0] == 0
    assert typed("audit", tmp_path / "run", *QUICK)[0] == 0
    page = Page((tmp_path / "run" / "audit.html").read_text())
    assert "<b>" not in page.html
    assert "<script" not in page.html
    assert "<b>x</b>" in page.sections["groups"]
    assert "Accuracy by class" in page.sections["groups"]
    assert "no masks" in page.sections["backgrounds"]
    assert "no masks" in page.sections["masks"]


def test_two_hundred_images_stay_under_five_megabytes():
    noise = torch.rand(3, 160, 160, generator=torch.Generator().manual_seed(0))
    assert 200 * len(jpeg_uri(noise)) < 4_000_000


def test_galleries_are_balanced_and_reproducible():
    cells = np.repeat([0, 1, 2], [100, 3, 10])
    rows = sample_balanced(np.arange(113), cells, 9, np.random.default_rng(0))
    assert np.bincount(cells[rows]).tolist() == [3, 3, 3]
    assert np.array_equal(rows, sample_balanced(np.arange(113), cells, 9, np.random.default_rng(0)))
    assert len(sample_balanced(np.array([], dtype=int), cells, 9, np.random.default_rng(0))) == 0


@pytest.mark.parametrize(("parts", "count"), [(0, 20), (3, 6)])
def test_a_few_images_are_balanced_over_groups(parts, count):
    groups = np.repeat([0, 1, 2, 3], 30)
    logits = np.eye(4)[groups] * 9
    predictions = Predictions.from_logits(
        [str(i) for i in range(120)], groups, logits, tuple("abcd"), groups, tuple("abcd")
    )
    areas = np.ones((120, parts)) if parts else None
    chosen = select_images(SurveyResults(predictions, np.ones(120), areas), 20, 0, Intervention())
    assert len(chosen.overview) == count
    for rows in (chosen.overview, *chosen.parts.values()):
        assert np.ptp(np.bincount(groups[rows], minlength=4)) <= 1


def test_the_best_group_is_named_and_whether_the_difference_is_significant():
    def metrics(**groups):
        cells = {name: Estimate(*values, n=100, how="") for name, values in groups.items()}
        worst = min(cells, key=lambda name: cells[name].value)
        low = Estimate(*groups[worst], n=100, how="", of=worst)
        return Metrics("test", 100, 1, low, low, low, {}, groups=cells, worst_group=low)

    apart = best_group(metrics(easy=(0.99, 0.98, 1.0), hard=(0.71, 0.68, 0.74)))
    assert apart == "Best group: easy, accuracy 99.0 % [98.0, 100.0]."
    assert "not significant" in best_group(metrics(easy=(0.9, 0.8, 0.95), hard=(0.85, 0.75, 0.92)))


def test_what_is_not_proved_is_neither_called_blind_nor_not_blind():
    class Refused:
        verdict, images, end_to_end = "refused", 4, None

    seen = Predictions.from_logits(["a", "b"], np.array([0, 1]), np.eye(2), ("x", "y"))
    low = Estimate(0.5, 0.4, 0.6, 2, "", "x")
    summary = SightSummary(low, 0.1, None, low, low, (0,) * 10)
    every = of_all_images(summary, seen, np.array([0.25, 0.75]))
    assert (every.coverage.value, every.coverage.n, sum(every.histogram)) == (0.5, 2, 2)
    assert {name: one.value for name, one in every.classes.items()} == {"x": 0.25, "y": 0.75}
    assert every.empty.value == 0
    metrics, proof = Metrics("test", 2, 1, low, low, low, {"x": low}), Proof(Refused())
    (card,) = (one for one in cards(metrics, every, proof) if one.title == "Proof of blindness")
    assert (card.value, card.tone) == ("not proved", "")
    said = answers(metrics, ["There are no errors."], (None, "no sight"), (None, "no time"), (None, "no masks"))
    assert [one.answer for one in said][1:] == ["No sight.", "Not tested: no time.", "Not measured: no masks."]


def test_a_changed_prediction_of_a_blind_model_is_explained():
    class Blind:
        verdict, images, end_to_end = "blind", 4, {}

    labels, names, logits = np.array([0, 1]), ("x", "y"), np.eye(2)
    same = Predictions.from_logits(["a", "b"], labels, logits, names)
    other = Predictions.from_logits(["a", "b"], labels, logits[::-1], names)

    def swapped(condition):
        predictions = {"original": same, "other": condition, "background": same}
        return SwapResults("given", "class", ("x",), predictions, {}, ())

    assert "can only move the sight" in background_matters(Proof(Blind()), swapped(other), "", "")
    assert "can only" not in background_matters(Proof(Blind()), swapped(same), "", "")
    assert "can only" not in background_matters(None, swapped(other), "", "")


def test_lines_do_not_break_inside_numbers_and_commands_stay_as_they_are():
    space = "\N{NO-BREAK SPACE}"
    assert keep_together("5 % [1, −2.5], n = 3<pre>5 % [1, 2]</pre> 1 %") == (
        f"5{space}% [1,{space}−2.5], n{space}={space}3<pre>5 % [1, 2]</pre> 1{space}%"
    )
    assert mark_code("<b> run `a <x>`") == "&lt;b&gt; run <code>a &lt;x&gt;</code>"
    assert breakable("<b>/x") == "&lt;b&gt;/<wbr>x"


def test_selection_rules_are_named_as_elsewhere_in_the_report():
    assert metric_label("balanced") == "Class-balanced accuracy"
    assert metric_label("worst-group (DFR-Val: x)") == "Worst-group accuracy (DFR-Val: x)"
    assert metric_label("last") == "last"


def test_the_training_command_reproduces_the_run(trained):
    run = read_run(trained / "ifam")
    command = training_command(run).split()
    assert command[:3] == ["sightline", "train", "ifam"]
    _, parsed = parse(command[1:])
    assert isinstance(parsed, Ifam)
    values = json.loads(json.dumps(vars(parsed), default=lambda value: getattr(value, "__dict__", str(value))))
    for name, value in run.facts["config"].items():
        if name not in ("out", "workers", "device", "data"):
            assert values[name] == value, name


@pytest.mark.parametrize("kind", [Robustvit, Rrr, Gradmask, Masktune])
def test_renamed_flags_are_typed_as_the_command_line_knows_them(kind):
    typed_flags = flags({"init_from": "runs/erm", "seed": 3}, kind)
    assert typed_flags == ["--seed", "3", "--init-from", "runs/erm"]
    parsed = tyro.cli(kind, args=["data", *typed_flags])
    assert (parsed.init_from, parsed.seed) == ("runs/erm", 3)


def test_another_split_has_its_own_file_and_a_report_needs_no_images(trained):
    code, out, _ = typed("audit", trained / "probe", *QUICK, "--quick", "--split", "val", "--examples", 0)
    assert code == 0
    assert str(trained / "probe" / "audit-val.html") in out
    page = Page((trained / "probe" / "audit-val.html").read_text())
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert typed("audit", trained / "probe", *QUICK, "--examples", -1)[0] == 2


def test_on_a_phone_only_tables_scroll_sideways(pages, trained, browser):
    with browser.new_context(viewport={"width": 390, "height": 800}) as context:
        page = context.new_page()
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        for name in METHODS:
            page.goto((trained / name / "audit.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), name
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.className") == "skip"
    assert {url.split(":")[0] for url in requested} <= {"file", "data"}
