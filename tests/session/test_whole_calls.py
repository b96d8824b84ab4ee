"""All or nothing: what a call that is refused, fails or is interrupted leaves on every backend."""

import copy
import os
import pkgutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import poptorch
import poptorch.testing
from helpers.cases import long
from helpers.closeness import near
from helpers.wrapping import Calling, Having, Regression, normal, options
from poptorch.backends import driver


class Labelled(torch.nn.Module):
    """Has statistics, random numbers, and an index that only the program itself knows."""

    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.layer = torch.nn.Linear(4, 3)
        self.aside = torch.nn.Parameter(torch.ones(2))
        self.computed = computed

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.dropout(self.layer(self.norm(x)), 0.2)
        if self.computed:
            y = (y * 2) // 2
        loss = torch.nn.functional.cross_entropy(scores, y) + self.aside.square().sum()
        return poptorch.identity_loss(loss, reduction="none")


class Trained:
    """A model that is trained with Adam, from seeds that are the same each time."""

    def __init__(self, backend: str, computed: bool = False, lanes: int = 0, **counts: int) -> None:
        torch.manual_seed(0)
        self.model = Labelled(computed)
        opts = options(**counts).backend(backend).randomSeed(3).lanes(lanes)
        self.optimizer = poptorch.optim.Adam(self.model.parameters(), lr=0.1)
        self.call = poptorch.trainingModel(self.model, opts, self.optimizer)

    def everything(self) -> dict[str, Any]:
        state = copy.deepcopy(self.optimizer.state_dict()["ipu_state"])
        random = torch.tensor(self.call.rng_state)
        return {**state, **copy.deepcopy(self.model.state_dict()), "random": random}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=draw), torch.randint(3, (rows,), generator=draw)


def after(updates: int, backend: str, lanes: int, computed: bool = False) -> dict[str, Any]:
    """The state of an undisturbed model after each number of updates."""
    undisturbed = Trained(backend, computed, lanes, accumulation=2)
    x, y = (part.chunk(3) for part in batch(24))
    for update in range(updates):
        undisturbed.call(x[update % 3], y[update % 3])
    return undisturbed.everything()


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_a_bad_label_changes_nothing(backend: str) -> None:
    trained = Trained(backend, iterations=2, accumulation=2)
    x, y = batch(16)
    trained.call(x, y)
    before = trained.everything()
    for bad in (3, -1, 1 << 40):
        wrong = y.clone()
        wrong[13] = bad
        message = rf'(?s)Index out of range.*input "y"\[13\] is {bad}; .*takes 0 to 2, or -100'
        with pytest.raises(poptorch.Error, match=message):
            trained.call(x, wrong)
    assert same(trained.everything(), before)
    y[13] = -100
    trained.call(x, y)
    assert not same(trained.everything(), before)


@pytest.mark.slow
@pytest.mark.parametrize("backend, lanes", [("reference", 1), ("staged", 0), long("optimise", 0)])
def test_an_index_that_nobody_could_check_leaves_whole_updates(backend: str, lanes: int) -> None:
    """The third of three updates fails, in its second micro-batch."""
    trained = Trained(backend, True, lanes, iterations=3, accumulation=2)
    x, y = batch(24)
    trained.call(x, y)
    whole, wrong = backend == "staged", y.clone()
    wrong[-1] = 3
    with pytest.raises((IndexError, RuntimeError)) as caught:
        trained.call(x, wrong)
    done = "before this call" if whole else "2 of the 3 updates of this call"
    assert any(done in note for note in caught.value.__notes__)
    if backend == "optimise":
        expected = after(5, "reference", lanes, computed=True)
        torch.testing.assert_close(trained.everything(), expected, **near(24, 5))
        return
    assert same(trained.everything(), after(3 if whole else 5, backend, lanes, computed=True))


class StoppedError(Exception):
    pass


def raising(signum: int, frame: object) -> None:
    raise StoppedError(signum)


