"""Replace half precision by float32 in scripts that train.

PopTorch's optimizers scale the loss and keep moments in float32, so a model can be trained after
``model.half()``. Torch's optimizers do neither, and the same script would end in NaN.
``torch.amp.GradScaler`` does not help, because it refuses weights in half precision.
"""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

from .scripts import Script

TODO = (
    "float32 replaces half precision, which torch's optimizers do not train. To train in"
    " half precision, use torch.amp.autocast with torch.amp.GradScaler"
)
_HALF = ("torch.half", "torch.float16")


def in_float32(script: Script) -> str:
    """Return the text of the script, with float32 instead of half types if it trains."""
    if not any(name == "poptorch.trainingModel" for _, name in script.uses()):
        return script.module.code
    new: Any = script.module.visit(_Widening(script))
    return str(new.code)


class _Widening(cst.CSTTransformer):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._changed: list[bool] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            self._changed.append(False)
        return super().on_visit(node)

    def on_leave(self, original: Any, updated: Any) -> Any:
        result: Any = super().on_leave(original, updated)
        if not isinstance(original, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            return result
        if not self._changed.pop():
            return result
        if isinstance(self._script.parents[original], cst.If) and isinstance(original, cst.If):
            self._changed[-1] = True  # no line can be inserted above an ``elif``
            return result
        above = [*result.leading_lines, cst.EmptyLine(comment=cst.Comment(f"# TODO: {TODO}"))]
        return result.with_changes(leading_lines=above)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        parent: Any = self._script.parents[original_node]
        called = isinstance(parent, cst.Call) and parent.func is original_node
        if called and not parent.args and m.matches(original_node.attr, m.Name("half")):
            self._changed[-1] = True
            return updated_node.with_changes(attr=cst.Name("float"))
        if not called and self._script.plain(original_node) in _HALF:
            self._changed[-1] = True
            return cst.parse_expression("torch.float32")
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        """Rewrite ``float16`` in ``from torch import float16``."""
        holder = self._script.parents[original_node]
        written = isinstance(holder, (cst.Attribute, cst.ImportAlias, cst.AsName))
        if written or self._script.plain(original_node) not in _HALF:
            return updated_node
        self._changed[-1] = True
        return cst.parse_expression("torch.float32")
