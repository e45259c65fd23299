"""The claims of the papers, held against trained runs: holds, fails, undecided, not testable here, or not run.

    python benchmarks/waterbirds.py waterbirds --backbone vit_ti16_augreg_in1k.safetensors
    python benchmarks/claims.py runs/waterbirds --out claims_wbr.json

The first command trains the rows that the claims are about (see `--only` there); the second reads their answers, and
measures in the run folders what is not there yet: certificates of blindness, and what the sight's shape tells. A new
claim is a few lines in TESTED; those that have no test yet are in untested_claims.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional

from claim_figures import MEASURES, Missing, Runs, above_chance, certificates
from record import record
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from untested_claims import UNTESTED
from waterbirds_rows import CONTROLS, OTHER_FILLS, ROWS, SELECTED_BY_A_NET, TRUE, TRUE_PIXELS

HOLDS, FAILS, UNDECIDED, NOT_TESTABLE, NOT_RUN = "holds", "fails", "undecided", "not testable here", "not run"
RULE = (
    "A test holds when the 95 % interval of its difference lies above the margin, fails when it lies below, and is "
    "undecided when it spans it. The margin is 0; for 'within 1 point' it is −1 point (non-inferiority: being better "
    "does not count against it). A claim fails when one of its deciding tests fails, holds when all of them hold, and "
    "is undecided otherwise, also when only some were run; other tests are shown beside them. Each test is at 95 % by "
    "itself, not all together. Where there is one seed only, nothing is known of others: the interval is over pictures."
    " ERM and the rows with given masks have a recipe of their own (epochs, rates, head) in ROWS, stated beside their "
    "figures: F4 to F6 compare methods with their recipes, not methods alone. In F4 and F5 the rival trained as long "
    "as iFAM, with its rate but an ordinary head, decides too."
)


@dataclass(frozen=True)
class Finding:
    """What came of one test."""

    test: str
    verdict: str
    figures: dict[str, Any] | None = None  # by row
    difference: Estimate | None = None
    margin: float = 0.0
    decides: bool = True
    seeds: dict[str, int] | None = None  # by row
    note: str = ""


class Test(Protocol):
    @property
    def words(self) -> str: ...
    @property
    def rows(self) -> tuple[str, ...]: ...
    @property
    def decides(self) -> bool: ...
    def find(self, runs: Runs) -> Finding: ...


@dataclass(frozen=True)
class Claim:
    id: str
    says: str
    paper: str
    tests: tuple[Test, ...] = ()
    lacks: str = ""
    """What it would take to test it at all."""


def verdict(difference: Estimate, margin: float = 0.0) -> str:
    if difference.low > margin:
        return HOLDS
    return FAILS if difference.high < margin else UNDECIDED


def together(verdicts: Sequence[str]) -> str:
    """Of a claim, from those of its deciding tests."""
    if FAILS in verdicts:
        return FAILS
    for same in (NOT_RUN, HOLDS):
        if all(one == same for one in verdicts):
            return same
    return UNDECIDED


# ---- kinds of tests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beats:
    """One row against another, on the same pictures."""

    ours: str
    theirs: str
    measure: str = "worst group"  # one of MEASURES
    margin: float = 0.0
    decides: bool = True

    @property
    def words(self) -> str:
        margin = f" > {100 * self.margin:+.0f} points" if self.margin else ""
        return f"{self.measure}: {self.ours} − {self.theirs}{margin}"

    @property
    def rows(self) -> tuple[str, ...]:
        return self.ours, self.theirs

    def find(self, runs: Runs) -> Finding:
        figures, difference = MEASURES[self.measure](runs, self.ours, self.theirs)
        found = verdict(difference, self.margin)
        return Finding(self.words, found, figures, difference, self.margin, self.decides, seeds_of(runs, self.rows))


@dataclass(frozen=True)
class TellsLabel:
    """The shape of a row's sight, against chance."""

    row: str
    decides: bool = True

    @property
    def words(self) -> str:
        return f"label from shape: {self.row} − chance"

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.row,)

    def find(self, runs: Runs) -> Finding:
        figures, difference = above_chance(runs, self.row)
        found, seeds = verdict(difference), {self.row: len(runs.shape_answers(self.row))}
        return Finding(self.words, found, figures, difference, decides=self.decides, seeds=seeds)


