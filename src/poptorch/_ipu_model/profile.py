"""``profile.json``: what a program would cost on IPUs, and what it cost here.

Version 2 of the form is an object with

- ``format``: 2; ``poptorch``, ``torch``: versions; ``name``: of the model or its use
- ``estimated``: the attributes of ``poptorch.Estimate``; cycles, bytes, seconds
- ``target``: ``kind``, ``tiles`` and ``tile_bytes`` of a chip, ``clock`` in cycles per second
- ``measured``: the attributes of ``Measured``, of this machine and not of IPUs, or null
- ``settings``: every setting by its path, as text

Readers accept keys that they do not know; a change that breaks them raises ``format``. Version 2
has ``estimated.chips[*].tiles``, ``measured.actions`` and ``measured.operators``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .._base import VERSION, archive
from .._base.errors import Error
from .._systems import ChipKind, parse
from .estimate import Estimate

FORMAT = 2
NAME = "profile.json"


@dataclass(frozen=True)
class Call:
    """Seconds of one call on this machine.

    Attributes:
        start: after the first call began.
        outside: since the call before: the program's own work, waiting for data.
        prepare: checking and taking the batch.
        device: running the program.
        collect: putting the results together.
    """

    start: float
    outside: float
    prepare: float
    device: float
    collect: float

    @property
    def seconds(self) -> float:
        """From handing the batch over to having the results."""
        return self.prepare + self.device + self.collect


@dataclass(frozen=True)
class ActionTime:
    """Seconds of one action in the last call that was timed by parts.

    Attributes:
        name: of the program's graph (``forward``, ``micro``, ``update``, ``step``), or of an action
            of the schedule, where the staged backend runs it.
        count: how often it was done.
        seconds: in all.
    """

    name: str
    count: int
    seconds: float


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one kind of operator of one module, in the same call.

    Attributes:
        direction: ``F``, ``B`` or ``U``: forward, backward, update.
        name: of the operator.
        module: path of the module.
        line: the user's line, described, or "".
        count: how often it was done.
        seconds: in all.
    """

    direction: str
    name: str
    module: str
    line: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What was measured on this machine.

    Attributes:
        tier: what ran the program, as a line.
        compile_seconds: that the backend took to compile it.
        calls: how many were made.
        first: the first of them.
        process_bytes: the most memory that the process has had.
        actions: of the last call that was timed by parts; those are the first two.
        operators: of the same call, the dearest first; compiled code has none of its own.
    """

    tier: str
    compile_seconds: float
    calls: int
    first: tuple[Call, ...]
    process_bytes: int
    actions: tuple[ActionTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()


def profile(
    name: str,
    estimate: Estimate,
    kind: ChipKind,
    measured: Measured | None,
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of ``profile.json``.

    Args:
        name: of the model or its use.
        estimate: of the compiled program.
        kind: of the chips that it was made for.
        measured: on this machine; None if nothing was.
        settings: by their paths.
    """
    return {
        "format": FORMAT,
        "poptorch": VERSION,
        "torch": torch.__version__,
        "name": name,
        "target": {
            "kind": kind.name, "generation": kind.generation, "tiles": kind.tiles,
            "tile_bytes": kind.tile_bytes, "clock": kind.clock_mhz * 1e6,
        },
        "estimated": asdict(estimate),
        "measured": None if measured is None else asdict(measured),
        "settings": dict(settings),
    }  # fmt: skip


def estimate_page(estimate: Estimate, path: Path) -> None:
    """Write a page of an estimate alone.

    Raises:
        Error: plotly is not installed.
    """
    from . import page

    kind = parse(estimate.system).kind
    if not page.write(profile("estimate", estimate, kind, None, {}), path):
        raise Error("The page needs plotly", got="no module plotly", fix=page.GET_PLOTLY)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a profile.

    Args:
        path: of the file, or of the directory that it lies in.

    Raises:
        Error: there is none, or it is of another form or version.
    """
    file = Path(path)
    file = file / NAME if file.is_dir() else file
    try:
        content = json.loads(archive.read_text(file))
    except (archive.InvalidFile, OSError, ValueError, RecursionError) as error:
        below = sorted(Path(path).glob(f"*/{NAME}"))
        fix = f"one of {', '.join(str(each.parent) for each in below)}" if below else _FIX
        raise Error("There is no profile to read", got=f"{file}: {error}", fix=fix) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        form = content.get("format") if isinstance(content, dict) else None
        raise Error("The profile has another form", got=f"{file}: format {form}", fix=_FIX)
    return content


_FIX = f"a {NAME} of version {FORMAT}, as options.enableProfiling(DIR) has one written"
