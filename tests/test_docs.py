"""The documentation is correct: its code runs, its commands and flags exist, its links work, and its figures are those
in benchmarks/results."""

import contextlib
import importlib.util
import io
import json
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
from accelerate.commands.launch import launch_command_parser
from PIL import Image

from sightline import cli
from sightline.config.flags import flag_names
from sightline.errors import UserError
from sightline.methods import METHODS

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
def folder_of_pages(toy, tmp_path_factory) -> Path:
    """A folder as the pages assume it: photographs, an image, and a run with two parts."""
    folder = tmp_path_factory.mktemp("pages")
    toy_pictures(toy, folder / "my_photos", count=24)
    with Image.open(next((folder / "my_photos").rglob("*.png"))) as image:
        image.convert("RGB").save(folder / "bird.jpg")
    shutil.copy(folder / "bird.jpg", folder / "bird.png")
    flags = ("--epochs", 1, "--parts", 2, "--selector-size", 32, "--refine", "False")
    assert typed("train", "ifam", toy, *SMALL, *flags, "--out", folder / "runs" / "x")[0] == 0
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if blocks(page, "python")], ids=name_of)
def test_python_on_a_page_runs_from_top_to_bottom(page, folder_of_pages, monkeypatch):
    monkeypatch.chdir(folder_of_pages)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in blocks(page, "python"):
            exec(compile(code, name_of(page), "exec"), names)


def commands_on(page: Path) -> list[str]:
    """The arguments of every `sightline` command in its blocks; optional arguments in brackets are included."""
    lines = [line for code in blocks(page, "", "bash", "sh") for line in code.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"' \|\| .*", "", line) for line in lines]  # what a job script does afterwards
    launchers = r"(?:(?:srun|accelerate launch|ray job submit) .* )?"
    matches = [re.match(rf"{launchers}sightline\s+(.*)", line) for line in lines]
    return [re.sub(r"[\[\]]", "", match.group(1)) for match in matches if match]


@pages
def test_every_command_on_a_page_exists_with_its_flags(page):
    wrong = []
    for line in commands_on(page):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                cli.parse(shlex.split(line, comments=True))
            except UserError as error:
                wrong.append(f"{line}: {error}")
            except SystemExit as exit_:
                wrong += [line] if exit_.code else []
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "ledger.md"], ids=name_of)
def test_flags_in_the_text_of_a_page_exist(page):
    """Outside blocks: `--flag` must be a flag of some command, method or benchmark. The ledger records commands with
    the flags of their time."""
    kinds = [command.config for command in cli.COMMANDS.values()] + [entry.config for entry in METHODS.values()]
    # --check is of sha256sum
    known = set().union(*map(flag_names, kinds)) | {"--help", "--num-processes", "--shaping", "--check"}
    options = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks").glob("*.py"))
    known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", options, re.MULTILINE)}
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    code = " ".join(re.findall(r"`([^`]+)`", text))
    flags = {flag.replace("_", "-") for flag in re.findall(r"(?<!\S)--[a-z][\w.-]*\w", code)}
    assert sorted(flag for flag in flags if flag not in known) == []


def test_commands_are_found_on_the_pages_at_all():
    assert sum(len(commands_on(page)) for page in PAGES) > 60
    found = commands_on(DOCS / "scaling.md")
    assert any(line.startswith("train erm DATA --precision") for line in found)
    assert sum("--engine ray" in line for line in found) == 2  # one of them by ray job submit
    assert any(line.startswith("train erm DATA --out runs/x --resume") for line in found)  # by srun


def test_launchers_on_the_page_on_scaling_are_called_with_flags_that_they_have():
    code = "\n".join(blocks(DOCS / "scaling.md", "", "bash")).replace("\\\n", " ")
    launched = re.findall(r"accelerate launch (.*? sightline \w+)", code)
    assert len(launched) == 3
    parser = launch_command_parser()
    for arguments in launched:
        parsed = parser.parse_args(shlex.split(arguments.replace("'$HEAD'", "HEAD").replace("$SLURM_NODEID", "1")))
        assert (parsed.module, parsed.training_script) == (True, "sightline")


@pytest.mark.parametrize("script", [code for code in blocks(DOCS / "scaling.md", "bash") if "#SBATCH" in code])
def test_job_scripts_are_valid_bash(script, tmp_path):
    (tmp_path / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True).stderr == b""


