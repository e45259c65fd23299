"""Writes docs/results_a2.md from benchmarks/results: the file of A², and others about the same images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FILE, MATRIX, FAMILY, CLAIMS = "a2_h200.json", "matrix_wbr_h200.json", "pretrain_family_h200.json", "claims_a2.json"
PARTS, BIRD_WEIGHTS = "parts:ifam-k-1--pixels-0", "vit_ti16_augreg_in1k.safetensors"
S, TI = "S", "Ti"
DEPTH = 12  # of S, Ti, and the family's s
SETS = ("birds", "o2o", "m2m", "disjoint", "toy", "turned")
BEGINNING = """\
# A² on birds

<!-- Written by docs/ledger.py from benchmarks/results/a2_h200.json and others: change docs/a2_page.py, not this. -->

A self-supervised ViT-S (S) and a supervised ViT-Ti (Ti), both frozen: one selects crops, one classifies them. In `A²
S>Ti`, S selects and Ti classifies. All figures are on test images, in per cent with 95 % intervals over images; n =
{n:,} unless a table says otherwise. Verdicts on the paper's claims are in [the ledger](ledger.md); every row, with
its command, is in `benchmarks/results/{file}`.

- Crops help where the features of whole images follow the background. On Waterbirds this is the case for S
  (worst-group accuracy {s_gain} points relative to the whole image); for the supervised Ti crops do not help there
  ({ti_gain}). Where each class has its own scene, they help both.
- Crops are only as good as their position: true masks, displaced step by step, show it.
- Fewer crops are better where the scene predicts the class. Where it does not, three or four are as good (S: no
  detectable difference in accuracy) or better (Ti, by a little).
- Even the best crop shows the surroundings of the bird. [iFAM](results.md), which hides every pixel around it, is far
  ahead on the same images, but that compares a fine-tuned ViT with frozen ones: on the pixels of iFAM's parts, Ti has
  a worst-group accuracy of {tuned} fine-tuned and of {frozen} frozen, with a probe (one seed,
  `benchmarks/results/{matrix}`), against {crops} on the crops of S.
- If the task is to classify the background, the adapter finds it ({adapted}), but the whole image is at least as good
  ({whole}).

Method: logistic regression has no seeds, and there is one pretrained backbone of each kind. S was pretrained on these
photographs, without labels. The block and the heads whose attention is used were selected for each dataset by
class-balanced validation accuracy: {looks}. On scenes one to one and many to many, validation images have the scenes
of training, so the selection may follow them, too. Features were computed in bf16 on an H200, except for six rows of
many to many (Ti: whole image, tuned and plain, both centres, random, and A² with the last block) and two of N on
Waterbirds (whole image, and A² with the last block), which were computed in fp32 on a CPU; the effect of this was not
measured.
"""
COMMANDS = """\
## To run it

```
sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds
sightline data scenes-o2o --cub PACKS --scenes PACKS --out scenes-o2o
sightline data scenes-m2m --cub PACKS --scenes PACKS --out scenes-m2m
sightline data scenes-disjoint --cub PACKS --scenes PACKS --out scenes-disjoint
sightline data displaced --cub PACKS --scenes PACKS --out displaced
python benchmarks/run.py a2 --data birds=waterbirds o2o=scenes-o2o m2m=scenes-m2m disjoint=scenes-disjoint displaced=displaced --backbones S=dino_s16_reg4.safetensors Ti=vit_ti16_augreg_in1k.safetensors --out a2.json
```

`N=sightline-nano` adds the embedded backbone. CLIP with its published weights, and therefore TTR and zero-shot
crops on photographs, has not been run.
"""  # noqa: E501
Rows = dict[str, dict[str, Any]]


def said(figure: dict[str, Any] | None, *, sign: str = "") -> str:
    if figure is None:
        return ""
    low, high = figure.get("interval") or (figure["low"], figure["high"])
    return f"{100 * figure['value']:{sign}.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def read(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def worst(row: dict[str, Any] | None) -> str:
    return said(row and row["metrics"]["test"]["worst_group"])


def accuracy(row: dict[str, Any] | None) -> str:
    return said(row and row["metrics"]["test"]["accuracy"])


def part(name: str, figure: str) -> Callable[[dict[str, Any] | None], str]:
    return lambda row: said(row and row.get("parts", {}).get(name, {}).get(figure))


def rows_in(found: dict[str, Any], name: str) -> Rows:
    return {row["row"]: row for row in found["sets"][name]["rows"]}


# ---- the tables ------------------------------------------------------------------------------------------------------

CONTROLS = {
    "whole image": "full, {}",
    "whole image, plain regression": "full, {}, plain",
    "whole image at twice the size": "full at twice the size, {}",
    "S²": "S2, {}",
    "centre, 4/7 of the side": "centre, {}",
    "centre, 2/7": "centre 2/7, {}",
    "random, 2/7": "random, {}",
}
CROPPED = {
    "A² {}>*, last block, mean of heads": "A2 {}>{}, block -1, mean",
    "A² {}>*": "A2 {}>{}",
    "A² {}>*, plain regression": "A2 {}>{}, plain",
}
LABELLED = {"DFR on validation groups": "DFR val, {}", "DFR on training groups": "DFR train, {}"}
CROPPED_LABELLED = {
    "A² {}>*, DFR on validation groups": "A2 {}>{}, DFR val",
    "A² {}>*, DFR on training groups": "A2 {}>{}, DFR train",
}


def names_of(labelled: bool) -> dict[str, Callable[[str], str]]:
    """Words -> the row's name, given who answers."""
    alone, crops = (LABELLED, CROPPED_LABELLED) if labelled else (CONTROLS, CROPPED)
    found = {words: name.format for words, name in alone.items()}
    for looks in (S, TI):
        for words, name in crops.items():
            found[words.format(looks)] = lambda what, name=name, looks=looks: name.format(looks, what)
    return found


