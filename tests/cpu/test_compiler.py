"""A graph is also compiled if a shortcut fails, and if the environment variable CI is set."""

from pathlib import Path

import pytest
import torch
import torch._inductor.config
import torch._inductor.graph
from torch._inductor import lowering

import poptorch
from helpers.wrapping import normal, options
from poptorch._base import private
from poptorch._compile import cache, tiers
from poptorch._cpu import compiler

pytestmark = pytest.mark.slow


@pytest.fixture
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No core is idle for another process, and no compiled code is cached."""
    monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("in_this_process")
def test_code_is_compiled_without_a_shortcut_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt does not use the shortcut, regardless of the reason of the failure."""
    attempts: list[object] = []

    def broken(graph: object) -> None:
        attempts.append(graph)
        raise AttributeError("torch has changed")

    monkeypatch.setattr(compiler, "choose_library", broken)
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.GELU()), normal(3, 4)
    model = poptorch.inferenceModel(net, options().backend("optimise"))

    # By itself, torch compiles headers in advance and tries instructions, which takes nine seconds.
    without = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
    with torch._inductor.config.patch(without):
        found = model(x)

    torch.testing.assert_close(found, net(x))
    assert model._executable.report().backend == "inductor"
    assert len(attempts) == 1


def test_operators_with_a_decomposition_are_left_to_eager_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If ``CI`` is set, torch's own function raises an error for such an operator."""
    monkeypatch.setenv("CI", "true")
    operator = torch.ops.aten.upsample_bilinear2d.default
    monkeypatch.delitem(lowering.lowerings, operator, raising=False)

    with private.replacing({"make_fallback": compiler._leave_to_eager}):
        torch._inductor.graph.make_fallback(operator)

    assert operator in lowering.lowerings


@pytest.mark.larger(
    "test_operators_with_a_decomposition_are_left_to_eager_in_continuous_integration"
)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.usefixtures("in_this_process")
def test_code_is_compiled_in_continuous_integration(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's compiler has no code for this interpolation, and calls eager's kernel."""
    monkeypatch.setenv("CI", "true")
    net = torch.nn.Upsample(scale_factor=1.5, mode=mode)
    model = poptorch.inferenceModel(net, options().backend("optimise"))
    x = normal(1, 2, 4, 6)

    found = model(x)

    torch.testing.assert_close(found, net(x))
    assert model._executable.report().backend == "inductor"