@dataclass(frozen=True)
class Certified:
    """All of these rows that there are, on pictures of their own data: `blind`, or not, as `leaks` says."""

    expected: str
    rows: tuple[str, ...]
    decides: bool = True

    @property
    def words(self) -> str:
        return f"verify says {self.expected!r} of trained runs"

    def find(self, runs: Runs) -> Finding:
        figures = certificates(runs, self.rows)
        cases = [(one, one["verdict"] == self.expected) for one in figures.values() if one["verdict"]]
        found = judged(self.words, cases, figures)
        lacking = [name for name, one in figures.items() if not one["verdict"]]
        note = f"{found.note}; not certified: {', '.join(lacking)}" if lacking else found.note
        return replace(found, decides=self.decides, note=note)


@dataclass(frozen=True)
class Proved:
    """The same on backbones, by `benchmarks/proof.py`: early masking is blind, late leaks, soft is refused."""

    rows: tuple[str, ...] = ()
    decides: bool = True
    words: str = "verify of early, late and soft masking, on backbones"

    def find(self, runs: Runs) -> Finding:
        if not runs.proof.exists():
            raise Missing(f"{runs.proof.name}: make it with `python benchmarks/proof.py`")
        cases = json.loads(runs.proof.read_text(encoding="utf-8"))["rows"]
        figures = {" ".join(one[key] for key in ("weights", "dtype", "masking")): brief(one) for one in cases}
        return judged(self.words, [(one, one["as_claimed"]) for one in cases], figures)


def brief(case: dict[str, Any]) -> dict[str, Any]:
    return {key: case[key] for key in ("verdict", "images", "trials", "changed", "largest_change")}


def judged(words: str, cases: Sequence[tuple[dict[str, Any], bool]], figures: dict[str, Any]) -> Finding:
    """No interval: one changed bit is enough. A certificate that was refused proves nothing either way."""
    wrong = [one["verdict"] for one, as_claimed in cases if not as_claimed]
    found = HOLDS if not wrong else UNDECIDED if set(wrong) == {"refused"} else FAILS
    trials, changed = (sum(one[key] for one, _ in cases) for key in ("trials", "changed"))
    note = f"{len(cases) - len(wrong)} of {len(cases)} as claimed; of {trials:,} redraws {changed:,} changed the answer"
    return Finding(words, found, figures, note=note)


def seeds_of(runs: Runs, rows: Sequence[str]) -> dict[str, int]:
    return {row: len(runs.of(row)) for row in rows}


# ---- the claims ------------------------------------------------------------------------------------------------------

IFAM = ("iFAM K=1", "iFAM K=4", "iFAM K=8")
PAPERS = "iFAM K=8"  # whose figures the paper claims with; it decides, the others are shown beside it
SALIENCY = ("early mask, FOUND", "early mask, TokenCut", "early mask, U2-Net (supervised)")
NO_GRADIENT, PUBLISHED = ([f"{row}, {how}" for row in IFAM] for how in ("no mask gradient", "published"))
PDISCOFORMER = ("PDiscoFormer K=4", "PDiscoFormer K=8")
OURS = "iFAM K=1, pixels"
FINER = (OURS, "iFAM K=4, pixels")
EARLY = (*IFAM, *NO_GRADIENT, *PUBLISHED, *FINER, TRUE, TRUE_PIXELS, *SALIENCY)
SOFT = "iFAM K=4, soft"


def every_k_beats(*rivals: str, margin: float = 0.0) -> tuple[Beats, ...]:
    """With whole patches, as in the papers; what iFAM is here by default stands beside it."""
    rows = (*IFAM, OURS)
    return tuple(Beats(row, rival, margin=margin, decides=row == PAPERS) for rival in rivals for row in rows)


