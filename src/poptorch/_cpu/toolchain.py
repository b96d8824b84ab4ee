"""Describe the C++ compiler, and the processor for which code is generated."""

from __future__ import annotations

import functools
import hashlib
import platform
import shutil
import sysconfig
from pathlib import Path

import torch

from .._base import env, log, private
from .._base.errors import Error
from .._base.folders import temporary

_SHOWN = 5  # lines of a C++ compiler's error output


def obstacle() -> str | None:
    compiler = env.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}: install it, or set CXX to another one"
    cache = env.get("TORCHINDUCTOR_CACHE_DIR") or temporary() or ""
    used = cache, str(Path(torch.__file__).parent), sysconfig.get_config_var("LIBDIR") or ""
    folder = next((path for path in used if any(sign.isspace() for sign in path)), None)
    if folder is not None:
        return f"torch cannot pass paths with spaces to the C++ compiler, such as {folder!r}"
    return None


def explained(error: Exception) -> Error | None:
    cause = getattr(error, "inner_exception", error)
    kind = private.optional("CppCompileError")
    if kind is None or not isinstance(cause, kind):
        return None
    log.engine.debug("%s", cause)
    lines = cause.output.strip().splitlines()
    complaints = [text for text in lines if "error" in text.lower()] or lines[-_SHOWN:]
    return Error(
        "The C++ compiler failed",
        got="\n".join(complaints[:_SHOWN]),
        where=f"{cause.cmd[0]} failed on code that torch generated",
        fix=(
            "run poptorch doctor, which checks the compiler, the disk space and the memory",
            'or run the model without compiled code: options.backend("reference")',
        ),
    )


@functools.cache
def _facts() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def processor() -> str:
    """Return the model name of the processor; empty if it is not known."""
    names = ("model name", "cpu family", "model", "stepping")
    return " ".join(_facts().get(name, "") for name in names).strip()


def has_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def instructions() -> str:
    """Return the instruction sets that the processor has and torch may use. Code uses all
    of them.
    """
    flags = _facts().get("flags") or _facts().get("Features", "")
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return " ".join((platform.machine(), capability, digest))
