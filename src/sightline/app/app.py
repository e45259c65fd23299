"""The page of `sightline app`: what is asked there goes to a `Viewer`, and what it says is shown by `panels`.

Everything comes from this machine: no fonts, scripts or counters from elsewhere.
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
from .panels import (
    CHOOSE,
    DRAW,
    DRAWING,
    GALLERY,
    STYLE,
    buttons,
    drawn_mask,
    effect_table,
    legend_style,
    panel,
    picture_uri,
    plain,
    said,
    sized,
)
from .session import Picture, Viewer

if TYPE_CHECKING:
    import gradio

SHOWN = 12  # examples at a time
MOST_EXAMPLES = 96  # that are remembered
USERS = 20  # that are served at once; others wait a little
MOST_BYTES = 200 << 20  # of a picture's file
MOST_REMOVED = 20  # per cent of patches
FOUND, DRAWN = "what it finds", "what I draw"
NAMES = ("A", "B")
FONTS = ("system-ui", "-apple-system", "Segoe UI", "sans-serif")


def gradio_itself() -> Any:
    """Gradio, with its counters off before it is first imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError:
        raise UserError("the app needs Gradio: pip install 'sightline[app]'") from None
    return gradio


def serve(command: App) -> int:
    """Until it is stopped."""
    gradio_itself()
    page = Page(Viewer.open(command))
    app, url = page.launch()
    print(f"{command.run} is open at {url} (Ctrl+C ends it)", flush=True)
    page.prepare()
    app.block_thread()
    return 0


@dataclass(frozen=True)
class Controls:
    """Of one of the two panels."""

    name: str
    view: Any
    source: Any  # found or drawn
    parts: Any  # the numbers of those shown
    removed: Any  # per cent
    save: Any

    @property
    def inputs(self) -> list[Any]:
        return [self.source, self.parts, self.removed]


