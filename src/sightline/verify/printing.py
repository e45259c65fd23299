"""The certificate of blindness on a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .verify import Certificate


def print_certificate(certificate: Certificate) -> None:
    console = Console(highlight=False)
    table = Table("Hidden", "Redrawn with", "Trials", "Changed", "Largest change", box=None, pad_edge=False)
    for row in certificate.tried:
        largest = "–" if row.largest_change is None else f"{row.largest_change:.3g}"
        table.add_row(row.level, row.kind, f"{row.trials:,}", f"{row.changed:,}", largest)
    console.print(table)
    colour = "green" if certificate.verdict == "blind" else "red"
    console.print(f"[bold {colour}]{certificate.verdict}[/]  {certificate.sentence}", soft_wrap=True)
    console.print(f"Computation: {'; '.join(certificate.conditions['paths'])}", soft_wrap=True)
    if certificate.end_to_end:
        console.print("End to end, measured and not proved, since the selector sees the redrawn pixels too:")
        table = Table("Redrawn with", "n", "Prediction changed", "Sight changed", "Sight IoU", box=None, pad_edge=False)
        for kind, row in certificate.end_to_end["redrawn_with"].items():
            rates = [
                "{:.0%} [{:.0%}, {:.0%}]".format(row[rate] / row["n"], *row[f"{rate}_interval"])
                for rate in ("prediction_changed", "sight_changed")
            ]
            table.add_row(kind, str(row["n"]), *rates, f"{row['sight_iou']:.2f}")
        console.print(table)
