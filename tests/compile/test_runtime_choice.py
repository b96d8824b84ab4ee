"""ONNX Runtime takes over inference if it is faster; what it may not change, and what is kept."""

import gc
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.folded import Mixed, check_new_weights, same
from helpers.patience import eventually
from helpers.wrapping import Having, normal, options, training
from poptorch._compile import cache, runtime_choice
from poptorch._ir.program import State
from poptorch.backends import onnx_runtime

pytestmark = pytest.mark.slow
EXPORT = runtime_choice.OnnxProgram.export
LAST = torch.tensor([4])
ALWAYS, NEVER = float("inf"), 0.0


@pytest.fixture(scope="module")
def code_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled code and exported programs: what several tests use is made once.

    Most tests have one of two models, ``Mixed`` or a layer of 6 x 4.
    """
    return tmp_path_factory.mktemp("code")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, code_of_all_tests: Path) -> Path:
    """Compare at once, and export in this process. No choice of an earlier test is known."""
    for choice in code_of_all_tests.glob("*.choice"):
        choice.unlink()
    for name in ("EARLY", "FIRST", "POLL_SECONDS", "TRIAL", "SHARE", "SETTLED"):
        monkeypatch.setattr(runtime_choice, name, 0.0)
    monkeypatch.setattr(runtime_choice, "FEWEST", 1)
    monkeypatch.setattr(runtime_choice.OnnxProgram, "export", exported_here)
    monkeypatch.setattr(cache.Choice, "gain", 1e9)  # a session is made at once
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(code_of_all_tests))
    monkeypatch.setattr(cache, "_loaded", {})
    return code_of_all_tests


def exported_here(other: Any) -> None:
    other._code.compile(lambda share: None)


def favouring(patch: pytest.MonkeyPatch, share: float) -> None:
    patch.setattr(runtime_choice, "GAIN", share)


def wrapped(model: nn.Module, x: Any, opts: poptorch.Options | None = None) -> Any:
    """Wrap a model, with its code compiled."""
    executor = poptorch.inferenceModel(model, opts or options("auto"))
    executor.compile(*(x if isinstance(x, tuple) else (x,)))
    return executor


def decided(model: nn.Module, x: Any, opts: poptorch.Options | None = None) -> Any:
    """Call a model until it is known which runtime is faster."""
    executor = wrapped(model, x, opts)
    calls = 20
    for _ in range(calls):
        executor(*(x if isinstance(x, tuple) else (x,)))
    assert executor._executable.decided, f"no runtime was chosen in {calls} calls"
    return executor


def runtime(executor: Any) -> str:
    return str(executor._executable.report().backend)


def test_the_faster_runtime_stays_and_the_plan_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    poptorch.setLogLevel("INFO")

    executor = decided(model, x)

    lines = [r.message for r in caplog.records if "ONNX Runtime runs the program from" in r.message]
    assert len(lines) == 1
    assert str(executor.plan()).startswith("runs on the onnxruntime backend (")
    same(executor, model, x)


def test_compiled_code_stays_if_it_is_not_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    favouring(monkeypatch, NEVER)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    poptorch.setLogLevel("INFO")

    executor = decided(model, x)

    assert runtime(executor) == "inductor"
    assert "ONNX Runtime is not faster: " in str(executor.plan())
    assert sum("continue to run compiled code" in r.message for r in caplog.records) == 1
    same(executor, model, x)


class OnAClock:
    """A runtime whose calls take some time on a clock, and longer after calls of another one."""

    def __init__(self, clock: list[Any], settled: float, first: float) -> None:
        self._clock, self._settled, self._first = clock, settled, first

    def run(self, state: State, batch: Any) -> Any:
        now, last = self._clock
        self._clock[:] = now + (self._settled if last is self else self._first), self
        return batch

    def fits(self, state: State) -> bool:
        return True

    def shortcut(self, state: State) -> None:
        return None


def test_a_runtime_is_timed_after_earlier_calls_of_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the other one's calls, its threads still spin and its weights fill the caches."""
    clock: list[Any] = [0.0, None]
    monkeypatch.setattr(runtime_choice, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(runtime_choice, "SETTLED", 0.004)
    compiled, other = OnAClock(clock, 0.001, 0.001), OnAClock(clock, 0.0005, 0.005)
    code: Any = SimpleNamespace(
        store=SimpleNamespace(note_choice=lambda *_: None), announce=lambda *_: None
    )
    executable: Any = runtime_choice.Fastest(compiled, None, code)  # type: ignore[arg-type]
    other.key = "key"  # type: ignore[attr-defined]
    executable._other, executable._do = other, runtime_choice.Fastest._alternate

    while not executable.decided:
        executable.run(State(), ())

    assert executable._choice.ours == pytest.approx(0.001)
    assert executable._choice.other == pytest.approx(0.0005)


def test_new_weights_reach_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = decided(model, x)

    check_new_weights(executor, model, x)

    assert executor._executable._other.fits(executor._session.weights.store.state)


def test_weights_that_another_wrapper_trains_reach_onnx_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed(), normal(2, 3, 6, 5)

    def loss(module: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(sum(y.square().sum() for y in module.inner(x)), "sum")

    trained = Having(loss, inner=model)
    trainer = training(trained, options("reference"), lr=0.01)
    executor = decided(model.eval(), x)

    for _ in range(2):
        trained.train()
        trainer(x)
        model.eval()
        trainer.copyWeightsToHost()
        same(executor, model, x)
    assert runtime(executor) == "onnxruntime"


def test_compiled_code_runs_until_a_new_session_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = decided(model, x)
    state, executable = executor._session.weights.store.state, executor._executable
    monkeypatch.setattr(cache.Choice, "gain", executable._choice.session / 4.5)
    executor.copyWeightsToDevice()

    sessions = []
    for _ in range(6):
        same(executor, model, x)
        sessions.append(executable._other.fits(state))

    assert sessions == [False] * 4 + [True] * 2


def test_the_loser_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    favouring(monkeypatch, NEVER)
    ours = decided(model, x)
    favouring(monkeypatch, ALWAYS)
    cache._loaded.clear()
    for file in cache.default_store().folder.glob("*.choice"):
        file.unlink()
    theirs = decided(model, x)

    assert ours._session.weights.store.state.other is None
    assert ours._executable._other is None
    assert theirs._session.weights.store.state.bound is None


def test_the_choice_is_kept_with_the_compiled_code(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    first = decided(model, x)
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setattr(runtime_choice.Fastest, "_compare", None)  # not called again

    second = decided(model, x)

    assert len([*folder.glob("*.choice")]) == 1
    assert runtime(second) == "onnxruntime"
    assert second._executable._choice == first._executable._choice
    same(second, model, x)


DAMAGED = ["", "{}", "[1]", '{"seconds": [1, 2], "why": ""}', '"\\ud800"']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_choice_is_made_again(
    content: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    store = cache.Store(folder)
    store.note_choice("a", cache.Choice(2.0, 1.0, 3.0, "why"))
    assert store.choice("a") == cache.Choice(2.0, 1.0, 3.0, "why")

    (folder / "a.choice").write_text(content)

    assert store.choice("a") is None


@pytest.mark.parametrize("backend", ["optimise", "onnxruntime"])
def test_a_backend_that_the_user_chose_stays(backend: str) -> None:
    executor = wrapped(nn.Linear(6, 4).eval(), normal(3, 6), options(backend))
    executor(normal(3, 6))
    assert not isinstance(executor._executable, runtime_choice.Fastest)


def test_deterministic_algorithms_keep_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    torch.use_deterministic_algorithms(True)
    executor = wrapped(model, x)

    results = [executor(x)[0] for _ in range(20)]

    assert not executor._executable.decided
    assert all(torch.equal(result, results[0]) for result in results)


def mask(model: Having, x: torch.Tensor) -> torch.Tensor:
    return F.max_pool1d(model.layer(x), 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_not_finite_ends_the_use_of_onnx_runtime(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Having(mask, layer=nn.Linear(8, 8)).eval(), normal(4, 8)
    executor = decided(model, x)
    before = runtime(executor)
    bad = x.clone()
    bad[1, 3] = value

    found = executor(bad)

    assert before == "onnxruntime"
    assert runtime(executor) == "inductor"
    with torch.no_grad():
        torch.testing.assert_close(found, model(bad), equal_nan=True, **near(8 + FUNCTION))
    same(executor, model, x)


def test_weights_that_are_no_numbers_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Having(mask, layer=nn.Linear(8, 8)).eval(), normal(4, 8)
    executor = decided(model, x)
    with torch.no_grad():
        model.layer.bias[2] = float("nan")
    executor.copyWeightsToDevice()

    found = executor(x)

    assert bool(found[:, 1].isnan().all())


def test_disagreeing_results_keep_compiled_code_in_all_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    favouring(monkeypatch, ALWAYS)
    usual = runtime_choice.OnnxProgram.run
    monkeypatch.setattr(
        runtime_choice.OnnxProgram, "run", lambda *args: [y * 1.001 for y in usual(*args)]
    )
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    poptorch.setLogLevel("DEBUG")

    first = decided(model, x)
    second = decided(model, x)

    assert runtime(first) == runtime(second) == "inductor"
    (why,) = {r.message for r in caplog.records if "does not run the program" in r.message}
    assert "output.0 differs by" in why
    assert "output.0 differs by" in second._executable._choice.why
    same(first, model, x)


@pytest.mark.parametrize("call", [1, 2, 15])
def test_a_failing_runtime_fails_no_call(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    usual, calls = onnx_runtime._Bound.__call__, []

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) >= call:
            raise RuntimeError("on strike")
        return usual(*args)

    monkeypatch.setattr(onnx_runtime._Bound, "__call__", run)
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    executor = wrapped(model, x)

    for _ in range(30):
        same(executor, model, x)

    assert runtime(executor) == "inductor"
    assert len(calls) <= call + 1  # a shortcut that fails is followed by a usual call


class StoppedError(Exception):
    """What a signal's handler raises."""


def stop(*_: object) -> None:
    raise StoppedError


@pytest.mark.parametrize("call", [1, 2, 15], ids=["compared", "timed", "chosen"])
def test_the_exception_of_a_handler_leaves_a_call_of_a_runtime_that_is_still_used(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    favouring(monkeypatch, ALWAYS)
    usual, calls, before = onnx_runtime._Bound.__call__, [], signal.signal(signal.SIGUSR1, stop)

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGUSR1)
        return usual(*args)

    monkeypatch.setattr(onnx_runtime._Bound, "__call__", run)
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    executor = wrapped(model, x)
    try:
        with pytest.raises(StoppedError):
            for _ in range(30):
                executor(x)
    finally:
        signal.signal(signal.SIGUSR1, before)

    for _ in range(30):
        same(executor, model, x)

    assert runtime(executor) == "onnxruntime"


def test_an_interrupted_comparison_leaves_a_model_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    favouring(monkeypatch, ALWAYS)
    usual, calls = runtime_choice.OnnxProgram.run, []

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        return usual(*args)

    monkeypatch.setattr(runtime_choice.OnnxProgram, "run", run)
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    executor, interrupted = wrapped(model, x), 0

    for _ in range(30):
        try:
            same(executor, model, x)
        except KeyboardInterrupt:
            interrupted += 1

    assert interrupted == 2
    assert runtime(executor) == "onnxruntime"


def divided(model: Having, x: torch.Tensor) -> torch.Tensor:
    return torch.div(x, x + 1, rounding_mode="floor")


def without_an_equivalent(model: Having, x: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, x + 1)


REFUSED = [
    ("cannot be expressed", without_an_equivalent, normal(4)),
    ("may raise an error because of a value", divided, torch.arange(6, dtype=torch.int32)),
]


@pytest.mark.parametrize("why, forward, x", REFUSED)
def test_programs_that_it_cannot_run_stay_compiled(
    why: str, forward: Any, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    favouring(monkeypatch, ALWAYS)
    executor = decided(Having(forward), x)
    assert runtime(executor) == "inductor"
    assert why in executor._executable._choice.why


def everything(m: Having, x: torch.Tensor, i: torch.Tensor) -> dict[str, torch.Tensor]:
    y = m.layer(x)
    return {
        "an input": x,
        "a part of an input": x[1:],
        "a view of an input": x.t(),
        "a weight": m.layer.weight,
        "indices": y.argmax(1),
        "counts": (x > 0).sum(1),
        "truth values": y > 0,
        "a scalar": y.sum(),
        "nothing": y[:, :0],
        "chosen columns": y[:, i],
        "strided": y.t(),
        "once": y,
        "twice": y,
    }


@pytest.mark.larger("test_the_faster_runtime_stays_and_the_plan_names_it")
def test_results_of_all_kinds_are_those_of_eager_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, inputs = Having(everything, layer=nn.Linear(6, 5)).eval(), (normal(4, 6), LAST)
    opts = options("auto")
    opts.Precision.narrow64Bit(False)

    executor = decided(model, inputs, opts)
    found, second = executor(*inputs), executor(*inputs)

    with torch.no_grad():
        expected = model(*inputs)
    assert runtime(executor) == "onnxruntime"
    torch.testing.assert_close(found, expected, **near(6 + FUNCTION))
    strides = {name: value.stride() for name, value in expected.items()}
    assert {name: value.stride() for name, value in found.items()} == strides
    own = {value.data_ptr() for value in found.values() if value.numel()}
    assert own.isdisjoint(value.data_ptr() for value in (*second.values(), *inputs))


@pytest.mark.larger("test_the_faster_runtime_stays_and_the_plan_names_it")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_agree_within_their_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    favouring(monkeypatch, ALWAYS)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype).eval()
    x = normal(4, 16).to(dtype)

    executor = decided(model, x)

    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(executor(x), expected, **near(16 + FUNCTION, dtype=dtype))


@pytest.mark.larger("test_the_faster_runtime_stays_and_the_plan_names_it")
@pytest.mark.parametrize("counts", [{"iterations": 4}, {"replicas": 2}])
def test_several_micro_batches_agree(
    counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval(), normal(8, 6)
    opts = options("auto", **counts).outputMode(poptorch.OutputMode.All)

    executor = decided(model, x, opts)

    same(executor, model, x)
    assert runtime(executor) == "onnxruntime"


@pytest.mark.larger("test_the_faster_runtime_stays_and_the_plan_names_it")
def test_other_sizes_stay_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    executor = decided(model, normal(8, 6))

    for rows in (5, 3, 8, 5, 8):
        same(executor, model, normal(rows, 6))


def test_a_model_works_after_every_change_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = decided(model, x)

    executor.detachFromDevice()
    executor.attachToDevice()
    same(executor, model, x)
    executor.destroy()
    same(executor, model, x)


def test_a_detached_model_holds_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = decided(model, x)
    before = live_sessions()

    executor.detachFromDevice()

    assert live_sessions() == before - 1


def live_sessions() -> int:
    import onnxruntime

    gc.collect()
    return sum(type(each) is onnxruntime.InferenceSession for each in gc.get_objects())


@pytest.mark.larger("test_the_faster_runtime_stays_and_the_plan_names_it")
def test_threads_call_one_model_and_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    x, models = normal(2, 3, 6, 5), [Mixed().eval(), Mixed().eval()]
    with torch.no_grad():
        models[1].linear.weight.mul_(2)
    executors = [wrapped(model, x) for model in models]
    failures: list[BaseException] = []

    def call(at: int) -> None:
        try:
            for _ in range(20):
                same(executors[at], models[at], x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(at % 2,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    assert [runtime(executor) for executor in executors] == ["onnxruntime"] * 2


def test_a_saved_executable_uses_the_faster_runtime_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    favouring(monkeypatch, ALWAYS)
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    decided(model, x).save(tmp_path / "model.poptorch")

    loaded = poptorch.load(tmp_path / "model.poptorch")
    for _ in range(20):
        same(loaded, model, x)

    assert runtime(loaded) == "onnxruntime"


@pytest.mark.larger("test_the_faster_runtime_stays_and_the_plan_names_it")
def test_another_process_exports_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(tmp_path))
    favouring(monkeypatch, ALWAYS)
    monkeypatch.setattr(runtime_choice.OnnxProgram, "export", EXPORT)
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    executor = wrapped(model, x)

    def is_decided() -> bool:
        same(executor, model, x)
        return bool(executor._executable.decided)

    eventually(is_decided)

    for _ in range(5):
        same(executor, model, x)
    assert runtime(executor) == "onnxruntime"


def test_a_plan_that_was_read_before_the_choice_names_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    favouring(monkeypatch, NEVER)
    model, x = nn.Linear(6, 4).eval(), normal(3, 6)
    executor = wrapped(model, x)
    before = str(executor.plan())

    for _ in range(20):
        executor(x)

    assert "ONNX Runtime" not in before
    assert "ONNX Runtime is not faster: " in str(executor.plan())


def test_a_model_is_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    favouring(monkeypatch, ALWAYS)
    executor = decided(nn.Linear(6, 4).eval(), normal(3, 6))
    executable = weakref.ref(executor._executable)
    gc.collect()
    gc.disable()

    executor.destroy()

    assert executable() is None
