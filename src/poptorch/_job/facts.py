"""What the processes of a job say of themselves, compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from .group import current


def compare(facts: Mapping[str, str], what: str) -> dict[int, dict[str, str]]:
    """Return the facts of the processes whose facts are not those of process 0, and its own.

    Args:
        facts: of this process; only a digest travels where all agree.
        what: is compared, for messages.

    Returns:
        Nothing if all agree.

    Raises:
        Error: a process is lost, or does something else.
    """
    group = current()
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    digests = group.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), what)
    others = [i for i, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if not others:
        return {}
    texts = group.texts(text if group.index in (0, *others) else "", what)
    return {i: json.loads(texts[i]) for i in (0, *others)}
