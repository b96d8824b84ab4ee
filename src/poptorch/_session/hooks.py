"""Register functions that are called around every compilation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

from torch.utils.hooks import RemovableHandle

from .._base.errors import StateError

CompileHook = Callable[[], object]
_pre: OrderedDict[int, CompileHook] = OrderedDict()
_post: OrderedDict[int, CompileHook] = OrderedDict()


def register_pre_compile(hook: CompileHook) -> RemovableHandle:
    """Call ``hook()`` before each capture of ``forward``, in the order of registration.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        RuntimeError: the hook is not callable.
    """
    return _register(hook, _pre)


def register_post_compile(hook: CompileHook) -> RemovableHandle:
    """Call ``hook()`` after each capture of ``forward``, even if the capture failed.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        RuntimeError: the hook is not callable.
    """
    return _register(hook, _post)


def _register(hook: CompileHook, hooks: OrderedDict[int, CompileHook]) -> RemovableHandle:
    if not callable(hook):
        raise StateError(
            "A compile hook must be callable",
            got=type(hook).__name__,
            fix="pass a function without parameters",
        )
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextlib.contextmanager
def around() -> Iterator[None]:
    for hook in list(_pre.values()):
        hook()
    try:
        yield
    finally:
        for hook in list(_post.values()):
            hook()
