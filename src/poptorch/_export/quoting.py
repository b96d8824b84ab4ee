"""Quote names that users choose, so that none of them can become code in an exported file.

Names of modules, weights, classes and source files may contain any character, including quotes and
line ends. Each function here is for one kind of place in which such a name is written.
"""

from __future__ import annotations

import re
import unicodedata

from .._base.errors import Error, visible

_PLAIN = re.compile(r"[^\w.-]")


def key(name: str) -> str:
    """Return a name as the key of a dict, for use between quotes.

    Every character that is not a letter, digit, dot, dash or underscore becomes ``%`` and two
    hexadecimal digits for each of its bytes. Different names have different keys.
    """
    return _PLAIN.sub(_percent, name)


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def identifier(name: str) -> str:
    """Return a name as a part of a Python identifier.

    Python treats identifiers as equal if their normal forms are equal.
    """
    normal = unicodedata.normalize("NFKC", name)
    return "".join(each if f"a{each}".isidentifier() else "_" for each in normal)


def checked(text: str) -> str:
    """Return an operator's argument for use between quotes; torch's own arguments are
    plain words.
    """
    if re.search(r'["\\\x00-\x1f]', text):
        raise Error(
            "An argument of an operator cannot be exported",
            got=f"the string {text!r}",
            fix="use a string without quotes, backslashes and line breaks",
        )
    return text


def in_docstring(text: str) -> str:
    """Return a text for use in a docstring, which it cannot end."""
    return visible(text).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def comment(text: str) -> str:
    """Return a text for use in a comment: it is one line and contains no triple quotes."""
    return " ".join(visible(text).split()).replace('"', "'")
