"""The claims of the papers, and ours, decided from runs: holds, fails, undecided, not testable here, or not run.

    python benchmarks/claims.py waterbirds runs/waterbirds --out claims_wbr.json
    python benchmarks/claims.py v1 runs/v1 --out claims_v1.json
    python benchmarks/claims.py relevance runs/relevance --out claims_relevance.json
    python benchmarks/claims.py a2 runs/a2 --ifam runs/waterbirds/birds/ifam-k-1--pixels-0 \\
        --matrix matrix_wbr_h200.json --pretrained pretrain_family_h200.json --out claims_a2.json
    cd benchmarks/results; python ../claims.py interventions interventions --retrained interventions_h200.json

RUNS is the folder that `benchmarks/run.py` filled, or what its `--pack` wrote: neither weights nor images are needed.
Only `waterbirds` measures what is missing, in run folders that have their weights: certificates of blindness, and the
label information in the mask shape. Each study has its claims in claims_STUDY.py; every claim is decided by one rule.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional

from contrasts import spread
from evidence import Evidence
from packing import unpacked
from record import record
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from verdicts import NOT_RUN, Claim, ClaimsOfStudy, Finding, decide


@dataclass(frozen=True)
class PartAssignment:
    study: Positional[Literal["waterbirds", "interventions", "relevance", "a2", "v1"]]
    runs: Positional[Path]
    only: tuple[str, ...] = ()
    """These claims. Default: all."""
    split: str = "test"
    """waterbirds: to try things out, val."""
    proof: Path = Path(__file__).parent / "results" / "proof_h200.json"
    """waterbirds: what `proof.py` wrote."""
    certified: int = 32
    """waterbirds: images of each run's data, for its certificate."""
    read_only: bool = False
    """waterbirds: measure nothing, where weights or data are not at hand."""
    device: str = "auto"
    workers: int = 2
    retrained: Path | None = None
    """interventions: a result file with rows that were trained again (`run.py --before`), whose spread widens the
    intervals between single runs."""
    ifam: tuple[Path, ...] = ()
    """a2: runs of iFAM on the same Waterbirds, one per seed."""
    ifam_disjoint: tuple[Path, ...] = ()
    """a2: the same on the dataset with disjoint scenes."""
    matrix: tuple[Path, ...] = ()
    """a2: result files of `sightline matrix`."""
    pretrained: Path | None = None
    """a2: what `pretrain.py family --out` wrote."""
    out: Path | None = None


def show(decided: Sequence[tuple[Claim, str, list[Finding]]], rule: str) -> None:
    table = Table("", "", "figures", "seeds", "difference", "", "", box=None, pad_edge=False)
    for claim, conclusion, findings in decided:
        table.add_row(claim.id, f"[bold]{escape(claim.says)}[/]", "", "", "", f"[bold]{conclusion}[/]", claim.lacks)
        table.add_row("", f"[dim]paper: {escape(claim.paper)}[/]")
        for one in findings:
            estimates = [e for e in (one.figures or {}).values() if isinstance(e, Estimate)]
            figures = ", ".join(f"{e.value_text} {e.interval}" for e in estimates)
            seeds = ", ".join(map(str, (one.seeds or {}).values()))
            name = f"  {'' if one.decides else '(beside) '}{escape(one.test)}"
            difference, note = escape(str(one.difference or "")), f"[dim]{escape(one.note)}[/]"
            table.add_row("", name, escape(figures), seeds, difference, one.verdict, note)
        table.add_section()
    console = Console(highlight=False, width=260)
    console.print(table)
    console.print(rule, width=120)


def to_dict(study: ClaimsOfStudy, claim: Claim, conclusion: str, findings: Sequence[Finding]) -> dict[str, Any]:
    known = {"id": claim.id, "claim": claim.says, "paper": claim.paper, "verdict": conclusion, "lacks": claim.lacks}
    if study.lines:
        several = len({kind for kind, _ in study.lines}) > 1
        rows = sorted(claim.rows()) if several else claim.rows()
        known["recipes"] = {f"{kind}: {row}" if several else row: study.lines[kind, row] for kind, row in rows}
    kept = [one for one in findings if study.all_tests or one.verdict != NOT_RUN or one.decides]
    return known | {"tests": [asdict(one) for one in kept]}


def main() -> None:
    config = tyro.cli(PartAssignment, description=__doc__)
    asked = {f.name: getattr(config, f.name) for f in fields(Evidence)}
    with unpacked(config.runs) as runs:
        evidence = Evidence(**asked | {"runs": runs})
        study = importlib.import_module(f"claims_{config.study}").claims_of_study(evidence)
        known = [claim.id for claim in study.claims]
        if unknown := set(config.only) - set(known):
            raise UserError(f"--only {' '.join(sorted(unknown))}: known are {', '.join(known)}")
        chosen = [claim for claim in study.claims if not config.only or claim.id in config.only]
        decided = [(claim, *decide(claim, evidence)) for claim in chosen]
        show(decided, study.rule)
        content = [to_dict(study, *one) for one in decided]
        facts = dict(study.facts)
        if evidence.retrained is not None:
            compared = dict.fromkeys(test.spread for claim in chosen for test in claim.tests if test.spread)
            spreads = {one: found for one in compared if (found := spread(evidence, *one)) is not None}
            facts["spread"] = [
                {"set": kind, "of": part, "figure": measure} | asdict(one)
                for (kind, part, measure), one in spreads.items()
            ]
            alone = replace(evidence, retrained=None)
            for claim, one in zip(chosen, content, strict=True):
                one["verdict_by_images_alone"] = decide(claim, alone)[0]
    if config.out:
        on_gpu = config.study == "waterbirds" and torch.cuda.is_available() and config.device != "cpu"
        record(config.out, "cuda" if on_gpu else "cpu", {"rule": study.rule} | facts | {"claims": content})


if __name__ == "__main__":
    main()
