"""What a user says of a cell: one word for where to look, one for what to make of it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

ALONE = ("centre", "random", "everything")  # need nothing after a colon
WHATS = (
    "mask-probe", "crop-probe", "mask-dfr", "crop-dfr", "mask-zero-shot", "crop-zero-shot", "fine-tune",
)  # fmt: skip

# The pairings that somebody has published, and how they are called.
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
class Word:
    """`kind:of`, as it was said."""

    kind: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.of}" if self.of else self.kind

    @property
    def short(self) -> str:
        """For tables: of files and folders, the last two names."""
        of = "/".join(Path(self.of).parts[-2:]).removesuffix("/backbone.safetensors").removesuffix(".safetensors")
        return f"{self.kind}:{of}" if self.of else self.kind

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.+-]+", "-", self.short).strip("-.")


def read_words(said: Collection[str], kinds: Collection[str], flag: str) -> list[Word]:
    """Each once, in the order they were said in; what cannot be meant is refused."""
    if not said:
        raise UserError(f"--{flag}: name at least one, such as {next(iter(kinds))}:BACKBONE")
    words = []
    for text in dict.fromkeys(said):
        kind, _, of = text.partition(":")
        if kind not in kinds:
            raise UserError(f"--{flag} {text}: there is no {kind!r}; choose among {', '.join(kinds)}")
        if bool(of) == (kind in ALONE):
            said_so = f"say {kind}:WHICH" if kind not in ALONE else f"say {kind} and no more"
            raise UserError(f"--{flag} {text}: {said_so}")
        words.append(Word(kind, of))
    return words


def attention_of(text: str) -> tuple[str, int, str]:
    """BACKBONE[:LAYER[:HEADS]]; a backbone's name may have a colon of its own.

    >>> attention_of("random:nano"), attention_of("random:nano:-2"), attention_of("dino-s16:5:max")
    (('random:nano', -1, 'mean'), ('random:nano', -2, 'mean'), ('dino-s16', 5, 'max'))
    """
    found = re.fullmatch(r"(.+?)(?::(-?\d+)(?::(\w+))?)?", text)
    assert found is not None, "something is always said after the colon"
    return found[1], int(found[2] or -1), found[3] or "mean"
