"""Build one library from the pieces of a graph, with C++ code that calls each piece n times."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._base import private
from .repeated_layers import Argument, PieceChain

_INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
_PREFIX = re.compile(r"^(?=#include <torch/csrc/inductor/cpp_prefix.h>)", re.MULTILINE)
_KERNEL = re.compile(r"\bcpp_fused_\w+(?=\()")

# Handles are numbers of values. A call releases those that are no longer needed.
_CALLING = """
struct Piece {{
    void (*run)(AtenTensorHandle*, AtenTensorHandle*);
    int inputs, outputs;
}};
static const Piece pieces[] = {{{pieces}}};
// Of each call: its piece; of each input its value, place in views or -1, and whether this is the
// last use; of each output its value or -1. Then results, like inputs.
static const int calls[] = {{{calls}}};

static int64_t size_of(AtenTensorHandle value, int dim) {{
    int64_t* sizes;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(value, &sizes));
    return sizes[dim];
}}

static AtenTensorHandle take(
    std::vector<RAIIAtenTensorHandle>& values, const int64_t* views, const int*& at) {{
    RAIIAtenTensorHandle& value = values[at[0]];
    AtenTensorHandle handle;
    if (at[1] >= 0) {{
        const int64_t* view = views + at[1];  // offset, rank, sizes, strides
        int64_t offset = view[0];
        if (offset < 0) {{  // from where the value begins, maybe within another
            int64_t begin;
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(value, &begin));
            offset = begin - 1 - offset;
        }}
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
            value, view[1], view + 2, view + 2 + view[1], offset, &handle));
        if (at[2]) value.reset();
    }} else if (at[2]) {{
        handle = value.release();
    }} else {{
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(value, &handle));
    }}
    at += 3;
    return handle;
}}

void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {{
    std::vector<RAIIAtenTensorHandle> values({slots});
    std::vector<AtenTensorHandle> given({widest}), made({widest});
    for (int n = 0; n < {inputs}; n++) values[n] = RAIIAtenTensorHandle(input_handles[n]);
    {sizes}
    const int64_t views[] = {{{views}}};
    const int* at = calls;
    for (int call = 0; call < {count}; call++) {{
        const Piece& piece = pieces[*at++];
        for (int n = 0; n < piece.inputs; n++) given[n] = take(values, views, at);
        piece.run(given.data(), made.data());
        for (int n = 0; n < piece.outputs; n++, at++) {{
            RAIIAtenTensorHandle value(made[n]);
            if (*at >= 0) values[*at] = std::move(value);
        }}
        if (PyErr_Occurred()) return;
    }}
    for (int n = 0; n < {results}; n++) output_handles[n] = take(values, views, at);
}}
"""


@dataclass(frozen=True)
class PieceSource:
    """The C++ code that torch's compiler writes for a graph."""

    main: str  # the code that allocates and calls kernels
    kernels: str


def unbuilt(handles: Any) -> Any:
    """Replace the entry of a graph that is not built separately."""


def collecting(sources: list[PieceSource]) -> Callable[..., Any]:
    """Return a function that receives a graph's source instead of building and loading it."""

    def load(usual: Callable[..., Any], argtypes: Any, main_code: str, **rest: Any) -> Any:
        sources.append(PieceSource(main_code, rest["kernel_code"] or ""))
        return lambda: unbuilt

    return load


def load(chain: PieceChain, sources: Sequence[PieceSource]) -> Any:
    main, kernels = joined(chain, sources)
    return private.load_pybinding_async(
        argtypes=["std::vector<AtenTensorHandle>"],
        main_code=main,
        device_type="cpu",
        needs_vec_isa=False,
        kernel_needs_vec_isa=True,
        num_outputs=len(chain.results),
        kernel_code=kernels,
    )()


def joined(chain: PieceChain, sources: Sequence[PieceSource]) -> tuple[str, str]:
    """Return a source that calls kernels, and one with all kernels, without duplicates."""
    includes: dict[str, None] = {}
    mains: list[str] = []
    kernels: dict[str, str] = {}  # kernel texts, with different names for each
    for number, source in enumerate(sources):
        main = source.main
        for text in _PREFIX.split(source.kernels)[1:]:
            name = _KERNEL.findall(text)[0]
            common = kernels.setdefault(
                text.replace(f"{name}(", "kernel("), f"kernel_{len(kernels)}"
            )
            main = re.sub(rf"\b{name}\(", f"{common}(", main)
        includes |= dict.fromkeys(_INCLUDE.findall(main))
        mains.append(f"namespace piece_{number} {{\n{_INCLUDE.sub('', main)}\n}}")
    texts = (text.replace("kernel(", f"{name}(", 1) for text, name in kernels.items())
    return "\n".join([*includes, *mains, _calling(chain)]), "".join(texts)


def _calling(chain: PieceChain) -> str:
    last = _last_uses(chain)
    views: list[Any] = []
    place: dict[Any, int] = {}

    def taken(parts: Sequence[Argument], call: int) -> list[int]:
        numbers = []
        for at, part in enumerate(parts):
            if part.view is not None and part.view not in place:
                sizes, strides, offset = part.view
                place[part.view] = len(views)
                views.extend((offset, len(sizes), *sizes, *strides))
            view = -1 if part.view is None else place[part.view]
            numbers += [part.slot, view, int(last[part.slot] == (call, at))]
        return numbers

    calls: list[int] = []
    for at, call in enumerate(chain.calls):
        outputs = (slot if slot in last else -1 for slot in call.outputs)
        calls += [call.piece, *taken(call.inputs, at), *outputs]
    calls += taken(chain.results, len(chain.calls))
    sizes = (
        f"const int64_t {name} = size_of(values[{slot}], {dim});"
        for name, (slot, dim) in chain.sizes.items()
    )
    counts = {call.piece: (len(call.inputs), len(call.outputs)) for call in chain.calls}
    rows = (f"{{piece_{n}::inductor_entry_impl, {i}, {o}}}" for n, (i, o) in counts.items())
    return _CALLING.format(
        pieces=", ".join(rows),
        views=", ".join(map(_number, views or [0])),
        calls=", ".join(map(str, calls)),
        sizes="\n    ".join(sizes),
        slots=chain.slots,
        widest=max(itertools.chain(*counts.values())),
        inputs=chain.inputs,
        count=len(chain.calls),
        results=len(chain.results),
    )


def _number(size: Any) -> str:
    """Return a number, or a sum or product of sizes, as C++ code."""
    if isinstance(size, int) or size.is_Integer or size.is_Symbol:
        return str(size)
    if size.is_Pow and size.exp.is_Integer and size.exp > 0:
        return "*".join([_number(size.base)] * int(size.exp))
    if not (size.is_Add or size.is_Mul):
        raise NotImplementedError(f"a view with the size {size}")
    return f"({(' + ' if size.is_Add else '*').join(map(_number, size.args))})"


def _last_uses(chain: PieceChain) -> dict[int, tuple[int, int]]:
    """Return for each slot the call, and its input, that needs a value last."""
    uses = [*(call.inputs for call in chain.calls), chain.results]
    return {
        part.slot: (call, at) for call, parts in enumerate(uses) for at, part in enumerate(parts)
    }
