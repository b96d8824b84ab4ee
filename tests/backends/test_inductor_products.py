"""Products by either library: the same numbers, and a rule for which."""

import itertools

import pytest
import torch

from helpers.cases import few
from helpers.inductor_graphs import Tensors, check
from poptorch.backends.inductor import products, toolchain

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_kept():
    """Torch keeps compiled graphs, whoever was chosen for them."""
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        yield


def step(w, x, g, b) -> tuple[Tensors, Tensors]:
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


@pytest.mark.parametrize("chosen", few([False, True], True))
def test_both_libraries_compute_the_same(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    from torch._inductor.lowering import lowerings

    asked = []
    torchs = {op: how for op, how in lowerings.items() if "poptorch" not in str(op)}

    def choose(a: products.Matrix, b: products.Matrix) -> bool:
        asked.append((a, b))
        return chosen and products._is_dense(a) and products._is_dense(b) and all(a[0])

    monkeypatch.setattr(products, "onednn_is_faster", choose)
    check(step, examples())
    assert any(a[1][0] == 1 for a, _ in asked)
    assert any(b[1][0] == 1 for _, b in asked)
    assert {op: how for op, how in lowerings.items() if "poptorch" not in str(op)} == torchs


@pytest.mark.parametrize("a,b,expected", [
    (((512, 256), (256, 1)), ((256, 1024), (1, 256)), True),  # a forward pass
    (((512, 1024), (1024, 1)), ((1024, 256), (256, 1)), True),  # an input's gradient
    (((1024, 512), (1, 1024)), ((512, 256), (256, 1)), False),  # a weight's gradient
    (((2, 1024), (1024, 1)), ((1024, 1024), (1, 1024)), False),  # few rows
    (((512, 256), (0, 1)), ((256, 1024), (1, 256)), False),  # rows that lie on each other
    (((512, 256), (512, 2)), ((256, 1024), (1, 256)), False),  # with gaps
    (((512, 256), (256, 1)), ((256, 1024), (1, 0)), False),
])  # fmt: skip
def test_sizes_and_layouts_decide(monkeypatch: pytest.MonkeyPatch, a, b, expected: bool) -> None:
    monkeypatch.setattr(products, "_suits_processor", lambda: True)
    assert products.onednn_is_faster(a, b) is expected
    monkeypatch.setattr(products, "_suits_processor", lambda: False)
    assert not products.onednn_is_faster(a, b)


def test_code_for_one_processor_is_not_used_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    processors = [("A", "fma avx2"), ("B", "fma avx2"), ("A", "fma"), ("", "")]
    capabilities = ("DEFAULT", "AVX2", "AVX512")  # which ATEN_CPU_CAPABILITY can choose, too
    for (vendor, flags), capability in itertools.product(processors, capabilities):
        facts = {"vendor_id": vendor, "flags": flags}
        monkeypatch.setattr(toolchain, "_facts", lambda facts=facts: facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        names.add(toolchain.instructions())
    assert len(names) == 4 * 3
