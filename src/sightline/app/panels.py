"""HTML of the app's page: images of the sight, bars of probabilities, a table of effects.

Names that come from a user or a data set are escaped here and nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import html
import io
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..data.drawing import grey_out_hidden, overlay_attention, tint_parts, to_pil_images
from ..errors import UserError
from ..interventions.search import OBJECTIVE_LABELS
from ..metrics.estimates import Estimate
from ..report.contact_sheet import data_uri, encode_image
from ..report.gallery import fade, part_css_colour
from .session import Effect, InputImage, ShownPrediction

MAX_BARS = 5
MAX_MAPS = 3
THUMBNAIL = 96  # pixels
MAX_DRAWN = 8_000_000  # characters of a drawn mask


def plain(text: str) -> str:
    """Escaped text, also safe inside a template."""
    return "".join(f"&#{ord(c)};" if c in "{}$`" else c for c in html.escape(str(text)))


def message(text: str, *, error: bool = False) -> str:
    kind, role = ("status failed", "alert") if error else ("status", "status")
    return f'<div class="{kind}" role="{role}">{plain(text)}</div>'


# ---- images ----------------------------------------------------------------------------------------------------------


def uri(image: Image.Image) -> str:
    return data_uri(encode_image(image, quality=92))


def image_uri(input_image: InputImage, most: int | None = None) -> str:
    """At most `most` pixels wide or high."""
    image = Image.fromarray(input_image.pixels.permute(1, 2, 0).numpy())
    if most is not None:
        image.thumbnail((most, most))
    return uri(image)


def figure(image: Tensor, caption: str) -> str:
    return (
        f'<figure><img src="{uri(to_pil_images(image[None])[0])}" alt="{plain(caption)}">'
        f"<figcaption>{plain(caption)}</figcaption></figure>"
    )


def figures(prediction: ShownPrediction, *, blind: bool) -> str:
    images, sight = prediction.images.cpu(), prediction.sight.to("cpu")
    sight_caption = "sight: all that the prediction is made from"
    caption = "whole image" if prediction.coverage == 1 else sight_caption if blind else "area of the parts"
    shown = [figure(grey_out_hidden(images, sight)[0], caption)]
    if sight.parts is not None:
        visible = sight.visible(tuple(images.shape[2:]))
        tinted = torch.where(visible[0], tint_parts(images, sight)[0], fade(images[0], visible[0]))
        shown.append(figure(tinted, "parts"))
    for name, maps in [*prediction.maps.items()][:MAX_MAPS]:
        smooth = F.interpolate(maps[:, None].float().cpu(), images.shape[2:], mode="bilinear")[:, 0]
        shown.append(figure(overlay_attention(images, smooth.clamp_min(0) + 1e-12)[0], name))
    return f'<div class="figures">{"".join(shown)}</div>'


def drawn_mask(value: str | None, size: tuple[int, int]) -> Tensor:
    """bool [h, w], from the opacity of the PNG drawn on the page."""
    if not value:
        return torch.zeros(size, dtype=torch.bool)
    try:
        if len(value) > MAX_DRAWN:
            raise ValueError("too large")
        content = base64.b64decode(value.partition("base64,")[2], validate=True)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.size != size[::-1]:
                raise ValueError(f"{image.width}×{image.height} pixels instead of {size[1]}×{size[0]}")
            return torch.from_numpy(np.asarray(image.convert("RGBA"))[..., 3] >= 128)
    except (OSError, SyntaxError, ValueError, binascii.Error) as error:
        raise UserError(f"the drawn mask cannot be read ({error}); clear it and draw again") from error


# ---- predictions -----------------------------------------------------------------------------------------------------


def panel(prediction: ShownPrediction, classes: Sequence[str], applied: str, *, blind: bool, label: str = "") -> str:
    best = int(prediction.probabilities.argmax())
    whole = not blind or prediction.coverage == 1
    sees = "It sees the whole image" if whole else f"It sees {percent(prediction.coverage)} of the image"
    return (
        f'<div class="panel">{figures(prediction, blind=blind)}'
        f'<p class="verdict"><b>{plain(classes[best])}</b> {percent(prediction.probabilities[best])}</p>'
        f"{bars(prediction, classes, label)}"
        f'<p class="words">{sees}; {plain(applied)}.</p></div>'
    )


def bars(prediction: ShownPrediction, classes: Sequence[str], label: str) -> str:
    rows = []
    for k in prediction.probabilities.argsort(descending=True)[:MAX_BARS].tolist():
        probability, tick, change = float(prediction.probabilities[k]), "", ""
        if prediction.before is not None:
            before = float(prediction.before[k])
            tick = f'<i style="left:{100 * before:.1f}%"></i>'
            points = round(100 * probability) - round(100 * before)
            change = f"{points:+d}" if points else "±0"
        rows.append(
            f'<div class="bar"><span class="name">{plain(classes[k])}{" (label)" * (classes[k] == label)}</span>'
            '<span class="track">'
            f'<b style="width:{100 * probability:.1f}%"></b>{tick}</span>'
            f'<span class="probability">{percent(probability)}</span><span class="change">{change}</span></div>'
        )
    note = (
        '<p class="note">Mark and change: compared with the model as trained.</p>'
        if prediction.before is not None
        else ""
    )
    return f'<div class="bars">{"".join(rows)}{note}</div>'


def percent(fraction: float | Tensor) -> str:
    return f"{100 * float(fraction):.0f} %"


# ---- effects ---------------------------------------------------------------------------------------------------------


def effect_table(effects: Mapping[str, Effect], n: int) -> str:
    """The model as trained, and under each intervention."""
    first, *others = effects.values()
    titles = "".join(f"<th>{plain(name)}</th>" for name in effects)
    lines = [f"<tr><th></th><th>n</th>{titles}</tr>"]
    for cell, estimate in first.cells.items():
        cells = "".join(changed(one.cells[cell], one.gains[cell]) for one in others)
        lines.append(row(cell, str(estimate.n), f"<td>{with_interval(estimate)}</td>{cells}"))
    worst = "".join(changed(one.worst, one.gain) for one in others)
    lines.append(
        row(
            OBJECTIVE_LABELS[first.objective],
            "",
            f"<td>{with_interval(first.worst)}</td>{worst}",
            kind=' class="worst"',
        )
    )
    return (
        f'<div class="effects"><table>{"".join(lines)}</table><p class="note">Accuracy on {n:,} validation images: '
        "as trained, with its 95 % interval; then with the paired change in points and its interval. "
        "An intervention selected on these images helps less on others.</p></div>"
    )


def row(name: str, n: str, cells: str, kind: str = "") -> str:
    return f'<tr{kind}><th scope="row">{plain(name)}</th><td>{n}</td>{cells}</tr>'


def with_interval(estimate: Estimate) -> str:
    return f"{estimate.value_text} <small>{estimate.interval}</small>"


def changed(now: Estimate, gain: Estimate | None) -> str:
    assert gain is not None
    kind = "better" if gain.low > 0 else "worse" if gain.high < 0 else ""
    return f'<td class="{kind}">{now.value_text} <small>{100 * gain.value:+.1f} {gain.interval}</small></td>'


# ---- style and scripts of the page -----------------------------------------------------------------------------------

STYLE = """
h2, h3 { margin: 0; }
.status { padding: .5em .8em; border-left: 4px solid var(--color-accent); }
.status { background: var(--background-fill-secondary); }
.status.failed { border-color: #c62828; font-weight: 600; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: .5em; max-width: 40em; }
.figures figure { margin: 0; }
.figures img { width: 100%; display: block; border-radius: 4px; }
.figures figcaption, .note, .words { font-size: .85em; opacity: .8; margin: .25em 0; }
.verdict { font-size: 1.25em; margin: .4em 0; }
.bar { display: grid; grid-template-columns: minmax(4em, 9em) 1fr 3.4em 2.6em; gap: .5em; align-items: center; }
.bar .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bar .probability, .bar .change { text-align: right; font-variant-numeric: tabular-nums; }
.track { position: relative; height: .9em; background: var(--border-color-primary); border-radius: 3px; }
.track b { position: absolute; inset: 0 auto 0 0; background: var(--color-accent); border-radius: 3px; }
.track i { position: absolute; top: -.15em; bottom: -.15em; width: 2px; background: var(--body-text-color); }
.effects { overflow-x: auto; }
.effects table { border-collapse: collapse; border: 0; }
.effects th, .effects td { padding: .3em .8em; text-align: right; vertical-align: bottom; border: 0; max-width: 18em; }
.effects tr { border: 0; border-bottom: 1px solid var(--border-color-primary); }
.effects th[scope=row] { text-align: left; font-weight: inherit; }
.effects .worst { font-weight: 700; }
.effects .better { background: #2e7d3233; } .effects .worse { background: #c6282833; }
.gallery { display: grid; grid-template-columns: repeat(4, 1fr); gap: .3em; }
.gallery button { padding: 0; border-radius: 4px; overflow: hidden; border: 2px solid transparent; }
.gallery button:hover, .gallery button:focus { border-color: var(--color-accent); }
.gallery img { width: 100%; aspect-ratio: 1; object-fit: cover; display: block; }
.drawing canvas { width: 100%; max-width: 24em; display: block; border-radius: 4px; }
.drawing canvas { touch-action: none; cursor: crosshair; }
.drawing .tools { display: flex; gap: .6em; flex-wrap: wrap; align-items: center; margin-top: .4em; font-size: .9em; }
.drawing .tools button { padding: .2em .7em; border: 1px solid var(--border-color-primary); border-radius: 4px; }
.drawing .tools label { display: flex; align-items: center; gap: .4em; flex: 1 1 4em; }
.drawing .tools input { flex: 1; width: 3em; }
.drawing .tools button[aria-pressed=true] { background: var(--color-accent); color: white; }
"""

DRAWING = """<div class="drawing"><canvas width="WIDTH" height="HEIGHT" role="img"
 aria-label="Draw what the model may see"></canvas><div class="tools">
<label>brush <input type="range" class="brush" min="1" max="50" value="14"></label>
<button type="button" class="erase" aria-pressed="false">erase</button>
<button type="button" class="clear">clear</button></div></div>"""

# The template does not use the value, so that a stroke does not re-render the page.
DRAW = """
const mask = document.createElement('canvas');
mask.width = WIDTH; mask.height = HEIGHT;
const ink = mask.getContext('2d');
let photo = null, last = null;
const canvas = () => element.querySelector('canvas');
const erasing = () => element.querySelector('.erase').getAttribute('aria-pressed') === 'true';

function paint() {
  const seen = canvas().getContext('2d');
  seen.clearRect(0, 0, WIDTH, HEIGHT);
  if (photo) seen.drawImage(photo, 0, 0, WIDTH, HEIGHT);
  seen.globalAlpha = 0.55; seen.drawImage(mask, 0, 0); seen.globalAlpha = 1;
}
function begin() {
  ink.clearRect(0, 0, WIDTH, HEIGHT);
  const image = new Image();
  image.onload = () => { photo = image; paint(); };
  if (props.image) image.src = props.image;
}
function tell() { props.value = mask.toDataURL('image/png'); trigger('drawn'); }
function place(event) {
  const box = canvas().getBoundingClientRect();
  return [(event.clientX - box.left) * WIDTH / box.width, (event.clientY - box.top) * HEIGHT / box.height];
}
function stroke(event) {
  const [x, y] = place(event), width = element.querySelector('.brush').value / 100 * WIDTH;
  ink.globalCompositeOperation = erasing() ? 'destination-out' : 'source-over';
  ink.strokeStyle = '#e91e63'; ink.lineCap = 'round'; ink.lineWidth = width;
  ink.beginPath(); ink.moveTo(...(last || [x, y])); ink.lineTo(x + 0.01, y); ink.stroke();
  last = [x, y]; paint();
}
element.addEventListener('pointerdown', event => {
  if (event.target !== canvas()) return;
  event.preventDefault(); canvas().setPointerCapture(event.pointerId); last = null; stroke(event); last = place(event);
});
element.addEventListener('pointermove', event => { if (last) stroke(event); });
for (const end of ['pointerup', 'pointercancel'])
  element.addEventListener(end, () => { if (last) { last = null; tell(); } });
element.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (!button) return;
  if (button.classList.contains('clear')) { ink.clearRect(0, 0, WIDTH, HEIGHT); paint(); tell(); }
  else button.setAttribute('aria-pressed', String(!erasing()));
});
watch('image', begin);
begin();
"""


GALLERY = '<div class="gallery">${images}</div>'
CHOOSE = """
element.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (button) { props.value = Number(button.dataset.row); trigger('chosen'); }
});
"""


def buttons(examples: Mapping[int, InputImage]) -> str:
    """Buttons to choose an example image by its row."""
    return "".join(
        f'<button type="button" data-row="{number}" title="{plain(one.group or one.label)}">'
        f'<img src="{image_uri(one, THUMBNAIL)}" alt="{plain(one.group or one.label)}"></button>'
        for number, one in examples.items()
    )


def sized(text: str, size: tuple[int, int]) -> str:
    return text.replace("WIDTH", str(size[1])).replace("HEIGHT", str(size[0]))


def legend_style(parts: int, panels: Sequence[str]) -> str:
    """The checkboxes of the parts in their colours, as a legend."""
    return "\n".join(
        f"#{name}-parts label:nth-of-type({part + 1}) {{ border-left: .8em solid {part_css_colour(part, parts)}; }}"
        for name in panels
        for part in range(parts)
    )
