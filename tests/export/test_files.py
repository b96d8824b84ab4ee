"""Exported files: torch compiles them, and programs that torch cannot run are refused."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

import poptorch
from helpers import exported
from helpers.exported_programs import Looped, Printing
from helpers.wrapping import Regression, options


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compiles_an_exported_step(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = Regression(), tmp_path / "step.py"
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.randn(4, 4), torch.randn(4, 2)
    executor.compile(*batch)
    executor.export(file)
    module = exported.loaded(file)
    monkeypatch.setitem(sys.modules, "step", module)  # where torch's compiler looks for it
    (eager, _), (compiled, _) = (module.load(file.with_suffix(".safetensors")) for _ in range(2))

    step = torch.compile(module.step, backend=backend)

    for _ in range(3):
        torch.testing.assert_close(step(*compiled, *batch), module.step(*eager, *batch))
    torch.testing.assert_close(compiled, eager)


with_another_operator = pytest.mark.parametrize(
    "model, operator", [(Printing, "print_tensor"), (Looped, "while_loop")]
)


@with_another_operator
def test_an_operator_that_torch_does_not_have_is_refused_at_the_users_line(
    model: type[torch.nn.Module], operator: str, tmp_path: Path
) -> None:
    executor = poptorch.inferenceModel(model(), options())
    executor.compile(torch.ones(2))

    with pytest.raises(poptorch.Error, match=operator) as refused:
        executor.export(tmp_path / "step.py")

    last_line_of_model = " ".join(inspect.getsource(model).splitlines()[-1].split())
    assert last_line_of_model in refused.value.message


@with_another_operator
def test_a_refused_export_writes_nothing(
    model: type[torch.nn.Module], operator: str, tmp_path: Path
) -> None:
    executor = poptorch.inferenceModel(model(), options())
    executor.compile(torch.ones(2))

    with pytest.raises(poptorch.Error, match=operator):
        executor.export(tmp_path / "step.py")

    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_not_compiled_is_refused(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(Printing(), options())

    with pytest.raises(poptorch.Error, match="has not been compiled"):
        executor.export(tmp_path / "step.py")

    assert list(tmp_path.iterdir()) == []
