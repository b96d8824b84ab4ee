"""What code depends on that is generated for the processor at hand."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch


@functools.cache
def _facts() -> dict[str, str]:
    """What Linux says of the first processor, by field; nothing elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def maker() -> str:
    """Return ``GenuineIntel``, ``AuthenticAMD`` or another; empty where it is not known."""
    return _facts().get("vendor_id", "")


def has_vectors() -> bool:
    """Tell whether this process runs vector instructions already, in ATen's own kernels.

    torch's compiler otherwise finds out with six compilations and six interpreters, one after
    another; ATen has asked the processor.
    """
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def instructions() -> str:
    """Name the processor by its maker and the instructions that it has: code uses all of them."""
    flags = _facts().get("flags") or _facts().get("Features", "")
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return " ".join((platform.machine(), maker(), capability, digest))
