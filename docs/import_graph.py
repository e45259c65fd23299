"""Draws which folder of the package imports which: `python docs/import_graph.py` writes docs/pictures/imports.svg.

Imports inside functions count; those for type checkers alone do not. An arrow that other arrows imply is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "sightline"
PICTURE = Path(__file__).parent / "pictures" / "imports.svg"
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """`sightline.data.rows` and so on, each with its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            if full in known or base in known:
                yield full if full in known else base


def module_graph() -> Graph:
    known = modules()
    graph = {name: set(imports_of(name, path, known)) - {name, "sightline"} for name, path in known.items()}
    graph.pop("sightline")  # it imports its public words when they are first used
    return graph


def folder_graph(graph: Graph) -> Graph:
    """The same between folders. Modules in the root of the package are on top, but for `errors` and `sight`."""
    folders: Graph = {}
    for name, imported in graph.items():
        if (start := folder_of(name)) is not None:
            folders.setdefault(start, set()).update(
                end for other in imported if (end := folder_of(other)) is not None and end != start
            )
    return folders


def folder_of(module: str) -> str | None:
    name = module.split(".")[1]
    return name if (PACKAGE / name).is_dir() or name in ("errors", "sight") else None


def cycle_in(graph: Graph) -> list[str]:
    """One cycle, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def reduced(graph: Graph) -> Graph:
    """Without the arrows that other arrows imply."""

    def reach(node: str) -> set[str]:
        return set().union(*({other} | reach(other) for other in graph.get(node, ()))) if graph.get(node) else set()

    return {
        node: {other for other in imported if not any(other in reach(third) for third in imported - {other})}
        for node, imported in graph.items()
    }


def layers_of(graph: Graph) -> list[list[str]]:
    """From the bottom: everything that a folder imports is in a lower layer."""
    height: dict[str, int] = {}

    def climb(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((climb(other) for other in graph.get(node, ())), default=-1)
        return height[node]

    for node in sorted(graph):
        climb(node)
    return [sorted(node for node in height if height[node] == level) for level in range(max(height.values()) + 1)]


def draw(graph: Graph) -> str:
    """An SVG with a row of boxes per layer, the lowest at the bottom."""
    width, row, box, tall = 760, 62, 104, 30
    layers = layers_of(graph)
    height = row * len(layers) + 16
    spot = {
        name: (round(width * (i + 1) / (len(layer) + 1)), height - row // 2 - 8 - row * level)
        for level, layer in enumerate(layers)
        for i, name in enumerate(layer)
    }
    lines = [
        f'<line x1="{spot[a][0]}" y1="{spot[a][1] + tall // 2}" x2="{spot[b][0]}" y2="{spot[b][1] - tall // 2 - 3}"/>'
        for a, ends in sorted(reduced(graph).items())
        for b in sorted(ends)
    ]
    boxes = [
        f'<rect x="{x - box // 2}" y="{y - tall // 2}" width="{box}" height="{tall}" rx="6"/>'
        f'<text x="{x}" y="{y + 5}">{name}{"" if name in ("errors", "sight") else "/"}</text>'
        for name, (x, y) in sorted(spot.items())
    ]
    style = (
        "rect{fill:#e8f4f2;stroke:#00796b}text{font:14px sans-serif;text-anchor:middle;fill:#10302c}"
        "line{stroke:#78909c;marker-end:url(#a)}"
    )
    arrow = '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{style}</style><defs>{arrow}<path d="M0 0 8 4 0 8z" fill="#78909c"/></marker></defs>',
        f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>',
        *lines, *boxes, "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    PICTURE.write_text(draw(folder_graph(module_graph())), encoding="utf-8")
    print(f"{PICTURE.name}: {sum(map(len, folder_graph(module_graph()).values()))} arrows, the implied ones left out")