def pairs(rows: Rows, *, labelled: bool = False) -> str:
    lines = []
    for words, name in names_of(labelled).items():
        of = [rows.get(name(what)) for what in (S, TI)]
        if any(of):
            lines.append([words, *(show(row) for row in of for show in (worst, accuracy))])
    return table(["", "S classifies: worst group", "accuracy", "Ti classifies: worst group", "accuracy"], lines)


def off_centre(rows: Rows) -> str:
    shown = {"nearest": "nearest 10 %", "farthest": "farthest 10 %", "centred": "centred", "displaced": "displaced"}
    lines = [
        [words.replace("*", what), *(part(name, "accuracy")(rows.get(row(what))) for name in shown.values())]
        for what in (S, TI)
        for words, row in {
            f"whole image, {what}": "full, {}".format, f"centre 4/7, {what}": "centre, {}".format,
            f"centre 2/7, {what}": "centre 2/7, {}".format, "A² S>*": "A2 S>{}".format, "A² Ti>*": "A2 Ti>{}".format,
        }.items()
    ]  # fmt: skip
    return table(
        ["accuracy", "10 % of birds nearest the centre", "10 % farthest", "dataset, centred", "displaced"], lines
    )


def steps(rows: Rows, names: dict[str, str], answers: Iterable[str] = (S, TI)) -> str:
    """`names`: words -> a row's name with {} for who answers."""
    head = ["", *(f"{what} classifies: {figure}" for what in answers for figure in ("worst group", "accuracy"))]
    lines = [
        [words, *(show(rows.get(name.format(what))) for what in answers for show in (worst, accuracy))]
        for words, name in names.items()
    ]
    return table(head, lines)


def sizes(rows: Rows) -> str:
    """Of a family: who looks, by who answers."""
    members = ("nano", "ti", "s")
    shown = {
        "whole image": "full, {}",
        **{f"{a} selects, last block, mean": f"A2 {a}>{{}}, block -1, mean" for a in members},
    }
    shown |= {f"{a} selects, as selected on validation data": f"A2 {a}>{{}}" for a in members}
    shown["s selects, at the epoch with the k-NN accuracy of nano"] = "A2 s-matched>{}, block -1, mean"
    lines = [[words, *(worst(rows.get(name.format(what))) for what in members)] for words, name in shown.items()]
    return table(["worst group", *(f"{what} classifies" for what in members)], lines)


def where_they_look(found: dict[str, Any]) -> str:
    """On Waterbirds: the share of the map that is on the bird."""
    attention, rows = found["sets"]["birds"]["attention"], rows_in(found, "birds")
    lines = []
    for name in (S, TI):
        known = attention[f"attention-{name.lower()}"]
        masses = [known[f"{block} mean pixels mass"] for block in range(DEPTH)]
        best = max(range(DEPTH), key=lambda block, masses=masses: masses[block]["value"])
        block, heads = rows[f"A2 {name}>{name}"]["look"]["chosen"].removeprefix("block ").split(", ")
        chosen = known[f"{int(block) % DEPTH} {heads.removeprefix('head ')} pixels mass"]
        shown = [said(known["even pixels mass"]), said(masses[-1]), f"{said(masses[best])}, block {best + 1}"]
        lines.append([name, *shown, said(chosen), said(known[f"{DEPTH - 1} mean pixels hit"])])
    head = (
        "",
        "even map",
        "last block",
        f"best of {DEPTH} blocks",
        "as selected for A²",
        "last block: peak on the bird",
    )
    return (
        "The fraction of the attention on the bird, with the map enlarged to pixels. It is the mean of the heads, "
        "except in the column *as selected*; the best block is the best on these same images. Ti sees the "
        "central 90 % of an "
        f"image, where the bird is larger, so that an even map has more of it, too.\n\n{table(head, lines)}"
    )


