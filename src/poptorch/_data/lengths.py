"""Choose a few lengths to which sequences are padded, if the user has not chosen any."""

from __future__ import annotations

_SHORTEST = 8


def next_size(length: int, longest: int | None = None) -> int:
    """Return the next of 8, 12, 16, 24, 32, 48, 64, 96 and so on: two for each power of two.

    Args:
        length: the length to round up.
        longest: a limit, which replaces larger sizes.
    """
    if length == 0:
        return 0
    size = _SHORTEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    if longest is not None and length <= longest:
        return min(size, longest)
    return size
