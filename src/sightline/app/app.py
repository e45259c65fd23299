"""The page of `sightline app`: controls are passed to a `Viewer`, and its results are rendered by `panels`.

The page is self-contained: no fonts, scripts or analytics from the network.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import App
from ..console.terminal import counted
from ..errors import UserError
from ..interventions.file import FILE, Intervention
from ..metrics.estimates import Metrics, read_metrics
from .guard import Guard, new_token
from .panels import (
    CHOOSE,
    DRAW,
    DRAWING,
    GALLERY,
    STYLE,
    buttons,
    drawn_mask,
    effect_table,
    image_uri,
    legend_style,
    message,
    panel,
    plain,
    sized,
)
from .session import InputImage, Viewer

if TYPE_CHECKING:
    import gradio

SHOWN = 12  # examples at a time
MAX_EXAMPLES = 96  # cached
USERS = 20  # served at once; others wait
WAITING = 200  # at most; further requests are refused
MAX_BYTES = 200 << 20  # of an image file
MAX_REMOVED = 20  # per cent of patches
FOUND, DRAWN = "model's sight", "drawn mask"
NAMES = ("A", "B")
COMPARING = "A and B are two versions of the model on the same image. Change one below its images, and compare."
SEES_EVERYTHING = "This method sees the whole image: the maps explain its predictions but hide nothing from it."
FONTS = ("system-ui", "-apple-system", "Segoe UI", "sans-serif")


def import_gradio() -> Any:
    """Gradio, with analytics switched off before the import."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError:
        raise UserError("the app needs Gradio: pip install 'sightline[app]'") from None
    return gradio


def serve(command: App) -> int:
    """Serve until stopped."""
    import_gradio()
    page = Page(Viewer.open(command))
    app, url = page.launch()
    print(f"{command.run}: app running at {url} (press Ctrl+C to stop)", flush=True)
    page.prepare()
    app.block_thread()
    return 0


def test_results(run: Path) -> str:
    """The headline of the report, from the results of training; empty without."""
    path = run / "metrics.json"
    try:
        found = read_metrics(path)["splits"].get("test") if path.is_file() else None
    except UserError:
        return ""
    return "" if found is None else f" On test data, as trained: {Metrics.from_dict(found).headline()}"


@dataclass(frozen=True)
class Controls:
    """The controls of one of the two panels."""

    name: str
    view: Any
    source: Any  # of the sight: FOUND or DRAWN
    parts: Any  # numbers of the visible parts
    removed: Any  # per cent of patches
    save: Any

    @property
    def inputs(self) -> list[Any]:
        return [self.source, self.parts, self.removed]