def margins(results: Path) -> str:
    """Of crops over the whole picture: what of it is lost when both are tuned."""
    claims = {one["id"]: one for one in read(results, CLAIMS)["claims"]}
    found = {one["test"]: one["difference"] for one in claims["A14"]["tests"]}
    told = "{}, mean of groups: A2 S>{w}, plain − full, {w}, plain + full, {w} − A2 S>{w}"
    lines = [
        [words, *(said(found[told.format(name, w=w)], sign="+") for w in (S, TI))] for name, words in NAMED.items()
    ]
    return (
        "The margin of crops (S selects) over the whole image with plain regression, minus that margin when both are "
        "standardised and tuned, in the mean of groups. Above zero, plain regression explains part of the margin; "
        "below, tuning widens it. If S classifies, it explains a small part on Waterbirds and on disjoint scenes. "
        "Where scenes predict the class, tuning, on validation images that have the same scenes, helps crops, and not "
        "whole images with S.\n\n" + table(["points", "S classifies", "Ti classifies"], lines)
    )


def how_many(sets: dict[str, Rows]) -> str:
    return "\n\n".join(
        f"{words[0].upper()}{words[1:]}:\n\n{steps(sets[name], COUNTS)}" for name, words in NAMED.items()
    )


def trained_with_labels(found: dict[str, Any], results: Path) -> str:
    """Where sizes of the family look, without labels and with them."""
    family, attention = read(results, FAMILY), found["sets"]["family"]["attention"]
    hows = {"without labels": "pretrained", "with labels": "supervised"}
    lines = [[one["size"], *(said(one[how]["mass"]) for how in hows.values())] for one in family["family"]]
    lines.append(["even map", *[said(family["mass_of_even"])] * len(hows)])
    nano = said(attention["attention-nano"]["5 mean pixels mass"])
    early = said(attention["attention-s-3"][f"{DEPTH - 1} mean pixels mass"])
    return (
        "Attention after training: the fraction of the last block's attention on the animal, without labels after "
        f"{family['trained_epochs']} epochs, with labels after 3 (`benchmarks/results/{FAMILY}`).\n\n"
        f"{table(['', *hows], lines)}\n\n"
        "Without labels the larger models localise better. Trained with labels, none attends to the animal more than "
        "an even map does, except s by a very small margin, so nothing can be said about sizes there. At the epoch at "
        f"which the k-NN accuracy of s equalled the final one of nano, s had {early} and nano {nano} (maps enlarged to "
        "pixels); of ti only the final state was measured."
    )


NAMED = {
    "birds": "Waterbirds",
    "o2o": "scenes one to one",
    "m2m": "scenes many to many",
    "disjoint": "disjoint scenes, which are independent of the class",
}
COUNTS = {"1 crop": "A2 S>{}", **{f"{k} crops": f"A2 S>{{}}, {k} crops" for k in (2, 3, 4)}}
SIDES = {
    "1/7 of the side": "A2 S>{}, crops 1/7", "2/7": "A2 S>{}", "3/7": "A2 S>{}, crops 3/7", "4/7": "A2 S>{}, crops 4/7",
    "2/7 and 1/7": "A2 S>{}, crops 2/7+1/7",
}  # fmt: skip
ORACLE = {f"{100 * mass:g} % of it on the bird": f"oracle {mass:g}, {{}}" for mass in (1, 0.8, 0.7, 0.6, 0.5, 0.4)}
JOINED = {how: f"A2 {{0}}>{{0}}, block -1, {how}" for how in ("mean", "entropy", "lowest", "max")}
TURNED = {
    "whole image": "full, {}",
    "A² S>S, last block, mean of heads": "A2 S>S, block -1, mean",
    "candidates, not adapted": "adapter {}, plain rule, untrained",
    "adapted (3 seeds)": "adapter {}, plain rule",
    "candidates, attention as selected for birds, not adapted": "adapter {}, look at birds, untrained",
    "adapted (3 seeds), attention as selected for birds": "adapter {}, look at birds",
}


EMBEDDED = {
    "whole image, N": "full, N",
    "whole image at twice the size, N": "full at twice the size, N",
    "S², N": "S2, N",
    "centre 2/7, N": "centre 2/7, N",
    "random 2/7, N": "random, N",
    **{f"A² {where}>{what}": f"A2 {where}>{what}" for where, what in ("NN", "SN", (TI, "N"), "NS", ("N", TI))},
    "DFR on validation groups, N": "DFR val, N",
    "A² N>N, DFR on validation groups": "A2 N>N, DFR val",
    "A² N>S, DFR on validation groups": "A2 N>S, DFR val",
    "A² N>Ti, DFR on validation groups": "A2 N>Ti, DFR val",
}


