"""Writes what the pages say of measurements from benchmarks/results, so that they cannot go stale.

python docs/ledger.py            # ledger.md, results_a2.md, and the tables of other pages
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from a2_page import page as a2_page
from birds_tables import TABLES as BIRDS
from demo_tables import TABLES as DEMO
from parts_tables import TABLES as PARTS
from relevance_tables import TABLES as RELEVANCE
from scaling_tables import TABLES as SCALING
from selector_tables import TABLES as SELECTOR
from v1_tables import HEADLINE as HEADLINE
from v1_tables import README
from v1_tables import TABLES as V1

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
NOT_RUN, NOT_TESTABLE = "not run", "not testable here"
COUNTS = ("fails", "holds", "undecided")  # what counts where several studies test a claim
VERDICTS = ("holds", "fails", "undecided", NOT_TESTABLE, NOT_RUN)
MOST = 4  # tests named of one claim
FAMILIES = {  # title, and the studies that decide its claims
    "F": ("iFAM", ("v1", "waterbirds", "interventions")),
    "A": ("A²", ("a2", "v1")),
    "R": ("RobustViT", ("relevance",)),
    "B": ("Ours", ("v1", "waterbirds", "a2")),
    "I": ("Ours, of interventions", ("interventions",)),
}
# What was measured here, but does not decide the claim: it is about other models.
OUTSIDE = {
    "A1": "about DINOv2 of 21 M to 1.1 B parameters; measured on a family of 1 to 21 M, trained on toy images",
    "A4": "about embedders of 300 M parameters and more; the largest at hand has 21 M",
    "A13": "about DINOv2 with 300 M parameters and more; measured on the same small family",
    "F14": "about self-supervised features; measured with supervised ones",
}
STUDIES = {"claims_v1.json": "v1", "claims_wbr.json": "waterbirds", "claims_interventions.json": "interventions"}
FILES = {"SELF": "BACKBONE", "U2NET": "FILE.onnx"}  # that lines of rows name
INTRODUCTION = """\
# The papers' claims

<!-- Written by docs/ledger.py from benchmarks/results/claims_*.json: change those, not this. -->

Papers say what a user would like to rely on. Here every such claim is a test that can come out false, and it is listed
whatever came out: a claim that fails is a finding. They were tested on other data, and with smaller backbones, than the
papers' (see [results](results.md)), so a claim that fails here may hold there.

