"""Build all kernels of a graph that Python calls, for example because of a host function, in one
library.

Torch compiles each kernel separately, and reads the headers for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from .._base import private

ENTRY = "kernel"
_WHOLE = re.compile(
    rf'(?P<includes>(?:\s*#include [^\n]*\n)*)\s*extern "C"\s+void\s+{ENTRY}\((?P<rest>.*)\Z',
    re.DOTALL,
)
# The first argument selects the kernel, and the others are read by the kernel's parameters.
_CALLING = """
#include <utility>
template <size_t... at, typename... T>
static void call(void (*kernel)(T...), PyObject* args, std::index_sequence<at...>) {{
    kernel(parse_arg<std::remove_const_t<T>>(args, at + 1)...);
}}
template <typename... T> static void call(void (*kernel)(T...), PyObject* args) {{
    call(kernel, args, std::index_sequence_for<T...>{{}});
}}
static void call(PyObject* args) {{
    switch (parse_arg<int64_t>(args, 0)) {{
{cases}
    }}
}}
"""


def together() -> Callable[..., Any]:
    """Return a collector for the kernels of one graph, which compiles them when the first one is
    needed.
    """
    waiting: list[str] = []
    libraries: list[Any] = []  # by number of the kernel

    def kernel(usual: Callable[..., Any], self: Any, argtypes: Any, source_code: str) -> Any:
        future = private.optional("LambdaFuture")
        threads = private.optional("get_compile_threads")
        parts = _WHOLE.fullmatch(source_code)
        if parts is None or future is None or threads is None or threads() <= 1:
            return usual(self, argtypes, source_code)
        number = len(libraries) + len(waiting)
        waiting.append(f"{parts['includes']}static void {ENTRY}_{number}({parts['rest']}")
        return future(lambda: functools.partial(entry_of(number), number))

    def entry_of(number: int) -> Any:
        if number >= len(libraries):
            library = _load(waiting, len(libraries))
            libraries.extend([library] * len(waiting))
            waiting.clear()
        return libraries[number]

    return kernel


def _load(sources: list[str], first: int) -> Any:
    cache = private.CppPythonBindingsCodeCache
    numbers = range(first, first + len(sources))
    cases = (f"    case {n}: call({ENTRY}_{n}, args); break;" for n in numbers)
    suffix = cache.suffix_template.format(
        arg_len="PyTuple_GET_SIZE(args)",  # each kernel has its own number of arguments
        call_entry_func="call(args); Py_RETURN_NONE;",
        entry_func=ENTRY,
        extra_parse_arg=_CALLING.format(cases="\n".join(cases)),
    )
    return getattr(cache.load_async("\n".join(sources) + suffix)(), ENTRY)
