"""Cached executables: what hits or misses and why, damage, several processes and threads."""

import concurrent.futures
import copy
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.patience import HANGS
from helpers.wrapping import Having, normal, options, trains_alike
from poptorch._base import archive
from poptorch._base.thread_safety import PerThread
from poptorch._cli.main import main
from poptorch._compile import cache

X, Y = normal(8, 4), normal(8, 2, seed=1)


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.factor = factor

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, times: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x) * (self.factor * times)
        return out, nn.functional.mse_loss(out, y)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def trained(
    folder: Path,
    *,
    factor: float = 1.0,
    lr: float = 0.1,
    rows: int = 8,
    times: int = 1,
    edit: Callable[..., Any] = lambda opts: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    model, opts = Net(factor), options().enableExecutableCaching(folder)
    edit(opts)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=lr))
    return training(X[:rows], Y[:rows], times)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.popef"))


HITS = {
    "nothing": {},
    "the rate": {"lr": 0.5},
    "the seed": {"edit": lambda opts: opts.randomSeed(4)},
    "names and a device": {"edit": lambda opts: opts.logDir("x").modelName("m").useIpuId(5)},
}
"""What may differ from the program in the cache."""
MISSES = {
    "rows": ({"rows": 4}, r"input 0: float32\[4, 4\] here, float32\[8, 4\] there"),
    "iterations": (
        {"edit": lambda opts: opts.deviceIterations(2)},
        "loops.iterations: 2 here, 1 there",
    ),
    "accumulation": (
        {"edit": lambda opts: opts.Training.gradientAccumulation(4)},
        "loops.accumulation: 4 here, 1 there",
    ),
    "the output mode": (
        {"edit": lambda opts: opts.outputMode(poptorch.OutputMode.All)},
        "output.mode: .* here",
    ),
    "an argument": ({"times": 3}, "constant times: 3 here, 1 there"),
    "a number of the model": ({"factor": 3.0}, r"operator \d+: aten.mul.*test_cache.py:\d+ here"),
}
"""What must not differ, and what the log says about it."""


def test_values_without_a_text_form_are_allowed_and_a_miss_reads_few_entries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    for at in range(2 * cache.NEAREST_OF):
        (folder / f"{at}.popef").write_bytes(b"no entry")
    read, files_read = archive.read, []
    monkeypatch.setattr(archive, "read", lambda path: files_read.append(path) or read(path))
    opts, drawn = options().enableExecutableCaching(folder), torch.Generator()
    drawing = poptorch.inferenceModel(lambda x: x + torch.rand(x.shape, generator=drawn), opts)
    assert drawing(X).shape == X.shape
    assert len(files_read) <= cache.NEAREST_OF + 5


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a program in a cache."""
    folder = tmp_path_factory.mktemp("entry")
    trained(folder)
    (file,) = folder.glob("*.popef")
    return file


@pytest.fixture
def filled(
    entry: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a cache with one program; what happens with it is logged."""
    monkeypatch.setenv("POPTORCH_POD_DIR", str(folder.parent / "pod"))  # device 5 is free
    folder.mkdir(parents=True)
    shutil.copy(entry, folder)
    caplog.set_level(logging.INFO, "poptorch:cpp")
    return folder


@pytest.mark.slow
@pytest.mark.spec("runtime", 15, 16, 17, 18)
def test_a_folder_that_is_not_there_is_made_and_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(folder)

    assert len(files(folder)) == 1
    assert f'Specified directory not found. Creating "{folder}" directory' in caplog.text