def test_every_extra_is_named_in_the_installation_instructions():
    listed = re.search(r"# extras: (.*)", (DOCS / "index.md").read_text(encoding="utf-8"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert listed is not None
    assert set(listed.group(1).split(", ")) == set(extras) - {"dev"}


def test_every_method_is_listed_with_its_help_line():
    """In docs/methods.md: `| `NAME` | HELP`, in the order of the table of methods, and nothing else."""
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    page = page[: page.index("\n## What they share")]
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (.*?) (?:\||\[More\])", page, re.MULTILINE))
    assert listed == {name: entry.help for name, entry in METHODS.items()}
    assert list(listed) == list(METHODS)


def test_every_folder_of_the_package_is_described_in_the_design():
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "src" / "sightline").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \| ", page, re.MULTILINE)) == folders


def test_files_named_in_the_design_exist():
    """In the columns of the present layout; the first column of files is the layout before the restructuring."""
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    present = "\n".join(line.split("|")[-2] if line.startswith("|") else line for line in page.splitlines())
    files = set(re.findall(r"`([\w/]+\.py)`", present)) - {"docs/import_graph.py", "tests/test_imports.py"}
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "src" / "sightline" / file).exists()] == []


@pages
def test_functions_that_implement_an_equation_are_where_a_page_says(page):
    lost = []
    for file, name, inside in CODE.findall(page.read_text(encoding="utf-8")):
        path = ROOT / "src" / "sightline" / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        wanted = [name, inside] if inside else [name]
        lost += [f"{file}:{w}" for w in wanted if not re.search(rf"^\s*(def|class) {w}\b", text, re.MULTILINE)]
    assert not lost


# ---- links -----------------------------------------------------------------------------------------------------------


@pages
def test_links_and_images_exist(page):
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = [link.split("#")[0] for link in LINK.findall(prose) if not link.startswith(("#", "http://", "https://"))]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pages
def test_tests_and_results_named_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/]+(?:\.\w+)?)`", text))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    files = set(re.findall(r"`(\w+_(?:cpu|h200|papers|pixels|decoder|s|validation)\.json)`", text))
    assert sorted(name for name in files if not (RESULTS / name).exists()) == []


def test_no_image_is_unused_or_large():
    used = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))}
    images = list((DOCS / "pictures").iterdir())
    assert {image.name for image in images} - used == {"favicon.png"}
    assert max(image.stat().st_size for image in images) < 700_000


def test_the_site_builds_without_warnings_loads_nothing_external_and_can_be_searched(tmp_path):
    pytest.importorskip("zensical", reason="needs zensical: pip install 'sightline[docs]'")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    made = sorted((tmp_path / "site").rglob("*.html"))
    assert len(made) >= len(PAGES)  # there is also a page for error 404
    for page in made:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?https?://[^>]*>', text), page.name
    assert "worst-group" in (tmp_path / "site" / "search.json").read_text(encoding="utf-8")


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger():
    sys.path.append(str(DOCS))  # it imports its neighbours
    spec = importlib.util.spec_from_file_location("ledger", DOCS / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ledger_and_the_generated_tables_are_up_to_date(ledger):
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


def test_the_table_of_results_in_the_readme_has_one_recipe_and_as_many_seeds_as_it_says(ledger):
    runs = json.loads((RESULTS / "waterbirds_v1.json").read_text(encoding="utf-8"))["runs"]
    own = [run for run in runs if run["row"] in ledger.HEADLINE.values()]
    seeds = {kind: {} for kind in ("birds", "wbr")}
    for run in own:
        seeds[run["set"]].setdefault(run["row"], []).append(run["seed"])
    assert {len(some) for some in seeds["birds"].values()} == {1}
    assert {len(some) for some in seeds["wbr"].values()} == {3}
    assert len(seeds["birds"]) == len(ledger.HEADLINE) <= 8
    assert all("--epochs 10" in run["command"] for run in own if run["method"] != "DFR train")
    assert {run["n"] for run in own} == {5794}


def test_the_compute_cost_matches_the_result_file():
    counted = json.loads((RESULTS / "pixel_operations.json").read_text(encoding="utf-8"))["rows"]
    gflops = {row["variant"]: f"{row['gflops']:.1f}" for row in counted}
    names = ("the default", "pixels, zoom, look at twice the size", "patches", "the dense ViT")
    default, once, patches, dense = (gflops[name] for name in names)
    sentence = f"{default} GFLOPs per image ({once} with `--refine False`), with patches {patches}, for the dense"
    assert f"{sentence} ViT {dense}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_in_the_readme_is_the_median_of_its_seeds():
    medians = json.loads((RESULTS / "demo_seeds.json").read_text(encoding="utf-8"))["median"]
    assert {one["seeds"] for one in medians.values()} == {5}
    ifam, erm, true = (f"{100 * medians[name]['worst_group']:.1f} %" for name in ("ifam", "erm", "pixels"))
    lowest = f"{100 * medians['ifam']['lowest_worst_group']:.1f} %"
    sentence = f"right in {ifam} (the median of five seeds, the lowest {lowest}), fine-tuning on whole images in {erm},"
    assert f"{sentence} and with true masks of pixels it would be {true}" in (ROOT / "README.md").read_text("utf-8")


NUMBER = r"([+-]?\d*\.?\d+)"
FIGURE = re.compile(rf"{NUMBER}(?: ?%| points| times)* \[{NUMBER}, {NUMBER}[^\]]*\]")  # with its interval
ENDS = ("interval", "middle_80_percent", "spread", "lowest_highest", "share_of_limit_lowest_highest")


def figures_in(result: Any) -> Iterator[tuple[float, float, float]]:
    """Every figure with an interval in a result file."""
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
    """[figures, 3]: value, low and high as stored, in per cent, with the opposite sign in per cent, and inverted."""
    files = sorted(RESULTS.glob("*.json"))
    known = np.array([one for path in files for one in figures_in(json.loads(path.read_text(encoding="utf-8")))])
    return in_per_cent(np.unique(known, axis=0))


def in_per_cent(known: np.ndarray) -> np.ndarray:
    """[figures, 3]: as they are, in per cent, with the opposite sign in per cent, and inverted."""
    turned = known[:, [0, 2, 1]]
    with np.errstate(divide="ignore"):
        return np.concatenate([known, 100 * known, -100 * turned, 1 / turned])


def is_known(figure: re.Match[str], known: np.ndarray) -> bool:
    numbers = np.array([float(number) for number in figure.groups()])
    steps = np.array([10.0 ** -len(number.partition(".")[2]) for number in figure.groups()])
    return bool((abs(known - numbers) <= 0.5 * steps + 1e-9).all(axis=1).any())


def measured_part(page: Path) -> str:
    """The page without the output of `make demo`, and without lines whose figures a test checks itself."""
    text = page.read_text(encoding="utf-8")
    start = {"README.md": "\n## Results", "docs/interventions.md": "\n## The fine print"}.get(name_of(page), "")
    return "\n".join(line for line in text[text.index(start) :].splitlines() if "`tests/" not in line)