TESTED = (
    Claim(
        "F1",
        "Early hard masking is faithful by construction: nothing outside the mask can change the answer.",
        "by construction; late and soft masking must fail the same test",
        (
            Proved(),
            Certified("blind", (*EARLY, *CONTROLS, *OTHER_FILLS, *SELECTED_BY_A_NET)),
            Certified("leaks", ("late mask, true", *PDISCOFORMER)),
            Certified("refused", (SOFT,), decides=False),
        ),
    ),
    Claim(
        "F2",
        "Early masking beats late masking, both with true masks.",
        "worst group 97.2 against 84.0",
        (Beats(TRUE, "late mask, true"),),
    ),
    Claim(
        "F3",
        "iFAM beats PDiscoFormer with as many parts.",
        "worst group 96.4 against 87.4 (K=4), 97.0 against 84.3 (K=8)",
        tuple(Beats(f"iFAM K={k}", f"PDiscoFormer K={k}") for k in (4, 8)),
    ),
    Claim(
        "F4",
        "iFAM beats the fine-tuned backbone and the frozen probe.",
        "worst group 97.0 (K=8) against 95.8 and 88.5",
        every_k_beats("ERM", "ERM, 30 epochs", "probe"),
    ),
    Claim(
        "F5",
        "iFAM comes within 1 point of early masking with true masks.",
        "worst group 97.0 (K=8) against 97.2",
        (
            *every_k_beats(TRUE, f"{TRUE}, 30 epochs", margin=-0.01),
            *(
                Beats(OURS, f"{TRUE_PIXELS}{how}", margin=-0.01, decides=False)
                for how in ("", ", zoom", ", balanced loss")
            ),
        ),
    ),
    Claim(
        "F6",
        "iFAM beats early masking with an external saliency detector.",
        "worst group 97.0 (K=8) against 95.2 (FOUND)",
        every_k_beats(*SALIENCY),
    ),
    Claim(
        "F7",
        "What stage 2 learns refines stage 1 through the straight-through mask: better answers, better masks.",
        "claimed without a figure; the released code passes no gradient",
        tuple(
            Beats(row, without, measure)
            for measure in ("worst group", "grid IoU")
            for row, without in zip(IFAM, NO_GRADIENT, strict=True)
        ),
    ),
    Claim(
        "B1",
        "The shape of a discovered mask alone tells the label better than chance.",
        "ours; no figure in the papers",
        (
            *(TellsLabel(row, decides=row in IFAM) for row in (*EARLY, *PDISCOFORMER)),
            *(Beats(row, TRUE, "label from shape", decides=False) for row in (*IFAM, *NO_GRADIENT)),
        ),
    ),
    Claim(
        "B3",
        "Patch masks leak background at their border; pixel-exact sight closes the gap.",
        "ours; no figure in the papers",
        (
            *(Beats(TRUE_PIXELS, patches) for patches in (TRUE, *CONTROLS)),
            *(Beats(filled, TRUE) for filled in OTHER_FILLS),
            Beats(f"{TRUE_PIXELS}, zoom", f"{TRUE}, zoom", decides=False),
            *(Beats(*pair, decides=False) for pair in SELECTED_BY_A_NET.items()),
            *(Beats(row, row.removesuffix(", pixels"), decides=False) for row in FINER),
            *(Beats(f"iFAM K={k}, plain pixels", f"iFAM K={k}", decides=False) for k in (1, 4, 8)),
        ),
    ),
)
CLAIMS = tuple(
    sorted((*TESTED, *(Claim(*one) for one in UNTESTED)), key=lambda one: ("FARB".index(one.id[0]), int(one.id[1:])))
)


# ---- from runs to verdicts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claims:
    runs: Positional[Path]
    """The folder of run folders that `benchmarks/waterbirds.py` made."""
    only: tuple[str, ...] = ()
    """These claims. Default: all."""
    split: str = "test"
    """To try things out: val."""
    proof: Path = Path(__file__).parent / "results" / "proof_h200.json"
    certified: int = 32
    """Pictures of each run's data, for its certificate."""
    read_only: bool = False
    """Measure nothing, where weights or data are not at hand."""
    device: str = "auto"
    workers: int = 2
    """Processes that decode pictures."""
    out: Path | None = None


