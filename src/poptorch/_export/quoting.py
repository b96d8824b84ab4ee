"""Names that users choose, in a file that is Python: none of them can become code.

Names of modules, weights, classes and source files may hold any character, quotes and line ends
among them. Each function here is for one place where such a name stands in the file.
"""

from __future__ import annotations

import re
import unicodedata

from .._base.errors import Error, visible

_PLAIN = re.compile(r"[^\w.-]")


def key(name: str) -> str:
    """Return a name as a key of a dict, to stand between quotes.

    What is no letter, digit, dot, dash or underscore becomes ``%`` and two hexadecimal digits for
    each of its bytes. Different names have different keys.
    """
    return _PLAIN.sub(_percent, name)


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def identifier(name: str) -> str:
    """Return a name as a part of a name of Python's.

    Python takes names for equal that are equal in normal form.
    """
    normal = unicodedata.normalize("NFKC", name)
    return "".join(each if f"a{each}".isidentifier() else "_" for each in normal)


def checked(text: str) -> str:
    """Return an argument of an operator, to stand between quotes; torch's are plain words."""
    if re.search(r'["\\\x00-\x1f]', text):
        raise Error(
            "An argument of an operator cannot be exported",
            got=f"the string {text!r}",
            fix="use a string without quotes, backslashes and line breaks",
        )
    return text


def in_docstring(text: str) -> str:
    """Return a text to stand in a docstring, which it cannot end."""
    return visible(text).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def comment(text: str) -> str:
    """Return a text to stand in a comment: one line, in which no quotes begin."""
    return " ".join(visible(text).split()).replace('"', "'")