@pytest.mark.slow
@pytest.mark.spec("runtime", 15, 16, 17, 18)
@pytest.mark.parametrize("changes", HITS.values(), ids=HITS)
def test_a_program_that_differs_in_nothing_that_is_compiled_is_a_hit(
    changes: dict[str, Any], filled: Path, entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(filled, **changes)

    assert f"hit, {filled / entry.name}" in caplog.text
    assert files(filled) == [entry.name]
    assert (filled / entry.name).read_bytes() == entry.read_bytes()


@pytest.mark.slow
@pytest.mark.spec("runtime", 15, 16, 17, 18)
def test_lines_that_have_moved_in_the_script_are_a_hit(
    filled: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Net.forward.__code__.replace(co_firstlineno=1)
    monkeypatch.setattr(Net.forward, "__code__", moved)

    trained(filled)

    assert "hit, " in caplog.text


@pytest.mark.slow
@pytest.mark.spec("runtime", 15, 16, 17, 18)
@pytest.mark.parametrize("changes, reason", MISSES.values(), ids=MISSES)
def test_a_miss_says_what_differs_from_the_program_in_the_cache(
    changes: dict[str, Any], reason: str, filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(filled, **changes)

    (line,) = [message for message in caplog.messages if "cache: miss" in message]
    assert re.search(reason, line), line
    assert len(files(filled)) == 2


@pytest.mark.slow
@pytest.mark.spec("runtime", 15, 16, 17, 18)
def test_inference_has_its_own_entry_which_is_used_again(filled: Path) -> None:
    for _ in range(2):
        poptorch.inferenceModel(Net(), options().enableExecutableCaching(filled))(X, Y)

    assert len(files(filled)) == 2


@pytest.mark.slow
def test_code_of_another_home_is_a_miss_with_a_remedy(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "poptorch:cpp")
    lines = []
    for home in ("one", "two", "one", "two"):
        monkeypatch.setenv("POPTORCH_KEY_FILE", str(tmp_path / f"key of {home}"))
        caplog.clear()
        trained(folder)
        lines += [
            record.message for record in caplog.records if "xecutable cache" in record.message
        ]

    assert "miss" in lines[0]
    assert "miss" in lines[1]
    assert "to use the same key everywhere, set POPTORCH_KEY_FILE" in lines[1]
    assert ["hit" in line for line in lines[2:]] == [True, True]
    assert len(files(folder)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"nonsense", "half", "pipe", "folder"])
def test_damaged_entries_are_rebuilt(
    damage: bytes | str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(folder)
    (path,) = folder.glob("*.popef")
    good = path.read_bytes()
    if damage == "pipe":  # which would wait for a writer for ever
        path.unlink()
        os.mkfifo(path)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(good[: len(good) // 2] if damage == "half" else damage)
    caplog.clear()
    assert torch.isfinite(trained(folder)[1])
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if str(folder) in text or path.name in text]) <= 2
    assert any("is rebuilt" in text for text in warnings)
    assert damage == "folder" or cache.entries(folder)[0].path == path


@pytest.mark.parametrize(
    "facts", [b"[1]", json.dumps({"input 0": "\x1b[2Jwell"}).encode(), b"[" * 100_000]
)
def test_cache_entries_with_wrong_facts_end_no_run(
    facts: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    archive.write(folder / "0.popef", {"facts.json": facts})
    (folder / "1.popef").mkdir()
    assert torch.isfinite(trained(folder)[1])
    main(["cache", "--dir", str(folder), "list"])
    assert "\x1b" not in capsys.readouterr().out
    cache.trim(folder, 0)
    assert files(folder) == ["1.popef"]


def test_names_of_entries_say_nothing_to_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    facts = json.dumps({"input 0": "float32\n(4,)\tx", "training": "True"}).encode()
    archive.write(folder / "\x1b[2J\n0.popef", {"facts.json": facts})
    main(["cache", "--dir", str(folder), "list"])
    main(["cache", "--dir", str(folder), "trim", "--max-mb", "0"])
    listed, _, removed, _ = capsys.readouterr().out.splitlines()
    assert listed.startswith("\\x1b[2J\\n0 ")
    assert listed.endswith("training  float32\\n(4,)\\tx")
    assert removed == "removed \\x1b[2J\\n0.popef"


def of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setattr(cache.os, "getuid", lambda: folder.stat().st_uid + 1)


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.archive, "write", write)


def test_a_folder_that_cannot_be_made_is_one_warning_which_says_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.of_the_process.cache_clear()
    folder = Path("/proc/cache")  # nobody can make one there
    for _ in range(3):
        cache.store_of(str(folder))
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        "Compiled code is not stored for later processes: executable cache /proc/cache" in message
    )
    assert "options.enableExecutableCaching(folder)" in message
    cache.of_the_process.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda f, _: (f.parent.mkdir(parents=True), f.write_text("no folder")), "File exists"),
        (lambda f, _: (f.mkdir(parents=True), f.chmod(0o777)), "can write to it (chmod go-w)"),
        (of_another, "it belongs to another user"),
        (full, "No space left on device"),
    ],
)
def test_an_unusable_folder_causes_a_warning(
    folder: Path,
    spoil: Callable[..., Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(folder, monkeypatch)
    for _ in range(2):
        assert torch.isfinite(trained(folder)[1])
    assert caplog.text.count(reason) == 1
    assert not list(folder.parent.rglob("*.popef"))


@pytest.mark.long
def test_two_processes_can_write_the_same_cache_entry(folder: Path) -> None:
    code = (
        "import sys, torch, poptorch\n"
        "opts = poptorch.Options().backend('reference').enableExecutableCaching(sys.argv[1])\n"
        "opts.showCompilationProgressBar(False)\n"
        "print(poptorch.inferenceModel(torch.nn.ReLU(), opts)(torch.ones(4)).sum().item())\n"
    )
    running = [programs.Program("-c", code, folder) for _ in range(2)]
    assert [program.communicate()[0] for program in running] == ["4.0\n", "4.0\n"]
    for program in running:
        program.close()
    assert len(files(folder)) == 1


Printed = pytest.CaptureFixture[str]


@pytest.fixture
def two_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the keys of two programs in the cache of this environment, the newest first."""
    trained(folder)
    trained(folder, rows=4)
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(folder))
    newest, oldest = (entry.path.stem for entry in cache.entries(folder))
    return newest, oldest


@pytest.mark.usefixtures("two_programs")
def test_the_command_lists_programs_with_their_inputs(capsys: Printed) -> None:
    status = main(["cache", "list"])

    text = capsys.readouterr().out
    assert status == 0
    assert "2 entries" in text
    assert "training  float32[4, 4] float32[4, 2]" in text


def test_the_command_explains_a_program_by_the_beginning_of_its_key(
    two_programs: tuple[str, str], capsys: Printed
) -> None:
    newest, _ = two_programs

    main(["cache", "explain", newest[:8]])

    assert "loops.iterations: 1" in capsys.readouterr().out


def test_the_command_explains_how_two_programs_differ(
    two_programs: tuple[str, str], folder: Path, capsys: Printed
) -> None:
    main(["cache", "--dir", str(folder), "explain", *two_programs])

    assert "input 0: float32[4, 4] here, float32[8, 4] there" in capsys.readouterr().out


@pytest.mark.usefixtures("two_programs")
def test_the_command_refuses_a_key_that_no_program_has(capsys: Printed) -> None:
    status = main(["cache", "explain", "zzz"])

    assert status == 2
    assert "0 entries have a key" in capsys.readouterr().err


def test_the_command_removes_programs_that_are_old(
    two_programs: tuple[str, str], folder: Path
) -> None:
    newest, oldest = two_programs
    os.utime(folder / f"{oldest}.popef", (0, 0))

    main(["cache", "trim", "--days", "30"])

    assert files(folder) == [f"{newest}.popef"]


def test_the_command_removes_damaged_files(two_programs: tuple[str, str], folder: Path) -> None:
    (folder / "damaged.popef").write_bytes(b"x")

    main(["cache", "trim"])

    assert sorted(files(folder)) == sorted(f"{key}.popef" for key in two_programs)


@pytest.mark.usefixtures("two_programs")
def test_the_command_removes_programs_until_the_rest_is_small_enough(folder: Path) -> None:
    main(["cache", "trim", "--max-mb", "0"])

    assert files(folder) == []


def test_the_command_needs_a_folder(capsys: Printed) -> None:
    status = main(["cache", "list"])

    assert status == 2
    assert "No cache directory" in capsys.readouterr().err


def test_trimming_takes_compiled_graphs_too(folder: Path) -> None:
    trained(folder, edit=lambda opts: opts.checkAgainstEager("off"))
    (entry,) = cache.entries(folder)
    store = cache.store_of(str(folder))
    for at, key in enumerate(("old", "new")):
        store.keep(key, b"x" * 1000)
        os.utime(store.path(key), (at, at))
    size = store.path("new").stat().st_size
    assert cache.trim(folder, keep_bytes=entry.size + size) == [store.path("old")]
    assert store.read("new") == b"x" * 1000
    assert cache.trim(folder, newer_than=entry.used) == []  # it has just been read
    os.utime(store.path("new"), (1, 1))
    assert cache.trim(folder, newer_than=entry.used) == [store.path("new")]


def checks_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.checked"))


def test_trimming_to_nothing_forgets_checks(folder: Path) -> None:
    trained(folder)
    assert checks_of(folder)

    cache.trim(folder, keep_bytes=0)

    assert checks_of(folder) == []


def test_trimming_to_a_size_keeps_checks(folder: Path) -> None:
    """Results of checks need almost no space."""
    trained(folder)
    before = checks_of(folder)

    cache.trim(folder, keep_bytes=1)

    assert files(folder) == []
    assert checks_of(folder) == before


def test_trimming_by_age_forgets_old_checks(folder: Path) -> None:
    trained(folder)
    checks = sorted(folder.glob("*.checked"))
    for check in checks:
        os.utime(check, (1, 1))

    removed = cache.trim(folder, newer_than=2)

    assert checks
    assert sorted(removed) == checks


def many_operators(size: int) -> nn.Module:
    """A model whose capture takes long enough to overlap another capture."""

    def forward(
        model: Having, x: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model.calls.add_(1)
        for _ in range(20):
            x = torch.tanh(model.layer(x))
        return x, nn.functional.mse_loss(x, target)

    return Having(forward, layer=nn.Linear(size, size), calls=torch.zeros(()))


@pytest.mark.slow
def test_concurrent_first_calls_do_not_mix() -> None:
    torch.manual_seed(1)
    ready = threading.Barrier(2)
    given = [(many_operators(size), torch.randn(2, size), torch.randn(2, size)) for size in (3, 5)]

    def train(model: nn.Module, *batch: torch.Tensor) -> None:
        ready.wait()
        trains_alike(model, *batch)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(train, *each) for each in given]:
            each.result(timeout=HANGS)
    assert all(type(each) is torch.Tensor for each in given[0][0].state_dict().values())


class Seen(nn.Module):
    """While it is captured, another thread reads, copies and calls it, as eager code does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.reads: list[dict[str, torch.Tensor]] = []
        self.kinds: list[set[type]] = []

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if poptorch.isRunningOnIpu():
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                self.reads.append(pool.submit(self.read_weights).result(HANGS))
        return nn.functional.mse_loss(self.norm(self.layer(x)) * self.scale, target)

    def read_weights(self) -> dict[str, torch.Tensor]:
        copied, x = copy.deepcopy(self.layer), torch.ones(2, 4)
        with torch.no_grad():
            self(x, x)
        states = (self.state_dict(keep_vars=True), dict(self.layer.named_parameters()))
        seen = {
            **states[0],
            **states[1],
            "copied": copied.weight,
            "by name": self.layer.weight,
        }
        self.kinds.append({type(tensor) for tensor in seen.values()})
        return seen


@pytest.fixture(scope="module")
def captured_with_reader() -> tuple[Seen, poptorch.PoplarExecutor, Any]:
    """Return a trained model whose weights another thread read during the capture.

    Also returns its executor and its parameters from before.
    """
    torch.manual_seed(1)
    model = Seen()
    own = dict(model.layer.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The other thread trains the norm meanwhile, which the check would take for the program's.
    opts = options(accumulation=2).checkAgainstEager("off")
    training = poptorch.trainingModel(model, opts, optimizer)
    training(normal(6, 4), normal(6, 4, seed=1))
    return model, training, own


CapturedWithReader = tuple[Seen, poptorch.PoplarExecutor, dict[str, nn.Parameter]]


def test_another_thread_meets_no_traced_tensors(captured_with_reader: CapturedWithReader) -> None:
    """Traced tensors have no data."""
    model, _, _ = captured_with_reader

    assert model.kinds
    assert all(kinds == {torch.Tensor, nn.Parameter} for kinds in model.kinds)


@pytest.mark.parametrize("way, name", [("by name", "weight"), ("bias", "bias")])
def test_another_thread_meets_the_parameters_of_the_user(
    way: str, name: str, captured_with_reader: CapturedWithReader
) -> None:
    model, _, own = captured_with_reader

    assert model.reads
    assert all(seen[way] is own[name] for seen in model.reads)


def test_what_another_thread_computes_during_a_capture_is_no_part_of_the_program(
    captured_with_reader: CapturedWithReader,
) -> None:
    model, _, _ = captured_with_reader
    torch.manual_seed(1)
    native = Seen()
    for _ in model.reads:
        native.read_weights()
    steps = torch.optim.SGD(native.parameters(), lr=0.1)
    x, target = normal(6, 4), normal(6, 4, seed=1)

    for rows in (slice(3), slice(3, 6)):  # side by side in the program
        (native(x[rows], target[rows]) / 2).backward()
    steps.step()

    torch.testing.assert_close(model.state_dict(), native.state_dict())


def test_after_a_capture_a_layer_has_the_dictionary_of_torch_for_its_parameters(
    captured_with_reader: CapturedWithReader,
) -> None:
    model, _, _ = captured_with_reader

    assert type(model.layer._parameters) is not PerThread


def test_calls_of_another_thread_are_not_part_of_a_capture() -> None:
    """One ends meanwhile that had begun before; all threads call torch's hooks on modules."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def waiting_forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        if poptorch.isRunningOnIpu():
            go_on.set()
            assert ended.wait(HANGS)
        return model.layer(x)

    def waits(theirs: Having, x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(HANGS)
        return theirs.inner(x)

    model, theirs = Having(waiting_forward, layer=nn.Linear(4, 4)), Having(waits, inner=nn.Tanh())
    theirs.register_forward_hook(lambda *_: None)  # then torch asks for all hooks at the end
    x = torch.ones(2, 4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(theirs, x)
        result.add_done_callback(lambda _: ended.set())
        assert begun.wait(HANGS)
        wrapper = poptorch.inferenceModel(model, options())
        torch.testing.assert_close(wrapper(x), model.layer(x).detach())
        assert torch.equal(result.result(HANGS), x.tanh())
    assert not [name for name in wrapper.getTensorNames() if "Tanh" in name or "inner" in name]