A test **holds** when the 95 % interval of its difference lies above its margin, **fails** when it lies below, and is
**undecided** when it spans it. A claim fails when one of its deciding tests does, holds when all do, and is undecided
otherwise. Where several studies test a claim, all are shown, and it counts as failed if one fails, and as held if one
holds and none fails. Each test is at 95 % by itself, not all of them together, except on Waterbirds v1.0
(`claims_v1.json`): there the tests of a claim are corrected for their number, and a single seed of a trained row
decides nothing. Differences are in points. The files hold n and seeds, and every test, also those beside the deciding
ones, with figures, intervals and recipes.
"""
MEASURED = {  # what a user would type: the row's name, and its file
    "`probe`": ("probe", "papers"),
    "`erm`": ("ERM", "papers"),
    "`erm --balance logit-adjustment`": ("ERM, balanced loss", "pixels"),
    "`pdiscoformer` (K = 4)": ("PDiscoFormer K=4", "papers"),
    "`late-mask`, true masks": ("late mask, true", "papers"),
    "`early-mask`, true masks, whole patches": ("early mask, true", "papers"),
    "`early-mask --sight pixels --patch-threshold 0.1`, true masks": ("early mask, true, pixels", "papers"),
    "`early-mask`, U2-Net's masks, whole patches": ("early mask, U2-Net (supervised)", "papers"),
    "`early-mask`, FOUND's masks, whole patches": ("early mask, FOUND", "papers"),
    "`early-mask`, TokenCut's masks, whole patches": ("early mask, TokenCut", "papers"),
    "`ifam --sight patches`, as in the papers (K = 1)": ("iFAM K=1", "papers"),
    "`ifam --sight patches`, as in the papers (K = 4)": ("iFAM K=4", "papers"),
    "`ifam --preset published` (K = 1)": ("iFAM K=1, published", "papers"),
    "`ifam --selector learned --parts 1 --refine False`": ("iFAM K=1, pixels, look once", "pixels"),
    "`ifam --selector learned --parts 1`": ("iFAM K=1, pixels", "pixels"),
    "**`ifam`**, the default (K = 4)": ("iFAM K=4, clusters", "selector"),
}
PAIRED = {  # cells of the matrix, all with the ViT-Ti of the other table
    "`centre-crop`": ("centre", "crop-probe"),
    "`random-crop`": ("random", "crop-probe"),
    "`a2`": ("attention:TI", "crop-probe"),
    "`a2`, the ViT-S looks": ("attention:S", "crop-probe"),
    "`dfr`, which uses group labels": ("everything", "mask-dfr"),
    "`a2-dfr`, which uses group labels": ("attention:TI", "crop-dfr"),
}
WEIGHTS = {"TI": "vit_ti16_augreg_in1k.safetensors", "S": "dino_s16_reg4.safetensors"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def table(*rows: tuple[str, ...]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def percent(found: dict[str, Any] | None) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * found[key] for key in ("value", "low", "high"))) if found else ""


# ---- the ledger ------------------------------------------------------------------------------------------------------


def known_claims(results: Path) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """What each file says of each claim: those that tested it, what counts first, or else the one that says why not."""
    said: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(results.glob("claims_*.json")):
        for claim in read(path)["claims"]:
            said.setdefault(claim["id"], []).append((path.name, claim))
    found = {}
    for name in sorted(said, key=lambda one: (list(FAMILIES).index(one[0]), int(one[1:]))):
        if name in OUTSIDE:
            said[name] = [(file, one | {"verdict": NOT_TESTABLE, "lacks": OUTSIDE[name]}) for file, one in said[name]]
        tested = [one for one in said[name] if one[1]["verdict"] not in (NOT_RUN, NOT_TESTABLE)]
        untestable = [one for one in said[name] if one[1]["verdict"] == NOT_TESTABLE]
        found[name] = (
            sorted(tested, key=lambda one: COUNTS.index(one[1]["verdict"])) or untestable[:1] or said[name][:1]
        )
    return found


def in_words(test: dict[str, Any]) -> str:
    gained = test["difference"]
    if not gained:
        return f"{test['test']}: {test['verdict']}"
    value, low, high = (100 * gained[key] for key in ("value", "low", "high"))
    seeds = (test.get("seeds") or {}).values()
    return f"{test['test']}: {value:+.1f} [{low:.1f}, {high:.1f}]" + ", one seed" * (bool(seeds) and min(seeds) == 1)


def tests_of(claim: dict[str, Any]) -> str:
    """The deciding ones, those that went against the claim first."""
    order = ("fails", "undecided", "holds", NOT_RUN, NOT_TESTABLE)
    if claim["id"] in OUTSIDE:
        return OUTSIDE[claim["id"]]
    deciding = sorted((one for one in claim["tests"] if one["decides"]), key=lambda one: order.index(one["verdict"]))
    more = [f"and {len(deciding) - MOST} more"] if len(deciding) > MOST else []
    return "<br>".join([*map(in_words, deciding[:MOST]), *more]) or claim["lacks"]


def family(letter: str, claims: dict[str, list[tuple[str, dict[str, Any]]]]) -> str:
    title, studies = FAMILIES[letter]
    rows: list[tuple[str, ...]] = [("", "claim, and the paper's figure", "here", "what decided it", "file")]
    for name, findings in claims.items():
        for file, claim in findings if name.startswith(letter) else ():
            untested = claim["verdict"] == NOT_RUN
            words = f"{claim['claim']} *{claim['paper']}*"
            rows.append((name, words, f"**{claim['verdict']}**", tests_of(claim), "" if untested else f"`{file}`"))
    return f"## {title}\n\n{table(*rows)}\n\nTo run them:\n\n```\n{usage(studies)}\n```\n"


def usage(studies: Iterable[str]) -> str:
    """The commands of these studies, from what run.py and claims.py begin with."""
    found: list[str] = []
    for script in ("run.py", "claims.py"):
        said = ast.get_docstring(ast.parse((RESULTS.parent / script).read_text(encoding="utf-8"))) or ""
        commands = re.findall(r"^    (\S(?:.*\\\n)*.*)$", said, re.MULTILINE)
        words = [f"{script} {study} " for study in studies]
        found += [re.sub(r"^    ", "", one, flags=re.MULTILINE) for one in commands if any(w in one for w in words)]
    return "\n".join(found)


def ledger(results: Path = RESULTS) -> str:
    claims = known_claims(results)
    counts = Counter(claim["verdict"] for findings in claims.values() for _, claim in findings[:1])
    counted = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    files = [(path.name, read(path)) for path in sorted(results.glob("claims_*.json"))]
    made = [
        ("file", "made by", "at commit"),
        *((f"`{a}`", f"`{b['command']}`", f"`{b['commit'][:7]}`") for a, b in files),
    ]
    whole = [INTRODUCTION, f"{len(claims)} claims: {counted}.\n"]
    whole += [family(letter, claims) for letter in FAMILIES]
    whole += [f"## Where the figures are\n\nIn `benchmarks/results`:\n\n{table(*made)}\n", commands(claims)]
    return "\n".join(whole)


def commands(claims: dict[str, list[tuple[str, dict[str, Any]]]]) -> str:
    """What trains the rows that decide, claim by claim, where the file knows their recipes."""
    blocks = [
        f"{name}:\n\n```\n{command_for(STUDIES[file], claim['recipes'])}\n```\n"
        for name, findings in claims.items()
        for file, claim in findings[:1]
        if claim.get("recipes")
    ]
    return "## What trains the rows of a claim\n\n" + "\n".join(blocks)


def command_for(study: str, recipes: dict[str, str]) -> str:
    sets = ["birds"] if study == "waterbirds" else sorted({row.partition(": ")[0] for row in recipes})
    data = [f"{name}=DATA" for name in sets]
    needed = [f"{word}={file}" for word, file in FILES.items() if any(f":{word}" in line for line in recipes.values())]
    options = ["--data", *data, "--backbones", "TI=BACKBONE", *needed, "--rows", *recipes]
    return f"python benchmarks/run.py {study} {shlex.join(options)}"


# ---- the tables ------------------------------------------------------------------------------------------------------


def measured(results: Path = RESULTS) -> str:
    names = {"papers": "wbr_ti_papers", "pixels": "wbr_ti_pixels", "selector": "selector_wbr"}
    files = {key: {row["row"]: row for row in read(results / f"{name}.json")["rows"]} for key, name in names.items()}
    rows: list[tuple[str, ...]] = [("`sightline train …`", "seeds", "mean of groups", "worst group", "pixel IoU")]
    for words, (name, file) in MEASURED.items():
        row = files[file][name]
        found, iou = row["metrics"]["test"], "" if "true" in name else pixel_iou(row)
        rows.append(
            (words, str(len(row["seeds"])), percent(found["mean_of_groups"]), percent(found["worst_group"]), iou)
        )
    return table(*rows)


def pixel_iou(row: dict[str, Any]) -> str:
    """The mean over images and seeds, or the range of the seeds."""
    if by_seed := row.get("pixel_iou"):
        return f"{min(by_seed):.2f} to {max(by_seed):.2f}"
    seen = ((row.get("sight") or {}).get("test") or {}).get("pixel_iou")
    return "" if seen is None else f"{seen['value']:.2f}"


def paired(results: Path = RESULTS) -> str:
    cells = {(cell["where"], cell["what"]): cell for cell in read(results / "matrix_wbr_h200.json")["cells"]}
    rows: list[tuple[str, ...]] = [("`sightline train …`", "chosen on validation data", "worst group")]
    for words, (where, what) in PAIRED.items():
        kind, _, short = where.partition(":")
        cell = cells[f"{kind}:{WEIGHTS[short]}" if short else kind, f"{what}:{WEIGHTS['TI']}"]
        rows.append((words, cell["way"], percent(cell["worst_group"])))
    return table(*rows)


TABLES = {
    "../README.md": README,
    "index.md": DEMO,
    "choosing.md": {"measured": measured, "paired": paired},
    "results.md": BIRDS,
    "results_parts.md": PARTS,
    "results_v1.md": V1,
    "methods/ifam.md": SELECTOR,
    "methods/relevance.md": RELEVANCE,
    "scaling.md": SCALING,
}


def with_tables(name: str, results: Path = RESULTS) -> str:
    """The page, with what stands between its marks made anew."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for mark, make in TABLES[name].items():
        start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        made = f"{start}\n\n{make(results)}\n\n{end}"
        page, times = re.subn(f"{start}.*?{end}", lambda _, made=made: made, page, flags=re.DOTALL)
        assert times == 1, f"{name} has no place for the table {mark}"
    return page


def main() -> None:
    (DOCS / "ledger.md").write_text(ledger(), encoding="utf-8")
    (DOCS / "results_a2.md").write_text(a2_page(RESULTS), encoding="utf-8")
    for name in TABLES:
        (DOCS / name).write_text(with_tables(name), encoding="utf-8")


if __name__ == "__main__":
    main()
