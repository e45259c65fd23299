"""The tables of docs/methods/relevance.md, from benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from birds_tables import figure, read, table

FILE = "relevance_h200.json"
SETS = {"birds": "Waterbirds", "cub": "200 species", "si": "SI-Score-like", "imagenet": "ImageNet photographs"}
HEADLINES = ("RobustViT", "RRR", "GradMask", "MaskTune")
SELF_SUPERVISED = ", S"
ROWS = ("ERM", "before", *HEADLINES, f"ERM{SELF_SUPERVISED}", *(name + SELF_SUPERVISED for name in HEADLINES))
FIGURES = {
    "accuracy": "accuracy", "usual": "accuracy, usual", "shifted": "accuracy, shifted", "worst group": "worst group",
    "relevance inside the mask": "mass gae", "10 neighbours": "10 neighbours",
}  # fmt: skip
CURVES = {"the most relevant first": "positive gae", "the least relevant first": "negative gae"}
GAINS = {
    "accuracy": "accuracy, all", "usual": "accuracy, usual", "shifted": "accuracy, shifted",
    "worst group": "worst group, all", "relevance inside the mask": "mass gae, all",
}  # fmt: skip


def figures(results: Path) -> str:
    lines = []
    for kind, words in SETS.items():
        rows = {row["row"]: row for row in read(results, FILE)["sets"][kind]["rows"]}
        for name in (name for name in ROWS if name in rows):
            row = rows[name]
            lines.append([words, name, str(len(row["seeds"])), *(figure(row.get(key)) for key in FIGURES.values())])
    return table(["", " ", "seeds", *FIGURES], lines, (" ",))


def curves(results: Path) -> str:
    """Accuracy while pixels turn black, averaged over 10 to 90 % of them."""
    lines = []
    for kind, words in SETS.items():
        rows = {row["row"]: row for row in read(results, FILE)["sets"][kind]["rows"]}
        for name in (name for name in ROWS if CURVES["the most relevant first"] in rows.get(name, {})):
            row = rows[name]
            lines.append([words, name, str(len(row["seeds"])), *(figure(row.get(key)) for key in CURVES.values())])
    return table(["", " ", "seeds", *CURVES], lines, (" ",))


def moved(results: Path) -> str:
    """SI-Score-like pictures, shift by shift."""
    rows = {row["row"]: row for row in read(results, FILE)["sets"]["si"]["rows"]}
    shown = {"in the centre": "accuracy, usual"} | {
        name: f"accuracy, {name}" for name in ("location", "rotation", "size")
    }
    lines = [[name, *(figure(rows[name][key]) for key in shown.values())] for name in ROWS if name in rows]
    return table(["", *shown], lines)


def gains(results: Path) -> str:
    lines = []
    for kind, words in SETS.items():
        pairs = {pair["row"]: pair for pair in read(results, FILE)["sets"][kind]["paired"]}
        for name in (name for name in ROWS if name in pairs):
            said = [figure(pairs[name].get(key), "+") for key in GAINS.values()]
            lines.append([words, f"{name} − {pairs[name]['against']}", *said])
    return table(["", " ", *GAINS], lines, (" ",))


def variants(results: Path) -> str:
    """What is other than in the headline row, and what that changes against the run it began with."""
    lines = []
    for kind in ("birds", "cub", "imagenet"):
        found = read(results, FILE)["sets"][kind]
        pairs = {pair["row"].removeprefix("RobustViT, "): pair for pair in found["paired"]}
        rate = next(row["rate"]["rate"] for row in found["rows"] if row["row"] == "RobustViT")
        shown = {"as published, seed 0": pairs[f"rate {rate}"]}
        others = {k: v for k, v in pairs.items() if v["row"] == f"RobustViT, {k}" and v["row"] not in ROWS}
        shown |= {k: v for k, v in others.items() if not k.startswith("rate ")}
        if any(words.endswith(SELF_SUPERVISED) for words in shown):
            shown[f"as published{SELF_SUPERVISED}"] = pairs[SELF_SUPERVISED.removeprefix(", ")]
        for words, pair in shown.items():
            said = [figure(pair.get(key), "+") for key in GAINS.values()]
            lines.append([SETS[kind], words, str(pair["seeds"]), *said])
    return table(["", "RobustViT", "seeds", *GAINS], lines, ("RobustViT",))


TABLES = {"figures": figures, "gains": gains, "moved": moved, "curves": curves, "variants": variants}
