"""Every backend passes the suite that other packages can import."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

import poptorch
from helpers import programs
from helpers.cases import few
from helpers.wrapping import options
from poptorch import backends
from poptorch._ir import backend_names
from poptorch.backends import registry
from poptorch.testing import CONFORMANCE, allclose


@pytest.mark.parametrize("check", CONFORMANCE)
@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_interpreting_backends(backend: str, check: str) -> None:
    CONFORMANCE[check](backend)


@pytest.mark.slow
@pytest.mark.parametrize("check", few(CONFORMANCE, "loops"))
def test_inductor_as_it_ships(check: str, tmp_path: Path) -> None:
    """In a user's process, whose compiler conftest does not make quicker, with no code kept."""
    program = f"import poptorch.testing; poptorch.testing.CONFORMANCE[{check!r}]('inductor')"
    settings = programs.with_ours(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "code"))
    settings.pop("COMPILER_PATH", None)
    done = programs.run("-c", program, environment=settings)
    assert done.returncode == 0, done.stderr


class Broken:
    """A backend whose programs forget to update the weights."""

    name = "broken"

    def unavailable(self) -> str | None:
        return None

    def compile(self, plan, progress):
        inner = backends.available()["reference"].compile(plan, progress)

        class Forgetful:
            def run(self, state, batch):
                before = {key: value.clone() for key, value in state.tensors.items()}
                results = inner.run(state, batch)
                for key, value in before.items():
                    state.tensors[key].copy_(value)
                return results

            def report(self):
                return inner.report()

        return Forgetful()


@pytest.fixture
def with_broken(monkeypatch):
    point = EntryPoint("broken", f"{__name__}:Broken", "poptorch.backends")
    monkeypatch.setattr(backend_names, "others", lambda: EntryPoints([point]))
    registry.available.cache_clear()
    yield
    registry.available.cache_clear()


def test_the_suite_can_fail(with_broken) -> None:
    assert isinstance(backends.choose("broken"), backends.Backend)
    with pytest.raises(AssertionError):
        CONFORMANCE["one step"]("broken")


def test_the_environment_chooses_a_backend_unless_an_option_does(monkeypatch) -> None:
    for variable, option in (("inductor", "reference"), ("reference", "auto")):
        monkeypatch.setenv("POPTORCH_BACKEND", variable)
        model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options(option))
        model(torch.ones(1, 2))
        assert model._session.now.compiled.executable.report().backend == "reference"


@pytest.mark.parametrize("ref, other, same", [
    (torch.ones(2), torch.ones(2), True), (torch.ones(2), torch.zeros(2), False),
    ((torch.ones(2), [torch.ones(1)]), (torch.ones(2), [torch.ones(1)]), True),
    ((torch.ones(2),), (torch.ones(2), torch.ones(2)), False),
    ((torch.ones(2),), [torch.ones(2)], False), (torch.ones(2), 1, False),
])  # fmt: skip
def test_allclose(ref, other, same: bool) -> None:
    assert allclose(ref, other) is same