SCENES = {"one to one": "embedded o2o", "many to many": "embedded m2m", "disjoint": "embedded disjoint"}


def embedded(found: dict[str, Any]) -> str:
    """With every partner."""
    birds, scenes = rows_in(found, "embedded"), [rows_in(found, name) for name in SCENES.values()]
    lines = [
        [words, worst(birds[name]), accuracy(birds[name])]
        + [accuracy(rows.get(f"{name}, block -1, mean" if name.startswith("A2") else name)) for rows in scenes]
        for words, name in EMBEDDED.items()
    ]
    head = ["", "Waterbirds: worst group", "accuracy", *(f"{words}: accuracy" for words in SCENES)]
    return (
        "The embedded `sightline-nano` (N) was pretrained on toy images only: it has never seen a bird photograph, and "
        "its crops are about as good as random ones. Other scenes: last block, mean of its heads, on a CPU, in fp32."
        f"\n\n{table(head, lines)}"
    )


def beginning(found: dict[str, Any], results: Path, sets: dict[str, Rows]) -> str:
    names = {"birds": "Waterbirds", "o2o": "one to one", "m2m": "many to many", "disjoint": "disjoint"}
    looks = "; ".join(
        f"{names[name]}, {who}: {rows[f'A2 {who}>{who}']['look']['chosen']}"
        for name, rows in sets.items()
        for who in (S, TI)
    )
    birds, turned = sets["birds"], rows_in(found, "turned")
    gains = {line["row"]: line["worst_group"] for line in found["sets"]["birds"]["paired"]}
    cells = {(cell["where"], cell["what"]): cell["worst_group"] for cell in read(results, MATRIX)["cells"]}
    return BEGINNING.format(
        n=birds["full, Ti"]["metrics"]["test"]["accuracy"]["n"],
        looks=looks,
        file=FILE,
        matrix=MATRIX,
        s_gain=said(gains["A2 S>S"], sign="+"),
        ti_gain=said(gains["A2 Ti>Ti"], sign="+"),
        tuned=said(cells[PARTS, f"fine-tune:{BIRD_WEIGHTS}"]),
        frozen=said(cells[PARTS, f"mask-probe:{BIRD_WEIGHTS}"]),
        crops=worst(birds["A2 S>Ti"]),
        adapted=worst(turned["adapter S, plain rule"]),
        whole=worst(turned["full, S"]),
    )


def page(results: Path) -> str:
    found = read(results, FILE)
    birds, o2o, m2m, disjoint, toy, turned = (rows_in(found, name) for name in SETS)
    sets = {"birds": birds, "o2o": o2o, "m2m": m2m, "disjoint": disjoint}
    count = {name: rows["full, Ti"]["metrics"]["test"]["accuracy"]["n"] for name, rows in sets.items()}
    many = toy["full, s"]["metrics"]["test"]["accuracy"]["n"]
    both = "{}\n\nWith group labels:\n\n{}"
    own = f"each class has its own scene in training, and that of another class in the test set (n = {count['o2o']:,})"
    sections = {
        "Waterbirds rebuilt": both.format(pairs(birds), pairs(birds, labelled=True)),
        "Where they look": where_they_look(found),
        "A backbone that has never seen birds": embedded(found),
        "Away from the centre": off_centre(birds),
        "How many crops": how_many(sets),
        "How large": steps(birds, SIDES),
        "How heads are aggregated": steps(birds, JOINED),
        "True masks, displaced": f"A crop at the mask, with masks displaced from the bird:\n\n{steps(birds, ORACLE)}",
        "Plain and tuned": margins(results),
        "Scenes one to one": f"Here {own}.\n\n" + both.format(pairs(o2o), pairs(o2o, labelled=True)),
        "Scenes many to many": "Families share scenes in pairs, and the pairs are swapped in the test set "
        f"(n = {count['m2m']:,}).\n\n" + both.format(pairs(m2m), pairs(m2m, labelled=True)),
        "Scenes disjoint": f"No scene of the test set occurs in training (n = {count['disjoint']:,}).\n\n"
        + both.format(pairs(disjoint), pairs(disjoint, labelled=True)),
        "The task reversed": "The same images, with the background as the label: the bird is the shortcut, and "
        f"attention lies on it. The whole image, which needs no selection, is at least as good as the crops of "
        f"the adapter.\n\n"
        f"{steps(turned, TURNED, (S,))}",
        "Three sizes pretrained in the same way": "[Toy images](pretraining.md) whose background predicts the class "
        f"(n = {many:,}).\n\n{sizes(toy)}\n\n{trained_with_labels(found, results)}",
    }
    text = beginning(found, results, sets)
    return "\n".join([text, *(f"## {title}\n\n{body}\n" for title, body in sections.items()), COMMANDS])