@pytest.fixture
def handled() -> Iterator[Callable[..., Any]]:
    """Sets handlers of signals, for as long as a test lasts."""
    before: dict[int, Any] = {}

    def handle(signum: int, handler: Any) -> None:
        before.setdefault(signum, signal.signal(signum, handler))

    yield handle
    for signum, handler in before.items():
        signal.signal(signum, handler)


def sending(
    monkeypatch: pytest.MonkeyPatch, signum: int, expected_values: Callable[..., Any]
) -> None:
    """Send a signal after those runs of a graph, counted from 1, that are wanted."""
    runs: list[object] = []
    original = driver._PreparedRun.__call__

    def interrupted(self: Any, *where: Any) -> Any:
        results = original(self, *where)
        runs.append(where)
        if expected_values(len(runs)):
            os.kill(os.getpid(), signum)
        return results

    monkeypatch.setattr(driver._PreparedRun, "__call__", interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "lanes"), [(signal.SIGALRM, 0), (signal.SIGINT, 1)])
def test_an_exception_of_a_handler_waits_for_a_consistent_state(
    signum: signal.Signals, lanes: int, monkeypatch: pytest.MonkeyPatch, handled: Any
) -> None:
    handled(signum, raising)
    trained = Trained("reference", lanes=lanes, iterations=3, accumulation=2)
    x, y = batch(24)
    trained.call(x, y)
    expected = after(4, "reference", lanes)
    sending(monkeypatch, signum, lambda run: run == (4 if lanes else 1))
    with pytest.raises(StoppedError) as caught:
        trained.call(x, y)
    assert any("1 of the 3 updates" in note for note in caught.value.__notes__)
    assert same(trained.everything(), expected)
    assert signal.getsignal(signum) is raising
    monkeypatch.undo()
    trained.call(x, y)


def test_handlers_that_do_not_raise_run_and_may_choose_another(
    monkeypatch: pytest.MonkeyPatch, handled: Callable[..., Any]
) -> None:
    seen = []

    def first(signum: int, frame: object) -> None:
        seen.append("first")
        signal.signal(signal.SIGUSR1, second)

    def second(signum: int, frame: object) -> None:
        seen.append("second")

    wrapper = poptorch.inferenceModel(torch.nn.Linear(2, 2), options(iterations=3).lanes(1))
    wrapper(torch.ones(3, 2))
    handled(signal.SIGUSR1, first)
    sending(monkeypatch, signal.SIGUSR1, lambda run: True)
    wrapper(torch.ones(3, 2))
    assert seen[0] == "first"
    assert signal.getsignal(signal.SIGUSR1) is second
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen[-1] == "second"


