"""What torch's code generator needs of the machine, and what it says when that fails."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import torch

from ..._base import env, log, private
from ..._base.errors import Error
from ..._base.folders import temporary

_SHOWN = 5  # lines of a C++ compiler's complaint


def obstacle() -> str | None:
    """Return why nothing can be compiled here; None if nothing is known to be in the way."""
    compiler = env.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}: install it, or name another in CXX"
    folder = next((path for path in _folders() if any(sign.isspace() for sign in path)), None)
    if folder is not None:
        return f"torch gives its C++ compiler no paths with spaces, as in {folder!r}"
    return None


def _folders() -> tuple[str, ...]:
    cache = env.get("TORCHINDUCTOR_CACHE_DIR") or temporary() or ""
    torch_itself = Path(torch.__file__).parent
    return cache, str(torch_itself), sysconfig.get_config_var("LIBDIR") or ""


def explained(error: Exception) -> Error | None:
    """Return what to raise in the place of a C++ compiler's complaint; None for other errors."""
    cause = getattr(error, "inner_exception", error)
    if not isinstance(cause, private.CppCompileError):
        return None
    log.engine.debug("%s", cause)
    lines = cause.output.strip().splitlines()
    complaints = [text for text in lines if "error" in text.lower()] or lines[-_SHOWN:]
    return Error(
        "The C++ compiler failed",
        got="\n".join(complaints[:_SHOWN]),
        where=f"code that torch generated, compiled by {cause.cmd[0]}",
        fix=(
            "see whether the compiler, its disk space and its memory are in order",
            'options.backend("reference") runs the model without compiled code',
        ),
    )
