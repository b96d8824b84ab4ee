"""What every test starts from: a clean environment, one thread, a fixed seed."""

import atexit
import collections
import contextlib
import gc
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

# Before anything imports poptorch: the log level and others are read at import.
_OURS = ("POPTORCH_", "POPLAR_", "POPART_", "POPDIST_", "PVTI_", "OMPI_", "FASHION_MNIST")
for _name in [name for name in os.environ if name.startswith(_OURS)]:
    del os.environ[_name]
os.environ["POPTORCH_CHECK_AGAINST_EAGER"] = "error"  # every test that compiles tests this, too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

# A run starts with no compiled code and no key, and its workers share them, as one user's programs
# do: who finds code that carries another key says so, and that would be in what tests read.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if not _WORKER:
    os.environ["_TESTS"] = tempfile.mkdtemp(prefix="poptorch-tests-")
    if _gold := shutil.which("ld.gold"):  # links with torch in a third of the time
        os.symlink(_gold, os.path.join(os.environ["_TESTS"], "ld"))
        os.environ["COMPILER_PATH"] = os.environ["_TESTS"]
    # Where there is compiled code, no model starts a compiler's process before it needs one.
    _code = Path(os.environ["_TESTS"], "code", "poptorch")
    _code.mkdir(mode=0o700, parents=True)
    (_code / "none.code").touch()
    # Torch finds what the C++ compiler made of equal sources in an earlier run that was not killed.
    _kept = Path(__file__).parents[1] / "build" / "compiled"
    _kept.parent.mkdir(exist_ok=True)
    _own = tempfile.mkdtemp(prefix="compiled-", dir=_kept.parent)
    with contextlib.suppress(FileNotFoundError):
        os.rename(_kept, _own)
    (_code / "torch").symlink_to(_own)

    @atexit.register
    def _clean_up(pid: int = os.getpid()) -> None:
        if os.getpid() == pid:  # and not a process that a test forked
            shutil.rmtree(os.environ["_TESTS"], ignore_errors=True)
            shutil.rmtree(_kept, ignore_errors=True)  # of another run at the same time
            os.rename(_own, _kept)


# Whichever test has Python's fork server started, it has imported what others fork from it; by
# itself it would import the loader's part only, or nothing of the tests.
_FOLDERS = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_FOLDERS)
multiprocessing.set_forkserver_preload(["helpers.job_prepared"])
_RUN = os.environ["_TESTS"]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_RUN, "code")
os.environ["POPTORCH_KEY_FILE"] = os.path.join(_RUN, "key", "key")
os.environ["POPTORCH_POD_DIR"] = os.path.join(_RUN, f"pod{_WORKER}")  # each has its own devices
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
# What is imported until the tests are collected stays: looking for garbage in it takes two seconds.
gc.disable()

import pytest  # noqa: E402

pytest.register_assert_rewrite("helpers")  # what fails there says so with its values

from helpers import compiled, selection  # noqa: E402

compiled.watch()  # before anything is compiled, by a fixture of a file for one
# Hundreds of records without a text, which would hide what else a test that fails has logged. A
# filter, because pytest also listens to loggers that do not pass their records on.
logging.getLogger("torch.__trace").addFilter(lambda record: False)


def pytest_addoption(parser: pytest.Parser) -> None:
    explanation = "a part of the cases; see CONTRIBUTING.md"
    parser.addoption("--cases", choices=selection.PARTS, help=explanation)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In quick runs, do not import files in which all tests are slow."""
    if config.getoption("--cases") != "quick" or collection_path.suffix != ".py":
        return None
    slow = re.search(r"^pytestmark = (\[\s*)?pytest.mark.slow\b", collection_path.read_text(), re.M)
    return slow is not None or None


def pytest_configure(config: pytest.Config) -> None:
    """Let every second worker import the tests from the last file on.

    Before a first run, files have no byte code with pytest's assertions. This way each of two
    workers makes that of one half, which takes seven seconds for all, and reads that of the other.
    The process that starts the workers does not import torch, which would let them start later.
    """
    if _WORKER or config.getoption("dist", "no") == "no":
        import torch

        torch.set_num_threads(1)  # tests are small and run at the same time
    of_a_worker = re.fullmatch(r"gw\d*[13579]", _WORKER)
    if of_a_worker and config.args == config.getini("testpaths"):
        files = (config.rootpath / "tests").rglob("test_*.py")
        config.args[:] = map(str, sorted(files, reverse=True))


@pytest.hookimpl(trylast=True)  # when those that are long are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases that ``--cases`` names, in the same order in all workers."""
    if _WORKER:
        items.sort(key=lambda item: item.path)
    if (part := config.getoption("--cases")) is None:
        return
    cases = [
        selection.Case(
            item.nodeid.partition("[")[0],
            slow=item.get_closest_marker("slow") is not None,
            full=any(item.get_closest_marker(mark) for mark in ("larger", "full")),
        )
        for item in items
    ]
    kept, left_out = [], []
    for item, is_kept in zip(items, selection.is_in(part, cases), strict=True):
        (kept if is_kept else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


NUMERIC = {"backends", "capture", "conformance", "cpu", "ops", "optim", "update"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what may have other numbers on another processor."""
    if NUMERIC.intersection(item.path.parent.parts):
        item.add_marker("numeric")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported objects from garbage collection between tests, because they stay."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50)  # tracing makes many objects: a tenth of the time went here


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Also exclude what a test file leaves: later garbage collections took two seconds each."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Results right without compiled code are no success, unless a test breaks the compiler."""
    breaks_compiler = item.get_closest_marker("compiling_fails") is not None
    try:
        result = yield
    finally:
        failures = compiled.failures()
    if failures and not breaks_compiler:
        pytest.fail("the interpreter took the place of compiled code: " + "; ".join(failures))
    if breaks_compiler and not failures:
        pytest.fail("compiling did not fail")
    return result


_TRIES = 3
_tries: collections.Counter[float] = collections.Counter()
"""How often it was tried to free a device: fixtures of modules keep some, as do logs of tests."""


@pytest.fixture(autouse=True)
def _devices_of_earlier_tests() -> None:
    """Give back what an exception holds that a test kept: its frames have executors in them."""
    if any(_tries[device] < _TRIES for device in _held()):
        gc.collect()
        _tries.update(_held())


def _held() -> set[float]:
    from poptorch import _pod

    return {holder.since for holder in _pod.holders() if holder.process.pid == os.getpid()}


@pytest.fixture(autouse=True)
def _process() -> Generator[None, None, None]:
    """A fixed seed; and what a test has set for the whole process is as before."""
    import torch

    from poptorch import setLogLevel
    from poptorch._base import log

    most_repeats = log._most_repeats
    torch.manual_seed(0)
    yield
    setLogLevel("WARN")
    log.limit_repeats(most_repeats)  # and lines of this test are no repeats in the next one
    gc.enable()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.distributions.Distribution.set_default_validate_args(True)  # torch's compiler ends it
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