def test_an_exception_of_a_handler_while_changes_are_checked_is_not_a_change(
    monkeypatch: pytest.MonkeyPatch, handled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    last, armed = pkgutil.resolve_name("poptorch._base.seeding.last"), list[int]()

    def interrupted_read() -> Any:
        if armed:
            os.kill(os.getpid(), armed.pop())
        return last()

    monkeypatch.setattr("poptorch._base.seeding.last", interrupted_read)
    monkeypatch.setattr("poptorch._session.host_changes.periodic_checks.CHECK_EVERY", 0.0)
    executor = poptorch.inferenceModel(torch.nn.Sequential(torch.nn.Dropout()), options())
    executor.train()
    executor(X)
    handled(signal.SIGUSR1, raising)
    armed.append(signal.SIGUSR1)
    with pytest.raises(StoppedError):
        executor(X)
    executor(X)
    assert "does not follow" not in caplog.text


def test_a_handler_may_raise_anywhere_in_a_call_like_the_last_one(
    handled: Callable[..., Any],
) -> None:
    model, x = torch.nn.Linear(64, 4).eval(), normal(3, 64)
    torch.set_num_threads(2)
    executor = poptorch.inferenceModel(model, options())
    expected = executor(x)
    handled(signal.SIGALRM, raising)
    for number in range(100):
        with pytest.raises(StoppedError):
            signal.setitimer(signal.ITIMER_REAL, 5e-6 + number * 3e-6)
            while True:
                executor(x)
        assert torch.get_num_threads() == 2
        assert torch.is_grad_enabled()
        assert torch.equal(executor(x), expected)


def test_ctrl_c_while_compiling() -> None:
    presses = [signal.SIGINT]

    class Interrupting(Labelled):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if presses and poptorch.isRunningOnIpu():
                os.kill(os.getpid(), presses.pop())
            return super().forward(x, y)

    model = Interrupting()
    before, training = model.layer.weight.clone(), poptorch.trainingModel(model, options())
    with pytest.raises(KeyboardInterrupt):
        training(*batch(8))
    assert not training.isCompiled()
    assert torch.equal(model.layer.weight, before)
    assert torch.isfinite(training(*batch(8)))


X, Y = normal(8, 4), normal(8, 4, seed=1)


def no_answer() -> poptorch.RecoverableError:
    return poptorch.RecoverableError(
        "no answer",
        recovery_action="IPU_RESET",
        type="poplar_recoverable_runtime_error",
        location="[0] running\n[1] calling",
    )


REPORT = (
    "'poplar_recoverable_runtime_error': no answer\n"
    "Recovery action required: IPU_RESET\nError raised in:\n[0] running\n[1] calling"
)


def wrapped(
    make: type,
    state: Any,
) -> Any:
    model = Regression(4, 4)
    optimizer = make(model.parameters(), lr=0.1)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    return model, optimizer, poptorch.trainingModel(model, options(), optimizer)


@pytest.mark.spec("runtime", 27)
@pytest.mark.parametrize(
    "make, place",
    [
        (poptorch.optim.Adam, "compile"),
        (torch.optim.Adam, "attach"),
        (torch.optim.Adam, "run"),
        (poptorch.optim.Adam, "run"),
    ],
)
def test_a_first_call_that_fails_has_not_happened(make: type, place: str) -> None:
    model, optimizer, wrapper = wrapped(make, None)
    wrapper(X, Y)
    kept, losses = copy.deepcopy((model.state_dict(), optimizer.state_dict())), []
    for fails in (False, True):
        model, optimizer, wrapper = wrapped(make, kept)
        before = copy.deepcopy(optimizer.state_dict())
        if fails:
            fault = poptorch.testing.injected_fault(place, no_answer())
            with fault, pytest.raises(poptorch.RecoverableError) as caught:
                wrapper(X[:2], Y[:2])
            assert str(caught.value) == REPORT
            assert caught.value.recovery_action == "IPU_RESET"
            assert caught.value.type == "poplar_recoverable_runtime_error"
            assert not wrapper.isCompiled()
            assert not wrapper.isAttachedToDevice()
            torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
            torch.testing.assert_close(model.state_dict(), kept[0], rtol=0, atol=0)
        losses.append([wrapper(X, Y).item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_later_calls_that_fail_keep_the_program() -> None:
    wrapper = poptorch.inferenceModel(torch.nn.Linear(4, 4), options())
    expected, fault = wrapper(X), poptorch.testing.injected_fault("run", ValueError("x"))
    with fault, pytest.raises(ValueError, match="x"):
        wrapper(X)
    with pytest.raises(ValueError, match="Unknown step"):
        poptorch.testing.injected_fault("lunch", no_answer())
    with pytest.raises(poptorch.Error) as plain:
        wrapper(X[:, :3])
    assert plain.value.location == ""
    assert "Error raised in" not in str(plain.value)
    assert wrapper.isCompiled()
    assert torch.equal(wrapper(X), expected)


def test_a_first_call_under_inference_mode_is_one_of_many() -> None:
    models = [torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)]
    wrapper = poptorch.inferenceModel(models[0], options())
    with torch.inference_mode():
        assert torch.equal(wrapper(X), models[1](X))
    assert torch.equal(wrapper(Y), models[1](Y))
    wrapper.copyWeightsToHost()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)
    wrapper.copyWeightsToDevice()
    assert torch.equal(wrapper(X), models[1](X))


def _without_storage(x: torch.Tensor, size: int) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(size)
    return x


KINDS = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "functional": torch._to_functional_tensor,
    "uninitialized": lambda x: torch.nn.UninitializedParameter(),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "no storage": lambda x: _without_storage(x, 0),
    "small storage": lambda x: _without_storage(x, 16),
}


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_no_program_can_read_are_refused() -> None:
    wrapper = poptorch.inferenceModel(torch.nn.Linear(4, 4), options())
    for first in (True, False):
        for kind, make in KINDS.items():
            if kind == "small storage" and not first:  # asking for it takes 0.3 us
                continue
            with pytest.raises(poptorch.Error, match="Unsupported tensor input type") as caught:
                wrapper(make(X))
            for part in ('input "input" is', "Where:", "Fix:"):
                assert part in str(caught.value)
        assert wrapper(X).shape == X.shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["reference", long("optimise")])