def find(test: Test, runs: Runs) -> Finding:
    try:
        return test.find(runs)
    except Missing as missing:
        return Finding(test.words, NOT_RUN, decides=test.decides, note=str(missing))


def conclude(claim: Claim, runs: Runs) -> tuple[str, list[Finding]]:
    if claim.lacks:
        return NOT_TESTABLE, []
    findings = [find(test, runs) for test in claim.tests]
    return together([finding.verdict for finding in findings if finding.decides]), findings


NEEDED_FOR = {"--self-supervised BACKBONE": ":SELF", "--u2net FILE.onnx": ":U2NET"}


def rows_of(claim: Claim) -> list[str]:
    return list(dict.fromkeys(row for test in claim.tests for row in test.rows))


def command_for(claim: Claim, runs: Path) -> str:
    """What trains the rows of a claim."""
    if not (rows := rows_of(claim)):
        return ""
    more = "".join(f" {flag}" for flag, word in NEEDED_FOR.items() if any(word in ROWS[row] for row in rows))
    given = shlex.join(["--runs", runs.name, "--only", *rows])
    return f"python benchmarks/waterbirds.py DATA --backbone BACKBONE{more} {given}"


def show(concluded: Sequence[tuple[Claim, str, list[Finding]]]) -> None:
    table = Table("", "", "ours", "theirs", "seeds", "difference", "", "", box=None, pad_edge=False)
    for claim, conclusion, findings in concluded:
        table.add_row(claim.id, f"[bold]{escape(claim.says)}[/]", *[""] * 4, f"[bold]{conclusion}[/]", claim.lacks)
        table.add_row("", f"[dim]paper: {escape(claim.paper)}[/]")
        for finding in findings:
            estimates = [one for one in (finding.figures or {}).values() if isinstance(one, Estimate)]
            ours, theirs = (*(f"{one.figure} {one.interval}" for one in estimates), "", "")[:2]
            seeds = ", ".join(map(str, (finding.seeds or {}).values()))
            name = f"  {'' if finding.decides else '(beside) '}{escape(finding.test)}"
            difference, note = str(finding.difference or ""), f"[dim]{escape(finding.note)}[/]"
            table.add_row("", name, ours, theirs, seeds, difference, finding.verdict, note)
        for row in dict.fromkeys(row for finding in findings for row in finding.seeds or {}):
            table.add_row("", f"[dim]  recipe of {escape(f'{row}: {ROWS[row]}')}[/]")
        table.add_section()
    console = Console(highlight=False, width=240)
    console.print(table)
    console.print(RULE, width=120)


def to_dict(claim: Claim, conclusion: str, findings: Sequence[Finding], runs: Path) -> dict[str, Any]:
    about = {"id": claim.id, "claim": claim.says, "paper": claim.paper, "verdict": conclusion, "lacks": claim.lacks}
    made = {"runs_made_by": command_for(claim, runs), "recipes": {row: ROWS[row] for row in rows_of(claim)}}
    return about | made | {"tests": [asdict(finding) for finding in findings]}


def main() -> None:
    config = tyro.cli(Claims, description=__doc__)
    asked = {f.name: getattr(config, f.name) for f in fields(Runs) if f.name != "folder"}
    runs = Runs(config.runs, **asked)
    facts = runs.facts()
    chosen = [claim for claim in CLAIMS if not config.only or claim.id in config.only]
    if unknown := set(config.only) - {claim.id for claim in chosen}:
        raise UserError(f"--only {' '.join(sorted(unknown))}: known are {', '.join(claim.id for claim in CLAIMS)}")
    concluded = [(claim, *conclude(claim, runs)) for claim in chosen]
    show(concluded)
    if config.out:
        content = {"split": config.split, "rule": RULE} | facts
        device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
        record(config.out, device, content | {"claims": [to_dict(*one, config.runs) for one in concluded]})


if __name__ == "__main__":
    main()