class Page:
    def __init__(self, viewer: Viewer):
        self.viewer, self.gr = viewer, import_gradio()
        self.rows, self.example = viewer.examples(), lru_cache(MAX_EXAMPLES)(viewer.example)

    @property
    def comparable(self) -> bool:
        """Whether there is anything to change, and so a second panel."""
        return self.viewer.parts > 0 or self.viewer.draws

    # ---- layout ------------------------------------------------------------------------------------------------------

    def build(self) -> gradio.Blocks:
        gr, viewer = self.gr, self.viewer
        with gr.Blocks(analytics_enabled=False, title="Sightline", delete_cache=(600, 3600)) as blocks:
            self.image, self.first = gr.State(None), gr.State(0)
            gr.HTML(self.heading())
            self.status = gr.HTML("", elem_id="status")
            with gr.Row():
                with gr.Column(scale=1, min_width=260):
                    self.build_choice()
                with gr.Column(scale=3, min_width=300), gr.Row():
                    self.panels = [self.build_panel(name) for name in NAMES]
            with gr.Column(visible=viewer.parts > 0 and viewer.dataset is not None):
                self.measure = gr.Button("Evaluate A and B on validation data", elem_id="measure")
                self.effects = gr.HTML("", elem_id="effects", padding=True)
            with gr.Accordion("Name the parts", open=False, visible=viewer.parts > 0, elem_id="names"), gr.Row():
                self.names = [
                    gr.Textbox("", label=f"part {k}", min_width=120, elem_id=f"name-{k}", max_length=40)
                    for k in range(viewer.parts)
                ]
            self.connect(blocks)
        return blocks

    def heading(self) -> str:
        viewer, run = self.viewer, self.viewer.model.run
        parts = f", {counted(viewer.parts, 'part')}" * bool(viewer.parts)
        classes = ", ".join(viewer.model.classes[:6]) + ", …" * (len(viewer.model.classes) > 6)
        notes = [COMPARING] * self.comparable + [SEES_EVERYTHING] * (not viewer.blind)
        if viewer.missing:
            notes.append(f"Example images of the run are not available. {viewer.missing}")
        return (
            f"<h2>{plain(run.folder.resolve().name)}</h2>"
            f"<p>{plain(run.facts['method'])}{parts}. Classes: {plain(classes)}.{plain(test_results(run.folder))}</p>"
            + "".join(f'<p class="note">{plain(note)}</p>' for note in notes)
        )

    def build_choice(self) -> None:
        gr, size = self.gr, self.viewer.model.expects.size
        self.file = gr.File(label="Image", show_label=False, elem_id="file", height=140, type="filepath")
        self.gallery = gr.HTML(
            "",
            html_template=GALLERY,
            js_on_load=CHOOSE,
            images="",
            visible=bool(self.rows),
            elem_id="gallery",
            apply_default_css=False,
        )
        self.others = gr.Button("More examples", size="sm", elem_id="others", visible=len(self.rows) > SHOWN)
        with gr.Accordion("Draw a mask", open=True, visible=self.viewer.draws, elem_id="draw"):
            self.drawing = gr.HTML(
                "",
                html_template=sized(DRAWING, size),
                js_on_load=sized(DRAW, size),
                image="",
                elem_id="drawing",
                apply_default_css=False,
            )

    def build_panel(self, name: str) -> Controls:
        gr, viewer, key, comparable = self.gr, self.viewer, name.lower(), self.comparable
        with gr.Column(min_width=300, elem_id=f"panel-{key}", visible=comparable or name == NAMES[0]):
            gr.HTML(f"<h3>{name}</h3>", visible=comparable)
            view = gr.HTML("", elem_id=f"{key}-view", min_height=200)
            source = gr.Radio([FOUND, DRAWN], value=FOUND, label="Sight", visible=viewer.draws, elem_id=f"{key}-source")
            parts = gr.CheckboxGroup(
                self.choices({}), value=[*range(viewer.parts)], label="Visible parts",
                visible=viewer.parts > 0, elem_id=f"{key}-parts",
            )  # fmt: skip
            removed = gr.Slider(
                0, MAX_REMOVED, 0, step=0.5, label="Token removal: patches farthest from their part, %",
                visible=viewer.parts > 0, elem_id=f"{key}-removed", buttons=[],
                interactive=viewer.dataset is not None,
            )  # fmt: skip
            save = gr.Button(f"Save {name} with the model", size="sm", visible=viewer.parts > 0, elem_id=f"{key}-save")
        return Controls(name, view, source, parts, removed, save)

    def choices(self, names: dict[int, str]) -> list[tuple[str, int]]:
        return [(names.get(k) or f"part {k}", k) for k in range(self.viewer.parts)]

    # ---- events ------------------------------------------------------------------------------------------------------

    def connect(self, blocks: gradio.Blocks) -> None:
        a, b = self.panels
        both, views = [*a.inputs, *b.inputs], [a.view, b.view]
        arrived = [self.image, self.drawing, self.status, *views]
        start = [self.gallery, *self.names, *(c for each in self.panels for c in (each.parts, each.removed))]
        last = {"trigger_mode": "always_last", "show_progress": "hidden"}
        blocks.load(self.start, None, [*start, *arrived], show_progress="hidden", api_name="start")
        given = [self.file, self.image, *both]
        self.file.upload(self.upload, given, [self.file, *arrived], show_progress="minimal", api_name="upload")
        self.gallery.chosen(
            self.choose, [self.gallery, self.image, *both], arrived, show_progress="hidden", api_name="choose"
        )
        self.others.click(self.next_examples, self.first, [self.first, self.gallery], show_progress="hidden")
        for one in self.panels:
            inputs = [self.image, *one.inputs, self.drawing]
            changes = [control.input for control in one.inputs]
            self.gr.on(
                changes, self.predict_when_calibrated, inputs, one.view, api_name=f"predict_{one.name.lower()}", **last
            )
            one.save.click(self.save, [*one.inputs, *self.names], self.status, show_progress="minimal", api_name="save")
        self.drawing.drawn(
            self.draw, [self.image, *both, self.drawing], [*views, b.source], api_visibility="private", **last
        )
        if self.names:
            shown = [a.parts, b.parts]
            changes = [name.change for name in self.names]
            self.gr.on(changes, self.rename, [*shown, *self.names], shown, api_visibility="private", **last)

        def measure(progress: Any = self.gr.Progress(), *values: Any) -> str:  # noqa: B008 (where Gradio expects it)
            return self.show_effects(progress, *values)

        self.measure.click(measure, both, self.effects, concurrency_limit=1, api_name="effects")

    def start(self) -> list[Any]:
        """A new user starts with the saved intervention as A and the model as trained as B."""
        gr, viewer, saved = self.gr, self.viewer, self.viewer.saved
        every, choices = [*range(viewer.parts)], self.choices(dict(saved.names))
        shown = [part for part in every if part not in saved.drop]
        removed = 0 if saved.quantile is None else round(100 * (1 - saved.quantile), 4)
        image = self.example(self.rows[0]) if self.rows else None
        controls = [(FOUND, shown, removed), (FOUND, every, 0)]
        update = [
            value
            for _, parts, share in controls
            for value in (gr.CheckboxGroup(choices=choices, value=parts), gr.Slider(value=share))
        ]
        names = [saved.names.get(k, "") for k in every]
        return [self.thumbnails(0), *names, *update, *self.arrive(image, [c for each in controls for c in each])]

    def arrive(self, image: InputImage | None, both: list[Any]) -> list[Any]:
        if image is None:
            waiting = message("Upload an image to begin.")
            return [None, self.gr.skip(), "", waiting, waiting]
        drawing = self.gr.HTML(value="", image=image_uri(image))
        views = [self.predict(image, *both[3 * k : 3 * k + 3], "") for k in range(len(NAMES))]
        labelled = ", ".join(filter(None, [image.label, image.group]))
        return [image, drawing, message(image.name + f", labelled {labelled}" * bool(labelled)), *views]

    def upload(self, path: str, image: InputImage | None, *both: Any) -> list[Any]:
        try:
            return [None, *self.arrive(self.viewer.read(Path(path), Path(path).name), [*both])]
        except UserError as error:
            return [None, *self.show_error(error, image)]

    def choose(self, row: int, image: InputImage | None, *both: Any) -> list[Any]:
        try:
            if row not in self.rows:
                raise UserError(f"{row}: not an example image of the run")
            return self.arrive(self.example(row), [*both])
        except UserError as error:
            return self.show_error(error, image)

    def show_error(self, error: UserError, image: InputImage | None) -> list[Any]:
        """The previous image stays."""
        stays = self.gr.skip()
        return [image, stays, message(str(error), error=True), stays, stays]

    def next_examples(self, first: int) -> tuple[int, Any]:
        first = (first + SHOWN) % len(self.rows)
        return first, self.thumbnails(first)

    def thumbnails(self, first: int) -> Any:
        rows = [self.rows[(first + k) % len(self.rows)] for k in range(min(SHOWN, len(self.rows)))]
        return self.gr.HTML(images=buttons({row: self.example(row) for row in rows}))

    def predict_when_calibrated(
        self, image: InputImage | None, source: str, parts: list[int], removed: float, drawn: str
    ) -> Any:
        """The first use of the slider may have to wait for the calibration, and shows its progress."""
        if removed and source == FOUND and self.viewer.dataset is not None:
            calibration = self.viewer.calibration()
            while not calibration.sketch.done():
                done, of = calibration.done
                yield message(f"Measuring the distances of training patches from their part: {done / of:.0%}")
                time.sleep(0.2)
        yield self.predict(image, source, parts, removed, drawn)

    def predict(self, image: InputImage | None, source: str, parts: list[int], removed: float, drawn: str) -> str:
        if image is None:
            return message("Upload an image to begin.")
        viewer = self.viewer
        try:
            if source == DRAWN:
                intervention, mask, applied = None, drawn_mask(drawn, viewer.model.expects.size), "the drawn mask"
            else:
                intervention, mask = self.make_intervention(parts, removed), None
                applied = intervention.description if intervention.changes else "as trained"
            prediction = viewer.predict(image, intervention, mask)
            return panel(prediction, viewer.model.classes, applied, blind=viewer.blind, label=image.label)
        except UserError as error:
            return message(str(error), error=True)

    def make_intervention(self, parts: list[int], removed: float) -> Intervention:
        return self.viewer.make_intervention(parts, removed) if self.viewer.parts else Intervention()

    def draw(self, image: InputImage | None, *values: Any) -> list[Any]:
        """If neither panel shows the drawn mask, B switches to it."""
        *both, drawn = values
        if DRAWN not in (both[0], both[3]):
            both[3] = DRAWN
        views = [self.predict(image, *both[3 * k : 3 * k + 3], drawn) for k in range(len(NAMES))]
        return [*views, both[3]]

    def rename(self, shown_a: list[int], shown_b: list[int], *names: str) -> list[Any]:
        choices = self.choices({part: (name or "").strip() for part, name in enumerate(names)})
        return [self.gr.CheckboxGroup(choices=choices, value=shown) for shown in (shown_a, shown_b)]

    def save(self, source: str, parts: list[int], removed: float, *names: str) -> str:
        try:
            if source == DRAWN:
                raise UserError(f"a drawn mask is for one image and cannot be saved: choose {FOUND!r}")
            saved = self.viewer.save(
                self.make_intervention(parts, removed), {part: name or "" for part, name in enumerate(names)}
            )
        except UserError as error:
            return message(str(error), error=True)
        path = self.viewer.model.run.folder / FILE
        return message(
            f"Saved to {path}: {saved.description}. Other commands, such as predict and evaluate, now apply it."
        )

    def show_effects(self, progress: Any, *both: Any) -> str:
        def show_progress(done: int, of: int) -> None:
            progress((done, of), desc="validation images", unit="batches")

        try:
            chosen = {name: both[3 * k : 3 * k + 3] for k, name in enumerate(NAMES)}
            found = {
                n: self.make_intervention(parts, removed)
                for n, (source, parts, removed) in chosen.items()
                if source == FOUND
            }
            if not found:
                raise UserError(f"a drawn mask is for one image: choose {FOUND!r} in A or B")
            interventions = {name: intervention for name, intervention in found.items() if intervention.changes}
            trained, *others = self.viewer.effects([*interventions.values()], show_progress)
        except UserError as error:
            return message(str(error), error=True)
        named = {
            f"{name}: {intervention.description}": one
            for (name, intervention), one in zip(interventions.items(), others, strict=True)
        }
        return effect_table({"as trained": trained} | named, sum(one.n for one in trained.cells.values()))

    # ---- serving -----------------------------------------------------------------------------------------------------

    def launch(self) -> tuple[gradio.Blocks, str]:
        """Start the server; the page and its address."""
        gr, command = self.gr, self.viewer.command
        blocks = self.build().queue(default_concurrency_limit=USERS, max_size=WAITING, api_open=False)
        theme = gr.themes.Default(font=FONTS, font_mono=("monospace",))
        token = new_token(command.host)
        guard = (Guard, (), {"host": command.host, "token": token, "most_bytes": MAX_BYTES + (1 << 20)})
        try:
            _, url, _ = blocks.launch(
                app_kwargs={"middleware": [guard]},
                server_name=command.host, server_port=command.port, inbrowser=command.browser, prevent_thread_lock=True,
                share=False, quiet=True, ssr_mode=False, footer_links=[], theme=theme, max_file_size=MAX_BYTES,
                css=STYLE + legend_style(self.viewer.parts, [name.lower() for name in NAMES]),
            )  # fmt: skip
        except OSError as error:
            where = f"{command.host}:{command.port or 'any port'}"
            raise UserError(f"{where}: cannot be opened ({error}); choose another --port") from error
        return blocks, url if token is None else f"{url.rstrip('/')}/?token={token}"

    def prepare(self) -> None:
        """Start the calibration that the slider needs, in the background."""
        if self.viewer.parts and self.viewer.dataset is not None:
            self.viewer.calibration()


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: App) -> int:
    return serve(command)
