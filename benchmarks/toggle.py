"""How quickly the app answers when a part is dropped, against looking and judging anew, in the same run.

    python benchmarks/toggle.py --out benchmarks/results/toggle_cpu.json

One toy picture and a ViT-Ti at 224 pixels, random weights. What it finds is not left to chance: a square of a quarter
of the picture, cut into eight stripes that are the parts, of which every toggle drops another one. A toggle is what a
click in the app runs: `Viewer.answer`, and in one row also the panel that is drawn of it. A full pass is both stages of
the same method with the same intervention. See ratios.py for how it is timed; processor time is compared, too, because
it holds on a busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro
from ratios import ratios, verdicts
from torch import Tensor

from record import record
from sightline.app.panels import panel
from sightline.app.session import Answer, Picture, Viewer
from sightline.config import App, Ifam
from sightline.datasets.toy_images import make_toy
from sightline.interventions.apply import intervened
from sightline.interventions.file import Intervention
from sightline.load import Model
from sightline.methods.base import PartSettings, selector
from sightline.methods.ifam import IFam, Pixels, predictor
from sightline.training.distributed import make_accelerator
from sightline.training.run_folder import Run
from sightline.vit.weights import load_backbone

PARTS, SIDE, COVERAGE = 8, 224, 0.25
CLASSES = ("stork", "duck")
FULL, ASKED = "a full pass", {"a toggle": 0.5}
WAYS: dict[str, dict[str, Any]] = {
    "patches": {"sight": "patches"},
    "pixels, looked at once": {"look_again": False},
    "pixels, looked at again": {},
    "the default": {"look_size": 2 * SIDE},
}


@dataclass(frozen=True)
class Toggle:
    backbone: str = "random:augreg-ti16"
    rounds: int = 15
    out: Path | None = None
    """Write the figures there, as JSON."""


class Striped(IFam):
    """Looks as usual, and then finds a square in the middle: a quarter of the picture, or as much of a window as that
    becomes."""

    looks = 0

    def discover(self, images: Tensor) -> tuple[Any, Tensor]:
        parts, scores = super().discover(images)
        closer = self.pixels is not None and self.pixels.look_again and self.looks % 2
        self.looks += 1
        H, W = scores.shape[2:]
        side = 1 / (1 + 2 * self.WINDOW.margin) if closer else COVERAGE**0.5
        y, x = torch.meshgrid(*((torch.arange(n) / n - (1 - side) / 2) / side for n in (H, W)), indexing="ij")
        inside = (y >= 0) & (y < 1) & (x >= 0) & (x < 1)
        stripe = torch.where(inside, (x * PARTS).long(), PARTS)
        fixed = 20 * torch.nn.functional.one_hot(stripe, PARTS + 1).movedim(-1, 0)[None].to(scores)
        return parts, fixed.expand_as(scores)


def viewer_of(config: Toggle, told: dict[str, Any], folder: Path) -> Viewer:
    vit = load_backbone(config.backbone)
    settings = asdict(Ifam(Path("toy"), parts=PARTS, **told))
    method = Striped(selector(vit, settings, 2), predictor(vit, settings, 2), PartSettings.of(settings), Pixels.of(settings))
    model = Model(method.eval(), CLASSES, vit.config.input, Run(folder, {"method": "ifam"}))
    return Viewer(App(folder), make_accelerator("cpu"), model, None, "")


@torch.no_grad()
def measure(config: Toggle, told: dict[str, Any]) -> list[dict[str, Any]]:
    picture = Picture(make_toy(1, size=SIDE).images[0], "toy")
    images = picture.pixels[None].float() / 255
    wishes = cycle([Intervention(drop=(part,)) for part in range(PARTS)])
    with TemporaryDirectory() as folder:
        viewer = viewer_of(config, told, Path(folder))
        plain = viewer.answer(picture)
        kept = viewer.method.what.seen(images, *plain.sight.on_grid(viewer.method.what.vit.grid(images), (SIDE, SIDE)))

        def full() -> None:
            method = intervened(viewer.method, next(wishes))
            method.judge(images, method.look(images))

        def toggle() -> Answer:
            return viewer.answer(picture, next(wishes))

        drawn = "a toggle, and its panel drawn"
        runs = {FULL: full, "a toggle": toggle, drawn: lambda: panel(toggle(), CLASSES, "", blind=True)}
        rows = ratios(runs, FULL, rounds=config.rounds, device="cpu")
        work = {name: processor_seconds(run) for name, run in runs.items()}
    facts = {"coverage": round(plain.coverage, 3), "tokens_seen": round(kept.keep.float().mean().item(), 3)}
    return [facts | row | {"processor_ratio": round(work[row["variant"]] / work[FULL], 3)} for row in rows]


def processor_seconds(run: Callable[[], object], times: int = 9) -> float:
    """Of all threads, the median: what others do on the machine hardly changes it."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    config = tyro.cli(Toggle, description=__doc__)
    rows = [{"what": way} | row for way, told in WAYS.items() for row in measure(config, told)]
    for row in rows:
        print(row)
    found = verdicts(rows, FULL, ASKED)
    for verdict in found:
        print(verdict)
    if config.out:
        record(config.out, "cpu", {"backbone": config.backbone, "verdicts": found, "rows": rows})


if __name__ == "__main__":
    main()
