"""Find sentences of the pages that are too long to be read once; count all words.

python scripts/words.py [PAGE...] prints the long ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 30


def pages() -> list[Path]:
    """Return the pages that are written by hand to be read, without the reference."""
    found = [path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
             for path in ROOT.glob(pattern)]  # fmt: skip
    return sorted(
        path for path in found if path.parent.name != "reference" and path.stem != "behaviours"
    )


def counted() -> list[Path]:
    """Return those of which readers of the library need most: not the changelog, no examples."""
    return [path for path in pages() if "examples" not in path.parts and path.stem != "CHANGELOG"]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown: of paragraphs, of items of lists, and of cells."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`", "code", text)  # a word, whatever it holds
    text = re.sub(r"^(\s*([-*]|\d+\.)\s|#+ |\|)", r"\n\n", text, flags=re.M)
    for part in re.split(r"\n\s*\n|\|", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(part.split()))


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than 30 words."""
    return [each for each in sentences(text) if len(re.findall(r"\w[\w'-]*", each)) > LONGEST]


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    for path in chosen:
        for sentence in long_sentences(path.read_text()):
            print(f"{path.relative_to(ROOT)}: {sentence}")
    count = sum(len(path.read_text().split()) for path in counted())
    print(f"{count:,} words")
