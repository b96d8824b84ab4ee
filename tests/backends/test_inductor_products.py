"""Products by either library: the same numbers, and the choice follows what was measured."""

from __future__ import annotations

import time

import pytest
import torch

from inductor_graphs import Tensors, check, graph
from poptorch.backends.inductor import products
from poptorch.backends.inductor.compiler import compile_graph
from poptorch.backends.inductor.products import onednn_is_faster


@pytest.fixture(autouse=True)
def _nothing_kept():
    """Torch keeps compiled graphs, whoever was chosen for them."""
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        yield


LARGE = ((64, 128), (128, 1)), ((128, 96), (96, 1))


def step(
    w: torch.Tensor, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """All layouts of a linear layer's products, with a bias and without."""
    everything = [
        torch.addmm(b, x, w.t()),  # forward
        g @ w,  # the input's gradient
        torch.addmm(g, x, w.t()),  # what is added is a matrix
        torch.addmm(b, x, w.t(), alpha=2.0),
        (x.t() @ g).t(),
        x[:, 3:40] @ w.t()[3:40].relu(),
        x[:, :1].expand(-1, 64) @ w.t()[:64],  # overlaps in memory
        torch.mm(x[0:0], w.t()),
    ]
    return everything, [w - 0.1 * (g.t() @ x)]


def examples() -> Tensors:
    shapes = [(96, 128), (64, 128), (64, 96), (96,)]
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("chosen", [False, True])
def test_both_libraries_compute_the_same(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    asked = []

    def choose(a: products.Matrix, b: products.Matrix, bias: bool) -> bool:
        asked.append((a, b, bias))
        return chosen and products._is_dense(a) and products._is_dense(b) and a[0][0] > 0

    monkeypatch.setattr(products, "onednn_is_faster", choose)
    check(step, examples())
    assert {bias for _, _, bias in asked} == {False, True}
    assert any(a[1][0] == 1 for a, _, _ in asked)
    assert any(b[1][0] == 1 for _, b, _ in asked)


@pytest.mark.parametrize("chosen", [False, True])
def test_the_chosen_library_is_called(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda *_: chosen)
    tensors = [torch.randn(32, 64), torch.randn(64, 16)]
    code = compile_graph(graph(lambda a, b: ([a @ b], []), tensors), tensors).kept
    assert code is not None
    assert (b"aoti_torch_cpu__linear_pointwise" in code) is chosen
    assert (b"aoti_torch_cpu_mm_out" in code) is not chosen


def test_the_choice_is_undone_for_torchs_own_users() -> None:
    from torch._inductor.lowering import lowerings

    before = dict(lowerings)
    with pytest.raises(KeyError), products.faster_library():
        assert lowerings[torch.ops.aten.mm.default] is not before[torch.ops.aten.mm.default]
        raise KeyError
    assert lowerings == before


def test_the_shorter_time_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, expected in [((1.0, 0.9), True), ((1.0, 0.99), False), ((1.0, 2.0), False)]:
        onednn_is_faster.cache_clear()
        monkeypatch.setattr(products, "_shortest", lambda ways, times=times: times)
        assert onednn_is_faster(*LARGE, False) is expected
    onednn_is_faster.cache_clear()


def test_both_are_tried_in_turn() -> None:
    calls = []
    ways = [lambda: (calls.append("slow"), time.sleep(0.01)), lambda: calls.append("fast")]
    slow, fast = products._shortest(ways)
    assert calls == ["slow", "fast"] * (len(calls) // 2)
    assert len(calls) >= 4
    assert slow >= 0.01 > fast


@pytest.mark.parametrize(
    "a,b",
    [
        (((4, 5), (5, 1)), ((5, 6), (6, 1))),  # small
        (((64, 128), (0, 1)), LARGE[1]),  # rows that lie on each other
        (((64, 128), (256, 2)), LARGE[1]),  # with gaps
    ],
)
def test_what_is_not_worth_trying(monkeypatch: pytest.MonkeyPatch, a, b) -> None:
    monkeypatch.setattr(products, "_shortest", lambda ways: pytest.fail("was tried"))
    assert not onednn_is_faster(a, b, False)


def test_a_real_trial_answers() -> None:
    onednn_is_faster.cache_clear()
    assert onednn_is_faster(*LARGE, True) in (False, True)
    assert onednn_is_faster.cache_info().misses == 1