class Page:
    def __init__(self, viewer: Viewer):
        self.viewer, self.gr = viewer, gradio_itself()
        self.rows, self.example = viewer.examples(), lru_cache(MOST_EXAMPLES)(viewer.example)

    # ---- what is there -----------------------------------------------------------------------------------------------

    def build(self) -> gradio.Blocks:
        gr, viewer = self.gr, self.viewer
        with gr.Blocks(analytics_enabled=False, title="Sightline", delete_cache=(600, 3600)) as blocks:
            self.picture, self.first = gr.State(None), gr.State(0)
            gr.HTML(self.heading())
            self.said = gr.HTML("", elem_id="said")
            with gr.Row():
                with gr.Column(scale=1, min_width=260):
                    self.build_choice()
                with gr.Column(scale=3, min_width=300), gr.Row():
                    self.panels = [self.build_panel(name) for name in NAMES]
            with gr.Column(visible=viewer.parts > 0 and viewer.asked is not None):
                self.measure = gr.Button("What A and B do to the groups of the validation data", elem_id="measure")
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
        notes = [
            "This method sees the whole picture: what is shown explains its answers and hides nothing from it."
        ] * (not viewer.blind)
        if viewer.missing:
            notes.append(f"The run's own pictures cannot be shown. {viewer.missing}")
        return (
            f"<h2>What {plain(run.folder.resolve().name)} sees</h2>"
            f"<p>{plain(run.facts['method'])}{parts}; it tells apart {plain(classes)}.</p>"
            + "".join(f'<p class="note">{plain(note)}</p>' for note in notes)
        )

    def build_choice(self) -> None:
        gr, size = self.gr, self.viewer.model.expects.size
        self.file = gr.File(label="A picture", show_label=False, elem_id="file", height=110, type="filepath")
        self.gallery = gr.HTML(
            "",
            html_template=GALLERY,
            js_on_load=CHOOSE,
            pictures="",
            visible=bool(self.rows),
            elem_id="gallery",
            apply_default_css=False,
        )
        self.others = gr.Button("Others", size="sm", elem_id="others", visible=len(self.rows) > SHOWN)
        with gr.Accordion("Draw what it may see", open=True, visible=self.viewer.draws, elem_id="draw"):
            self.drawing = gr.HTML(
                "",
                html_template=sized(DRAWING, size),
                js_on_load=sized(DRAW, size),
                picture="",
                elem_id="drawing",
                apply_default_css=False,
            )

    def build_panel(self, name: str) -> Controls:
        gr, viewer, key = self.gr, self.viewer, name.lower()
        comparable = viewer.parts > 0 or viewer.draws
        with gr.Column(min_width=300, elem_id=f"panel-{key}", visible=comparable or name == NAMES[0]):
            gr.HTML(f"<h3>{name}</h3>", visible=comparable)
            view = gr.HTML("", elem_id=f"{key}-view", min_height=200)
            source = gr.Radio(
                [FOUND, DRAWN], value=FOUND, label="It may see", visible=viewer.draws, elem_id=f"{key}-source"
            )
            parts = gr.CheckboxGroup(
                self.choices({}), value=[*range(viewer.parts)], label="Parts that it may see",
                visible=viewer.parts > 0, elem_id=f"{key}-parts",
            )  # fmt: skip
            removed = gr.Slider(
                0, MOST_REMOVED, 0, step=0.5, label="Leave out patches unlike their part, %",
                visible=viewer.parts > 0, elem_id=f"{key}-removed", buttons=[],
                interactive=viewer.asked is not None,
            )  # fmt: skip
            save = gr.Button(f"Keep {name} with the model", size="sm", visible=viewer.parts > 0, elem_id=f"{key}-save")
        return Controls(name, view, source, parts, removed, save)

    def choices(self, names: dict[int, str]) -> list[tuple[str, int]]:
        return [(names.get(k) or f"part {k}", k) for k in range(self.viewer.parts)]

    # ---- what happens ------------------------------------------------------------------------------------------------

    def connect(self, blocks: gradio.Blocks) -> None:
        a, b = self.panels
        both, views = [*a.inputs, *b.inputs], [a.view, b.view]
        arrived = [self.picture, self.drawing, self.said, *views]
        start = [self.gallery, *self.names, *(c for each in self.panels for c in (each.parts, each.removed))]
        last = {"trigger_mode": "always_last", "show_progress": "hidden"}
        blocks.load(self.start, None, [*start, *arrived], show_progress="hidden", api_name="start")
        given = [self.file, self.picture, *both]
        self.file.upload(self.upload, given, [self.file, *arrived], show_progress="minimal", api_name="upload")
        self.gallery.chosen(
            self.choose, [self.gallery, self.picture, *both], arrived, show_progress="hidden", api_name="choose"
        )
        self.others.click(self.page_on, self.first, [self.first, self.gallery], show_progress="hidden")
        for one in self.panels:
            told = [self.picture, *one.inputs, self.drawing]
            changes = [control.input for control in one.inputs]
            self.gr.on(changes, self.answer_in_time, told, one.view, api_name=f"answer_{one.name.lower()}", **last)
            one.save.click(self.save, [*one.inputs, *self.names], self.said, show_progress="minimal", api_name="save")
        self.drawing.drawn(
            self.draw, [self.picture, *both, self.drawing], [*views, b.source], api_visibility="private", **last
        )
        if self.names:
            shown = [a.parts, b.parts]
            changes = [name.change for name in self.names]
            self.gr.on(changes, self.rename, [*shown, *self.names], shown, api_visibility="private", **last)

        def measure(progress: Any = self.gr.Progress(), *told: Any) -> str:  # noqa: B008 (Gradio finds it there)
            return self.show_effects(progress, *told)

        self.measure.click(measure, both, self.effects, concurrency_limit=1, api_name="effects")

    def start(self) -> list[Any]:
        """A new visitor finds what the run keeps as A, beside the model as trained."""
        gr, viewer, kept = self.gr, self.viewer, self.viewer.kept
        every, choices = [*range(viewer.parts)], self.choices(dict(kept.names))
        shown = [part for part in every if part not in kept.drop]
        removed = 0 if kept.quantile is None else round(100 * (1 - kept.quantile), 4)
        picture = self.example(self.rows[0]) if self.rows else None
        controls = [(FOUND, shown, removed), (FOUND, every, 0)]
        update = [
            value
            for _, parts, share in controls
            for value in (gr.CheckboxGroup(choices=choices, value=parts), gr.Slider(value=share))
        ]
        names = [kept.names.get(k, "") for k in every]
        return [self.thumbnails(0), *names, *update, *self.arrive(picture, [c for each in controls for c in each])]

    def arrive(self, picture: Picture | None, both: list[Any]) -> list[Any]:
        if picture is None:
            waiting = said("Drop a picture to begin.")
            return [None, self.gr.skip(), "", waiting, waiting]
        drawing = self.gr.HTML(value="", picture=picture_uri(picture))
        views = [self.answer(picture, *both[3 * k : 3 * k + 3], "") for k in range(len(NAMES))]
        labelled = ", ".join(filter(None, [picture.label, picture.group]))
        return [picture, drawing, said(picture.name + f", labelled {labelled}" * bool(labelled)), *views]

    def upload(self, path: str, picture: Picture | None, *both: Any) -> list[Any]:
        try:
            return [None, *self.arrive(self.viewer.read(Path(path), Path(path).name), [*both])]
        except UserError as error:
            return [None, *self.refused(error, picture)]

    def choose(self, row: int, picture: Picture | None, *both: Any) -> list[Any]:
        try:
            if row not in self.rows:
                raise UserError(f"{row}: is none of the run's pictures")
            return self.arrive(self.example(row), [*both])
        except UserError as error:
            return self.refused(error, picture)

    def refused(self, error: UserError, picture: Picture | None) -> list[Any]:
        """The picture before it stays."""
        stays = self.gr.skip()
        return [picture, stays, said(str(error), wrong=True), stays, stays]

    def page_on(self, first: int) -> tuple[int, Any]:
        first = (first + SHOWN) % len(self.rows)
        return first, self.thumbnails(first)

    def thumbnails(self, first: int) -> Any:
        rows = [self.rows[(first + k) % len(self.rows)] for k in range(min(SHOWN, len(self.rows)))]
        return self.gr.HTML(pictures=buttons({row: self.example(row) for row in rows}))

    def answer_in_time(self, picture: Picture | None, source: str, parts: list[int], removed: float, drawn: str) -> Any:
        """The slider's first user may have to wait, and sees for what."""
        if removed and source == FOUND and self.viewer.asked is not None:
            calibration = self.viewer.calibration()
            while not calibration.sketch.done():
                done, of = calibration.done
                yield said(f"Measuring how far patches of training pictures lie from their part: {done / of:.0%}")
                time.sleep(0.2)
        yield self.answer(picture, source, parts, removed, drawn)

    def answer(self, picture: Picture | None, source: str, parts: list[int], removed: float, drawn: str) -> str:
        if picture is None:
            return said("Drop a picture to begin.")
        viewer = self.viewer
        try:
            if source == DRAWN:
                wish, mask, words = None, drawn_mask(drawn, viewer.model.expects.size), "that is what you drew"
            else:
                wish, mask = self.wish(parts, removed), None
                words = wish.words if wish.changes else "as trained"
            answer = viewer.answer(picture, wish, mask)
            return panel(answer, viewer.model.classes, words, blind=viewer.blind, label=picture.label)
        except UserError as error:
            return said(str(error), wrong=True)

    def wish(self, parts: list[int], removed: float) -> Intervention:
        return self.viewer.wish(parts, removed) if self.viewer.parts else Intervention()

    def draw(self, picture: Picture | None, *told: Any) -> list[Any]:
        """Whoever draws wants to see what it does: if neither panel shows it, B does from now on."""
        *both, drawn = told
        if DRAWN not in (both[0], both[3]):
            both[3] = DRAWN
        views = [self.answer(picture, *both[3 * k : 3 * k + 3], drawn) for k in range(len(NAMES))]
        return [*views, both[3]]

    def rename(self, shown_a: list[int], shown_b: list[int], *names: str) -> list[Any]:
        choices = self.choices({part: (name or "").strip() for part, name in enumerate(names)})
        return [self.gr.CheckboxGroup(choices=choices, value=shown) for shown in (shown_a, shown_b)]

    def save(self, source: str, parts: list[int], removed: float, *names: str) -> str:
        try:
            if source == DRAWN:
                raise UserError(f"what is drawn is for one picture, and not kept: choose {FOUND!r}")
            kept = self.viewer.save(self.wish(parts, removed), {part: name or "" for part, name in enumerate(names)})
        except UserError as error:
            return said(str(error), wrong=True)
        where = self.viewer.model.run.folder / FILE
        return said(f"Kept in {where}: {kept.words}. From now on predict, evaluate and the others apply it.")

    def show_effects(self, progress: Any, *both: Any) -> str:
        def tell(done: int, of: int) -> None:
            progress((done, of), desc="validation pictures", unit="batches")

        try:
            chosen = {name: both[3 * k : 3 * k + 3] for k, name in enumerate(NAMES)}
            found = {n: self.wish(parts, removed) for n, (source, parts, removed) in chosen.items() if source == FOUND}
            if not found:
                raise UserError(f"what is drawn is for one picture: choose {FOUND!r}, in A or in B")
            wishes = {name: wish for name, wish in found.items() if wish.changes}
            trained, *others = self.viewer.effects([*wishes.values()], tell)
        except UserError as error:
            return said(str(error), wrong=True)
        named = {f"{name}: {wish.words}": one for (name, wish), one in zip(wishes.items(), others, strict=True)}
        return effect_table({"as trained": trained} | named, sum(one.n for one in trained.cells.values()))

    # ---- serving -----------------------------------------------------------------------------------------------------

    def launch(self) -> tuple[gradio.Blocks, str]:
        """The page, open; and where."""
        gr, command = self.gr, self.viewer.command
        blocks = self.build().queue(default_concurrency_limit=USERS, api_open=False)
        theme = gr.themes.Default(font=FONTS, font_mono=("monospace",))
        try:
            _, url, _ = blocks.launch(
                server_name=command.host, server_port=command.port, inbrowser=command.browser, prevent_thread_lock=True,
                share=False, quiet=True, ssr_mode=False, footer_links=[], theme=theme, max_file_size=MOST_BYTES,
                css=STYLE + legend_style(self.viewer.parts, [name.lower() for name in NAMES]),
            )  # fmt: skip
        except OSError as error:
            where = f"{command.host}:{command.port or 'any port'}"
            raise UserError(f"{where}: cannot be opened ({error}); choose another --port") from error
        return blocks, url

    def prepare(self) -> None:
        """Measures what the slider needs, while nobody waits for it."""
        if self.viewer.parts and self.viewer.asked is not None:
            self.viewer.calibration()


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: App) -> int:
    return serve(command)