def test_memory_formats_are_taken_as_eager_torch_takes_them(backend: str) -> None:
    model = Having(lambda m, x: torch.tanh(x).flatten(1) @ m.weight, weight=normal(36, 3))
    images = normal(4, 1, 6, 6)
    wrapper = poptorch.inferenceModel(model, options().backend(backend))
    forms = [
        images,
        images.contiguous(memory_format=torch.channels_last),  # calls itself contiguous
        images.expand(4, 1, 6, 6).transpose(2, 3),
        torch.complex(images, -images).conj().imag,
        images.double().float(),
        images[:, :, :, :].as_strided((4, 1, 6, 6), (36, 7, 6, 1)),
    ]
    for first in (forms[1], forms[3]) if backend == "reference" else ():
        rewrapped = poptorch.inferenceModel(model, options().backend(backend))
        torch.testing.assert_close(rewrapped(first), model(first))
    for form in forms:
        torch.testing.assert_close(wrapper(form), model(form))


def test_cyclic_and_very_deep_containers_are_refused() -> None:
    wrapper = poptorch.inferenceModel(torch.nn.Identity(), options())
    cycle: list[object] = [X]
    cycle.append(cycle)
    by_name: dict[str, object] = {"x": X}
    by_name["self"] = by_name
    deep: object = X
    for _ in range(3000):
        deep = [deep]
    for value in (cycle, by_name, deep):
        with pytest.raises(poptorch.Error, match="nested too deeply"):
            wrapper(value)
    assert torch.equal(wrapper(X), X)


def test_a_keyword_argument_named_self_is_refused() -> None:
    wrapper = poptorch.inferenceModel(Calling(lambda *xs, **kw: sum(xs)), options())
    for call in (wrapper, wrapper.compile, wrapper.explain):
        with pytest.raises(poptorch.Error, match="'self' is not a valid parameter"):
            call(X, self=X)
    assert torch.equal(wrapper(X), X)


@pytest.mark.parametrize("iterations", [1, 2])  # one: a call like the last one
def test_indices_that_are_checked_are_those_that_are_read(iterations: int) -> None:
    def forward(model: Having, at: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        ordered = model.rows(model.order).sum() * 0
        return model.rows(at.long()[:, None])[:, 0] + free[:, None] + ordered

    model = Having(forward, rows=torch.nn.Embedding(6, 2), order=torch.arange(6))
    wrapper = poptorch.inferenceModel(model, options(iterations=iterations))
    at, free = torch.tensor([0, 5, 1, 2]), torch.tensor([99, -7, 3, 1000])
    wrapper(at, free)
    with pytest.raises(poptorch.Error, match=r"\[1\] is 6; embedding takes 0 to 5") as caught:
        wrapper(at + torch.tensor([0, 1, 0, 0]), free)
    assert caught.value.__cause__ is None, "nothing ran"
    own = options(iterations=iterations)
    own.Precision.checkIndices(False)
    with pytest.raises(IndexError):
        poptorch.inferenceModel(model, own)(at + 1, free)
