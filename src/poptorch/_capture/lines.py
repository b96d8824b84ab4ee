"""Which of the user's lines the nodes of a graph come from, noted while it is traced."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import fx

from .._base import private
from .._base.source import is_user_file


def noting_lines() -> contextlib.AbstractContextManager[None]:
    """Within the block nodes that this thread makes note where in a ``forward`` of the user's."""
    thread, stacks = threading.get_ident(), _Stacks()

    def create_node(
        usual: Callable[..., fx.Node],
        self: Any,
        kind: Any,
        target: Any,
        args: Any,
        kwargs: Any,
        name: Any = None,
        type_expr: Any = None,
    ) -> fx.Node:
        node = usual(self, kind, target, args, kwargs, name, type_expr)
        if not node.stack_trace and threading.get_ident() == thread:
            node.stack_trace = stacks.text(sys._getframe(1))
        return node

    return private.standing_in({"create_node": create_node})


class _Stacks:
    """The text that torch gives a stack, with the user's ``forward`` frames only."""

    def __init__(self) -> None:
        self._of_user: dict[str, bool] = {}
        self._texts: dict[tuple[tuple[str, int], ...], str] = {}

    def text(self, frame: FrameType | None) -> str | None:
        """Return the text for the stack above a frame, None where the user has no part in it."""
        places = []
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and self._is_users(code.co_filename):
                places.append((code.co_filename, frame.f_lineno))
            frame = frame.f_back
        if not places:
            return None
        key = tuple(reversed(places))
        if key not in self._texts:
            frames = [traceback.FrameSummary(*place, "forward") for place in key]
            self._texts[key] = "".join(traceback.format_list(frames)).strip()
        return self._texts[key]

    def _is_users(self, filename: str) -> bool:
        known = self._of_user.get(filename)
        if known is None:
            known = self._of_user[filename] = is_user_file(filename)
        return known
