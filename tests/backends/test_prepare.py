"""The last step before code."""

import torch
from torch import fx

from poptorch.backends.prepare import accept_strides

aten = torch.ops.aten


def test_views_take_tensors_of_other_strides_than_those_they_were_traced_on():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.view.default, (x, [6])))
    module = accept_strides(fx.GraphModule({}, graph))
    rows = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(module(rows), rows.reshape(6))
    assert module(rows).data_ptr() == rows.data_ptr()
    columns = rows.t()  # no view of it has one dimension
    assert torch.equal(module(columns), columns.reshape(6))