@pages
def test_every_figure_with_an_interval_is_in_a_result_file(page, measured):
    unknown = [one.group() for one in FIGURE.finditer(measured_part(page)) if not is_known(one, measured)]
    assert unknown == []


def figures_by_row(result: Any, key: str = "") -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Every figure with an interval, by the row that it is of, or that it is compared with; rows have a recipe."""
    if isinstance(result, list):
        yield from (one for some in result for one in figures_by_row(some))
    elif isinstance(result, dict):
        names = {result.get("row"), result.get("method"), result.get("against"), key if "line" in result else None}
        yield from ((one, figure) for one in names if isinstance(one, str) for figure in figures_in(result))
        for inner, some in result.items():
            yield from figures_by_row(some, inner)


@pytest.fixture(scope="module")
def measured_rows() -> dict[str, np.ndarray]:
    """By the name of a row in any result file: its figures, and those of pairs in which it is the first."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    files = sorted(set(RESULTS.glob("*.json")) - {RESULTS / "demo_seeds.json"})  # whose methods have no recipe
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    for name, figure in (one for content in contents for one in figures_by_row(content)):
        found.setdefault(name, []).append(figure)
    claims = [claim for content in contents if isinstance(content, dict) for claim in content.get("claims", [])]
    tests = [test for claim in claims for test in claim["tests"]]
    for name, one in (item for test in tests for item in (test["figures"] or {}).items()):
        found.get(name, []).extend(figures_in(one))
    return {name: in_per_cent(np.array(some)) for name, some in found.items()}


@pages
def test_in_a_table_every_figure_is_of_the_row_that_the_line_names(page, measured_rows):
    wrong = []
    for line in measured_part(page).splitlines():
        name = line.split("|")[1].strip().strip("*`") if line.startswith("|") and line.count("|") > 2 else ""
        if name in measured_rows:
            found = FIGURE.finditer(line)
            wrong += [f"{name}: {one.group()}" for one in found if not is_known(one, measured_rows[name])]
    assert wrong == []


def test_figures_are_found_on_the_pages_at_all():
    assert sum(len(FIGURE.findall(measured_part(page))) for page in PAGES) > 500
