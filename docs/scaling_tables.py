"""The figures of docs/scaling.md, from benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from birds_tables import read, table

BATCH, MEMORY, NODES = "batch_cpu.json", "batch_memory_cpu.json", "nodes_cpu.json"
ENGINES = {"local": "local", "ray": "Ray"}
Measured = dict[str, Any]


def percent(share: float) -> str:
    return f"{100 * share:.0f}"


def joined(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


# ---- batch work ------------------------------------------------------------------------------------------------------


def throughput(results: Path) -> str:
    """The whole collection with two workers, and a part of it with one, two and four."""
    found, lines = read(results, BATCH), []
    for images, kind in ((found["images"], "undisturbed"), (found["images_of_the_curve"], "curve")):
        for engine, words in ENGINES.items():
            runs = found[engine][kind]
            lines += [of_run(words, images, run) for run in (runs if kind == "curve" else [runs])]
    head = ["engine", "workers", "images", "images/s", "% of the limit", "start and end, s"]
    head += ["CPU ms per image: command", "workers", "CPU, % of the limit"]
    return table(head, lines, ("engine",))


def of_run(engine: str, images: int, run: Measured) -> list[str]:
    low, high = run["share_of_limit_lowest_highest"]
    cpu, shares = run["cpu_ms_per_image"], f"{percent(run['share_of_limit'])} [{percent(low)}, {percent(high)}]"
    spent = [f"{cpu[who]:.2f}" for who in ("command", "workers")]
    rate = f"{run['images_per_second']:,.0f}"
    other = f"{run['seconds_with_start'] - images / run['images_per_second']:.0f}"
    return [engine, str(run["workers"]), f"{images:,}", rate, shares, other, *spent, percent(run["cpu_share_of_limit"])]


def memory(results: Path) -> str:
    """MiB of the command and of its workers together, over the undisturbed runs."""
    found, lines = read(results, BATCH), []
    for engine, words in ENGINES.items():
        points = found[engine]["undisturbed"]["usage"]
        for who, name in (("command", "the command"), ("workers", "its workers together")):
            used = [point["memory_mib"][who] for point in points]
            half = len(used) // 2
            figures = (used[0], statistics.median(used[1:half]), statistics.median(used[half:]), used[-1], max(used))
            lines.append([words, name, *(f"{one:,.0f}" for one in figures)])
    alone = read(results, MEMORY)
    used = [point["rss_mib"] for point in alone["points"]]
    head = ["engine", "MiB of", "first part", "first half, median", "second half, median", "last", "largest"]
    said = (
        "Memory that several processes share is divided among them, so a process is counted as larger when less is "
        f"shared. One process that decodes as well (`--workers 0`, {alone['images']:,} images) had {used[0]:,.0f} MiB "
        f"after part {alone['points'][0]['parts']:.0f}, {statistics.median(used):,.0f} in the median and "
        f"{used[-1]:,.0f} after part {alone['points'][-1]['parts']:.0f} of {alone['parts']} (`{MEMORY}`)."
    )
    return f"{table(head, lines, ('engine', 'MiB of'))}\n\n{said}"


def interruptions(results: Path) -> str:
    """What was killed, and what was equal afterwards."""
    found = read(results, BATCH)
    equal, killed = found["equal"], []
    for engine, words in ENGINES.items():
        parts = {
            kind: [f"{event['parts']}" for event in found[engine]["killed"]["events"] if event["killed"] == kind]
            for kind in ("command", "worker")
        }
        text = f"{words}: the command after {joined(parts['command'])} of {found['parts']} parts"
        killed.append(text + (f", and a worker after {joined(parts['worker'])}" if parts["worker"] else ""))
    files = [name for name, same in equal["files"].items() if same]
    assert len(files) == len(equal["files"]), "files differ"
    order = "in the order of the shards" if equal["rows_are_the_members_of_the_shards_in_order"] else "in another order"
    return (
        f"Killed (-9): {'; '.join(killed)}. After the same command was started again, all files of the four results "
        f"(local and Ray, undisturbed and killed) were equal, byte by byte, and so were those of 1, 2 and 4 workers of "
        f"both engines. {equal['rows']:,} rows name {equal['distinct_images_in_rows']:,} different images, {order}; "
        f"{equal['rows_with_an_error']} of them have an error. {equal['predicted_one_by_one']} images, predicted one "
        f"by one, differ by at most {equal['largest_difference_of_a_probability']:.1g} in a probability."
    )


# ---- training --------------------------------------------------------------------------------------------------------


def nodes(results: Path) -> str:
    found, lines = read(results, NODES), []
    for run in found["runs"]:
        for event in run["events"]:
            codes = joined(map(str, event["exit_codes_of_the_launchers"]))
            position = f"epoch {event['epochs_done'] + 1}, step {event['steps_of_the_next']}"
            lines.append([f"`{run['method']}`", event["interrupted"], codes, position])
        equal = [name for name, same in run["equal"].items() if same]
        lines.append([f"`{run['method']}`", f"finished after {run['epochs']} epochs", "0 and 0", f"equal: {of(equal)}"])
    return table(["method", "", "exit codes of the launchers", "saved"], lines, ("", "method", "saved"))


def of(files: list[str]) -> str:
    return joined(f"`{name}`" for name in files)


def large(results: Path) -> str:
    lines = []
    for run in read(results, NODES)["large"]:
        losses = joined(f"{loss:.4f}" for loss in run["losses"])
        peaks = [joined(f"{peak:,}" for peak in known) for known in run["peak_mib_of_each_process"].values()]
        lines.append(["`--fsdp`" if run["fsdp"] else "without", f"{run['parameters'] / 1e6:.0f}", losses, *peaks])
    head = ["", "million parameters", "loss of each epoch", "largest MiB before the first checkpoint", "of all"]
    return table(head, lines)


# ---- speed -----------------------------------------------------------------------------------------------------------

SIGHTS = {  # what a line says, and what is measured
    "`--sight patches`": "patches",
    "the default": "default",
    "the default with `--selector-size 224`": "default, look at the images' size",
    "with a selector of three blocks (`distill`)": "default, look with 3 blocks",
    "with both": "default, look with 3 blocks at the images' size",
    "`--selector learned`": "default, learned",
}


def stages(results: Path) -> str:
    """Both stages of iFAM on a CPU, as multiples of one dense forward pass."""
    rows = read(results, "speed_table_cpu.json")["rows"]
    found = {(row["batch"], row["sight"], row["work"]): row for row in rows}
    batches, head, lines = sorted({row["batch"] for row in rows if row["work"] == "look"}), [""], []
    for batch in batches:
        head += [f"batch {batch}: look", "judge", "both"]
    for words, sight in SIGHTS.items():
        line = [words]
        for batch in batches:
            line += [f"{found[batch, sight, work]['ratio']:.2f}" for work in ("look", "judge")]
            both = found[batch, sight, "look and judge"]
            line.append(f"{both['ratio']:.2f} [{', '.join(f'{value:.2f}' for value in both['spread'])}]")
        lines.append(line)
    return table(head, lines)


TABLES = {
    "stages": stages,
    "throughput": throughput,
    "memory": memory,
    "interruptions": interruptions,
    "nodes": nodes,
    "large": large,
}
