"""Specs of selectors and predictors, KIND or KIND:ARGUMENT, and the pairs that are published methods."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

WITHOUT_ARGUMENT = ("centre", "random", "everything")  # need nothing after a colon
WHATS = (
    "mask-probe", "crop-probe", "mask-dfr", "crop-dfr", "mask-zero-shot", "crop-zero-shot", "fine-tune",
)  # fmt: skip

# Published pairs, by their names in the literature.
PUBLISHED = {
    ("attention", "crop-probe"): "A²",
    ("attention", "crop-dfr"): "A² with DFR",
    ("attention", "crop-zero-shot"): "A² zero-shot",
    ("parts", "fine-tune"): "iFAM",
    **{(masks, "fine-tune"): "early masking" for masks in ("masks", "found", "tokencut", "u2net")},
    **{("everything", f"{sees}-probe"): "probe" for sees in ("mask", "crop")},
    **{("everything", f"{sees}-dfr"): "DFR" for sees in ("mask", "crop")},
    **{("everything", f"{sees}-zero-shot"): "zero-shot" for sees in ("mask", "crop")},
    ("everything", "fine-tune"): "ERM",
    ("centre", "crop-probe"): "centre crop",
    ("random", "crop-probe"): "random crops",
}


@dataclass(frozen=True)
class Spec:
    """`kind:of`, as given on the command line."""

    kind: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.of}" if self.of else self.kind

    @property
    def short(self) -> str:
        """For tables: of a path, the last two components."""
        of = "/".join(Path(self.of).parts[-2:]).removesuffix("/backbone.safetensors").removesuffix(".safetensors")
        return f"{self.kind}:{of}" if self.of else self.kind

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.+-]+", "-", self.short).strip("-.")


def parse_specs(texts: Collection[str], kinds: Collection[str], flag: str) -> list[Spec]:
    """Each spec once, in the given order."""
    if not texts:
        raise UserError(f"--{flag}: name at least one, such as {next(iter(kinds))}:BACKBONE")
    specs = []
    for text in dict.fromkeys(texts):
        kind, _, of = text.partition(":")
        if kind not in kinds:
            raise UserError(f"--{flag} {text}: unknown kind {kind!r}; choose among {', '.join(kinds)}")
        if bool(of) == (kind in WITHOUT_ARGUMENT):
            expected = f"{kind} takes no argument" if of else f"{kind} needs an argument: {kind}:ARGUMENT"
            raise UserError(f"--{flag} {text}: {expected}")
        specs.append(Spec(kind, of))
    return specs


def parse_attention(text: str) -> tuple[str, int, str]:
    """Parse BACKBONE[:LAYER[:HEADS]]; the name of a backbone may contain a colon.

    >>> parse_attention("random:nano"), parse_attention("random:nano:-2"), parse_attention("dino-s16:5:max")
    (('random:nano', -1, 'mean'), ('random:nano', -2, 'mean'), ('dino-s16', 5, 'max'))
    """
    found = re.fullmatch(r"(.+?)(?::(-?\d+)(?::(\w+))?)?", text)
    assert found is not None, "there is always an argument after the colon"
    return found[1], int(found[2] or -1), found[3] or "mean"
