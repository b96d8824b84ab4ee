"""The last step before code: graphs take tensors of other strides than they were traced with."""

import pytest
import torch
from torch import fx

from poptorch.backends.prepare import accept_strides

aten = torch.ops.aten


@pytest.fixture
def flattening() -> fx.GraphModule:
    """Return a graph whose view makes one dimension of two."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.view.default, (x, [6])))
    return accept_strides(fx.GraphModule({}, graph))


def test_a_view_of_the_usual_strides_shares_memory(flattening: fx.GraphModule) -> None:
    rows = torch.arange(6.0).reshape(2, 3)

    flat = flattening(rows)

    assert torch.equal(flat, rows.reshape(6))
    assert flat.data_ptr() == rows.data_ptr()


def test_a_view_of_other_strides_is_one_of_a_copy(flattening: fx.GraphModule) -> None:
    columns = torch.arange(6.0).reshape(2, 3).t()  # no view of it has one dimension

    assert torch.equal(flattening(columns), columns.reshape(6))
