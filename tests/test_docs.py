"""The pages say what is true: their code runs, their commands exist, their links lead somewhere, their figures are
those that were measured."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from PIL import Image

from sightline import cli

from .commands import SMALL, toy_pictures, typed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([\w/]+\.py):(\w+)(?:\.(\w+))?`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ---- code ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(toy, tmp_path_factory) -> Path:
    """A folder as the pages assume it: photographs, a picture, and a run of two parts."""
    folder = tmp_path_factory.mktemp("place")
    toy_pictures(toy, folder / "my_photos", count=24)
    with Image.open(next((folder / "my_photos").rglob("*.png"))) as picture:
        picture.convert("RGB").save(folder / "bird.jpg")
    shutil.copy(folder / "bird.jpg", folder / "bird.png")
    told = ("ifam", toy, *SMALL, "--epochs", 1, "--parts", 2, "--size", 32, "--selector-size", 32, "--refine", "False")
    assert typed("train", *told, "--out", folder / "runs" / "x")[0] == 0
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if blocks(page, "python")], ids=name_of)
def test_python_on_a_page_runs_from_top_to_bottom(page, place, monkeypatch):
    monkeypatch.chdir(place)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in blocks(page, "python"):
            exec(compile(code, name_of(page), "exec"), names)


def commands_on(page: Path) -> list[str]:
    """What follows `sightline` on every line of its blocks that is a command; optional words are taken as given."""
    lines = [line for code in blocks(page, "", "bash", "sh") for line in code.replace("\\\n", " ").splitlines()]
    found = [re.match(r"(?:accelerate launch .* -m )?sightline\s+(.*)", line) for line in lines]
    return [re.sub(r"[\[\]]", "", one.group(1)) for one in found if one]


@pages
def test_every_command_on_a_page_exists_with_its_flags(page):
    wrong = []
    for line in commands_on(page):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                tyro.cli(cli.Command, args=shlex.split(line, comments=True))
            except SystemExit as exit_:
                wrong += [line] if exit_.code else []
    assert not wrong


def test_commands_are_found_on_the_pages_at_all():
    assert sum(len(commands_on(page)) for page in PAGES) > 60
    assert any(line.startswith("train erm DATA --precision") for line in commands_on(DOCS / "scaling.md"))


def test_every_extra_is_named_where_installing_is_told():
    told = re.search(r"# extras: (.*)", (DOCS / "index.md").read_text(encoding="utf-8"))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert told is not None
    assert set(told.group(1).split(", ")) == set(known) - {"dev"}


@pages
def test_functions_that_hold_an_equation_are_where_a_page_says(page):
    lost = []
    for file, name, inside in CODE.findall(page.read_text(encoding="utf-8")):
        path = ROOT / "src" / "sightline" / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        wanted = [name, inside] if inside else [name]
        lost += [f"{file}:{one}" for one in wanted if not re.search(rf"^\s*(def|class) {one}\b", text, re.MULTILINE)]
    assert not lost


# ---- links -----------------------------------------------------------------------------------------------------------


@pages
def test_links_and_pictures_are_there(page):
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = [one.split("#")[0] for one in LINK.findall(prose) if not one.startswith(("#", "http://", "https://"))]
    assert [one for one in targets if one and not (page.parent / one).exists()] == []


def test_no_picture_is_left_over_or_large():
    used = {Path(one).name for page in PAGES for one in LINK.findall(page.read_text(encoding="utf-8"))}
    pictures = list((DOCS / "pictures").iterdir())
    assert {one.name for one in pictures} - used == {"favicon.png"}
    assert max(one.stat().st_size for one in pictures) < 700_000


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'sightline[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    known = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    made = sorted((tmp_path / "site").rglob("*.html"))
    assert len(made) >= len(PAGES)  # and one for what is not found
    for page in made:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?https?://[^>]*>', text), page.name


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger():
    sys.path.append(str(DOCS))  # it has neighbours
    spec = importlib.util.spec_from_file_location("ledger", DOCS / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ledger_and_the_tables_are_those_of_the_results(ledger):
    remedy = "run `python docs/ledger.py`"
    assert (DOCS / "ledger.md").read_text(encoding="utf-8") == ledger.ledger(), remedy
    assert (DOCS / "results_a2.md").read_text(encoding="utf-8") == ledger.a2_page(RESULTS), remedy
    for name in ledger.TABLES:
        assert (DOCS / name).read_text(encoding="utf-8") == ledger.with_tables(name), remedy


def test_every_claim_of_the_papers_is_in_the_ledger(ledger):
    text = ledger.ledger()
    names = [f"{letter}{i}" for letter, last in zip("FARB", (23, 15, 12, 3), strict=True) for i in range(1, last + 1)]
    assert [name for name in names if f"\n| {name} | " not in text] == []


def claimed(verdict: str, **more) -> dict:
    test = {
        "test": "a − b",
        "verdict": verdict,
        "decides": True,
        "difference": {"value": 0.02, "low": 0.01, "high": 0.03},
    }
    return {"id": "A3", "claim": "Crops help.", "paper": "1", "verdict": verdict, "lacks": "", "tests": [test]} | more


def test_a_file_that_tested_a_claim_counts_before_one_that_did_not(ledger, tmp_path):
    files = {
        "claims_1.json": [
            claimed("not run", tests=[]),
            claimed("not testable here", id="A15", tests=[], lacks="no weights"),
        ],
        "claims_2.json": [claimed("holds"), claimed("not run", id="A15", tests=[])],
    }
    for name, claims in files.items():
        known = {"command": "python x.py", "commit": "abcdef0123", "claims": claims}
        (tmp_path / name).write_text(json.dumps(known))
    lines = [line for line in ledger.ledger(tmp_path).splitlines() if line.startswith("| A")]
    assert lines == [
        "| A3 | Crops help. *1* | **holds** | a − b: +2.0 [1.0, 3.0] | `claims_2.json` |",
        "| A15 | Crops help. *1* | **not testable here** | no weights | `claims_1.json` |",
    ]


# What stands in a line of the table of results, and the rows that it is about.
HEADLINE = {
    "frozen probe (one seed)": ["probe"],
    "ERM": ["ERM"],
    "PDiscoFormer, K = 4": ["PDiscoFormer K=4"],
    "iFAM with whole patches, as in the papers, K = 1 / 4": ["iFAM K=1", "iFAM K=4"],
    "… as in its published code (`--preset published`), K = 1": ["iFAM K=1, published"],
    "iFAM, our default: pixels": ["iFAM K=1, pixels"],
    "true masks, whole patches: late / early": ["late mask, true", "early mask, true"],
    "true masks, pixels": ["early mask, true, pixels"],
}


def headline(said: str, rows: list[dict[str, Any]], percent) -> list[str]:
    """A line of the table as it should be: of one row with every interval, of two with those of the worst group."""
    figures = [row["metrics"]["test"] for row in rows]
    means, worst = (
        [percent(one[name]).replace(" [", " % [") for one in figures] for name in ("mean_of_groups", "worst_group")
    )
    mean = means[0] if len(rows) == 1 else " / ".join(one.split()[0] for one in means) + " %"
    found = [row["sight"]["test"] for row in rows if row["sight"] and "true" not in row["row"]]
    seen = [" / ".join(f"{one[name]['value']:.2f}".lstrip("0") for name in ("grid_iou", "pixel_iou")) for one in found]
    return [said, mean, " / ".join(worst), ", ".join(seen)]


def test_the_table_of_results_says_what_was_measured(ledger):
    files = [json.loads((RESULTS / f"wbr_ti_{name}.json").read_text(encoding="utf-8")) for name in ("papers", "pixels")]
    known = {row["row"]: row for file in files for row in file["rows"]}
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\|(.*)\|$", page[page.index("\n## Results") :], re.MULTILINE)[2:]
    said = [[cell.strip(" *") for cell in line.split("|")] for line in lines]
    wanted = [headline(words, [known[row] for row in rows], ledger.percent) for words, rows in HEADLINE.items()]
    assert said == wanted
    assert {len(known[rows[0]]["seeds"]) for words, rows in HEADLINE.items() if "seed" not in words} == {3}


def test_what_it_costs_is_what_was_counted():
    counted = json.loads((RESULTS / "pixel_operations.json").read_text(encoding="utf-8"))["rows"]
    gflops = {row["variant"]: f"{row['gflops']:.1f}" for row in counted}
    names = ("the default", "pixels, zoom, look at twice the size", "patches", "the dense ViT")
    default, once, patches, dense = (gflops[name] for name in names)
    sentence = f"{default} GFLOPs per picture ({once} with `--refine False`), with patches {patches}, for the dense"
    assert f"{sentence} ViT {dense}" in (ROOT / "README.md").read_text(encoding="utf-8")


NUMBER = r"([+-]?\d*\.?\d+)"
FIGURE = re.compile(rf"{NUMBER}(?: ?%| points| times)* \[{NUMBER}, {NUMBER}[^\]]*\]")  # with its interval
ENDS = ("interval", "middle_80_percent", "lowest_highest", "share_of_limit_lowest_highest")


def figures_in(result: Any) -> Iterator[tuple[float, float, float]]:
    """Every figure of a result file that has an interval."""
    if isinstance(result, list):
        yield from (one for some in result for one in figures_in(some))
    elif isinstance(result, dict):
        ends = [(result[end][0], result[end][1]) for end in ENDS if result.get(end)]
        ends += [(result["low"], result["high"])] if "low" in result else []
        values = [value for value in result.values() if isinstance(value, float)]
        yield from ((value, low, high) for value in values for low, high in ends if low <= value <= high)
        yield from (one for some in result.values() for one in figures_in(some))


@pytest.fixture(scope="module")
def measured() -> np.ndarray:
    """[figures, 3]: as they are, in per cent, the other way round, and how many times as much the other one was."""
    files = sorted(RESULTS.glob("*.json"))
    known = np.array([one for path in files for one in figures_in(json.loads(path.read_text(encoding="utf-8")))])
    known = np.unique(known, axis=0)
    turned = known[:, [0, 2, 1]]
    with np.errstate(divide="ignore"):
        return np.concatenate([known, 100 * known, -100 * turned, 1 / turned])


def measured_part(page: Path) -> str:
    """Without what a user's own `make demo` shows, and without what a test itself holds."""
    text = page.read_text(encoding="utf-8")
    start = {"README.md": "\n## Results", "docs/interventions.md": "\n## The fine print"}.get(name_of(page), "")
    return "\n".join(line for line in text[text.index(start) :].splitlines() if "`tests/" not in line)


@pages
def test_every_figure_with_an_interval_is_in_a_file_of_results(page, measured):
    unknown = []
    for figure in FIGURE.finditer(measured_part(page)):
        numbers = np.array([float(number) for number in figure.groups()])
        steps = np.array([10.0 ** -len(number.partition(".")[2]) for number in figure.groups()])
        if not (abs(measured - numbers) <= 0.5 * steps + 1e-9).all(axis=1).any():
            unknown.append(figure.group())
    assert unknown == []


def test_figures_are_found_on_the_pages_at_all():
    assert sum(len(FIGURE.findall(measured_part(page))) for page in PAGES) > 500
