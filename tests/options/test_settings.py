"""Every option: its row, default and effect, wrong values; Popart's keys, the bar, strategies."""

import copy
import dataclasses
import datetime
import enum
import inspect
import itertools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import poptorch
from helpers.source_tree import PACKAGE
from helpers.wrapping import options
from poptorch import Error, Phase, PipelinedExecution, ShardedExecution, Stage
from poptorch._base import log
from poptorch._ir.spec import NamedStage, Spec, Strategy
from poptorch.autocasting import Policy
from poptorch.enums import AutoStage, CommGroupType, HalfFloatCastingBehavior, Liveness, OutputMode
from poptorch.options import Options, TensorLocationSettings, overview, progress
from poptorch.options.files import apply_calls, as_calls
from poptorch.options.freeze import freeze, prepare
from poptorch.options.popart import KEYS, validate_popart
from poptorch.options.progress import CompilationProgressBar
from poptorch.options.table import IDLE, UNSET, Setting

OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)
LOCATED = ("Activation", "Weight", "Optimizer", "Accumulator")
# Arguments where the default's type does not say enough.
ARGUMENTS = {
    "checkAgainstEager": ("off",),
    "anchorTensor": ("short", "long"), "backend": ("reference",), "disableModuleNamescope": (),
    "enableExecutableCaching": ("folder",), "enableProfiling": ("reports",),
    "inputReplicaGrouping": (2, CommGroupType.Consecutive), "outputMode": (OutputMode.Sum,),
    "setAvailableMemoryProportion": ({"IPU0": 0.1},), "setExecutionStrategy": (ShardedExecution(),),
    "sourceLocationExcludes": (["mine"],), "updatableNamedBuffers": (["buffer"],),
    "useIpuModel": (True,), "useOfflineIpuTarget": (21,), "Distributed.configureProcessId": (1, 2),
    "Precision.autocastPolicy": (Policy([torch.mm], [], [], []),),
    "Precision.halfFloatCasting": (HalfFloatCastingBehavior.HalfUpcastToFloat,),
    "Precision.setPartialsType": (torch.half,), "TensorLocations.numIOTiles": (64,),
    **{f"TensorLocations.set{kind}Location": (OFF_CHIP,) for kind in LOCATED},
}  # fmt: skip
# What the executor reads from the options themselves: optim/test_classes.py.
READ_BY_THE_EXECUTOR = ("relaxOptimizerAttributesChecks",)
# Besides hints, what may change without another compilation.
OUTSIDE_THE_KEY = (
    "checkAgainstEager",
    "maxRepeatLogs", "connectionType", "setAvailableMemoryProportion", "randomSeed", "useIpuId",
    "modelName", "logCycleCount", "enableProfiling", "sourceLocationExcludes",
    "enableExecutableCaching", "programs", "Precision.setPartialsType",
    "Distributed.processTimeout", "Distributed.broadcastWeights", "showCompilationProgressBar",
)  # fmt: skip
# What belongs to this machine or process: it is not saved with a model.
OF_THIS_MACHINE = (
    "logDir", "enableProfiling", "sourceLocationExcludes", "enableExecutableCaching",
    "Distributed.configureProcessId", "Distributed.processTimeout", "Distributed.stageProcesses",
    '_Popart.set("engineOptions")',
)  # fmt: skip
TAKES_TEXTS = (
    "logDir", "anchorTensor", "modelName", "enableProfiling", "enableExecutableCaching", "backend",
    "checkAgainstEager",
)  # fmt: skip
TAKES_NONE = ("maxRepeatLogs", "enableProfiling", "enableExecutableCaching")
ALL = overview.settings(Options())
SETTERS = [setting for setting in ALL if not setting.option.startswith("_Popart")]


def start(setting: Setting) -> Options:
    options = Options().replicationFactor(2)
    if setting.option == "Distributed.stageProcesses":  # there must be so many processes
        options.Distributed.configureProcessId(0, 6)
    return options


def example(setting: Setting):
    """Arguments of a setter that change the option."""
    if setting.option in ARGUMENTS:
        return ARGUMENTS[setting.option]
    value = setting.row.values[0]
    if isinstance(value.kind, type) and issubclass(value.kind, enum.Enum):
        return (list(value.kind)[1],)
    default = value.default
    if isinstance(default, enum.Enum):
        return (next(member for member in type(default) if member != default),)
    if default is UNSET:
        return ("text",) if value.kind is str else (3,) if value.kind is int else (True,)
    if isinstance(default, bool):
        return (not default,)
    return (default + "x",) if isinstance(default, str) else (default + 2,)


def setter(options: Options, setting: Setting):
    target = options
    for name in setting.option.split("."):
        target = getattr(target, name)
    return target


def change(options: Options, setting: Setting):
    """Set an option to something other than its default; return what the setter does."""
    if not setting.option.startswith("_Popart"):
        return setter(options, setting)(*example(setting))
    key = setting.row.values[0].name
    values = {
        "bool": setting.row.values[0].default is not True, "int": 0, "float": 1.5,
        "string": "text", "list": ["0"], "dictionary": {"key": "value"},
    }  # fmt: skip
    value = next(value for kind, value in values.items() if key in KEYS[kind])
    return options._Popart.set(key, value)


def shown(options: Options) -> str:
    return overview.describe(options, every=True)


@pytest.fixture
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_reported", set())


@pytest.mark.spec("programs", 1)
@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.option)
def test_it_changes_something_or_says_that_it_does_not(setting, nothing_reported, caplog) -> None:
    plain, options = start(setting), start(setting)
    chained, group = change(options, setting), setting.option.partition(".")[0]
    if setting.option != "anchorTensor":  # PopTorch's returns nothing
        assert chained is (getattr(options, group) if "." in setting.option else options)
    assert setting.option in {each.option for each in overview.settings(options) if each.changed}
    before, after = freeze(plain, training=True), freeze(options, training=True)
    for _ in range(2):
        with caplog.at_level("INFO", logger="poptorch::python"):
            prepare(options.clone(), training=True)
    lines = [text for text in caplog.messages if "no effect here" in text]
    if setting.row.effect in IDLE:
        assert (options.withoutEffect(), len(lines)) == ([setting.option], 1)
        assert lines[0].startswith(f"{setting.option} has no effect here. ")
    else:
        assert options.withoutEffect() == lines == []
        assert (before != after) is (setting.option not in READ_BY_THE_EXECUTOR)
    unkeyed = setting.row.effect in IDLE or setting.option in READ_BY_THE_EXECUTOR + OUTSIDE_THE_KEY
    assert (before.for_cache() == after.for_cache()) is unkeyed
    assert hash(after) == hash(pickle.loads(pickle.dumps(after)))
    assert " at 0x" not in repr(after)


@pytest.mark.spec("options", 26)
@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.option)
def test_it_is_copied_saved_and_frozen_with_the_options(setting) -> None:
    plain = start(setting)
    before, options = shown(plain), plain.clone()
    change(options, setting)
    assert shown(plain) == before
    text = shown(options)
    for other in (copy.copy(options), pickle.loads(pickle.dumps(options))):
        assert shown(other) == text
    saved = Options()
    apply_calls(saved, as_calls(options))
    assert (shown(saved) == text) is (setting.option not in OF_THIS_MACHINE)
    options._freeze()
    change(options.clone(), setting)
    for frozen in (options, pickle.loads(pickle.dumps(options))):
        state = torch.get_rng_state()
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change(frozen, setting)
        assert shown(frozen) == text
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.spec("options", 5)
@pytest.mark.parametrize("setting", SETTERS, ids=lambda setting: setting.option)
def test_wrong_values_are_refused_at_once_and_nothing_is_stored(setting) -> None:
    if setting.option in ("disableModuleNamescope", "Precision.halfFloatCasting"):
        return  # nothing to be given, and whatever older scripts give
    options = start(setting)
    text = shown(options)
    for wrong in (torch.ones(2), "no", None, 4.5, object()):
        if setting.option in {"no": TAKES_TEXTS, None: TAKES_NONE}.get(wrong, ()):
            continue
        with pytest.raises((AssertionError, ValueError)):
            setter(options, setting)(wrong, *example(setting)[1:])
        assert shown(options) == text


def test_the_defaults_that_scripts_read() -> None:
    options = Options()
    assert freeze(options, training=True).for_cache() == poptorch._ir.spec.Spec(training=True)
    stored = {
        "replication_factor": 1, "input_group_size": 1, "input_cgt": CommGroupType.Consecutive,
        "broadcast_buffers": True, "device_iterations": 1, "log_dir": ".", "max_repeat_logs": 4,
        "auto_round_num_ipus": False, "anchored_tensors": {}, "output_mode": 4,
        "output_return_period": 1, "connection_type": 0, "sync_pattern": 0,
        "available_memory_proportion": {},
    }  # fmt: skip
    assert {name: options(name) for name in stored} == stored
    assert type(options._execution_strategy) is poptorch.PipelinedExecution
    assert options._popart is options._Popart
    assert options._relax_optimizer_checks is False
    assert options._show_compilation_progress_bar is options._module_namescope_enabled is True
    assert len(options._source_location_excludes) == 3


def test_what_is_asked_for_and_missing_is_a_warning(nothing_reported, caplog, monkeypatch) -> None:
    prepare(Options().logDir("here"), training=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    prepare(Options().logDir("there").enableStableNorm(True), training=True)
    assert not caplog.records  # said once; a hint is an INFO line
    text = '{"autoReport.all": "true", "debug.instrument": "true"}'
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    prepare(Options(), training=True)
    assert caplog.messages == ["POPLAR_ENGINE_OPTIONS: no effect here of debug.instrument"]


def test_hints_are_listed_in_the_order_of_the_table_unless_they_are_set_back(monkeypatch) -> None:
    options = Options().enableStableNorm(True)
    options.Training.setConvolutionDithering(True)
    options._Popart.set("outlineThreshold", 10.0)
    hints = ['_Popart.set("outlineThreshold")', "enableStableNorm"]
    assert options.withoutEffect() == ["Training.setConvolutionDithering", *hints]
    options.Training.setConvolutionDithering(False)
    options._Popart.set("convolutionOptions", {})
    assert options.withoutEffect() == hints
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"syncPattern": "SyncPattern.SinglePipeline"}')
    assert Options().withoutEffect() == ["syncPattern"]


def test_excluded_files_are_not_the_users(tmp_path, caplog) -> None:
    helper = tmp_path / "helper_of_mine.py"
    helper.write_text("def branch(x):\n    return x if x.sum() > 0 else -x\n")
    names = {}
    exec(compile(helper.read_text(), str(helper), "exec"), names)

    def read_at(options: Options) -> str:
        caplog.clear()
        poptorch.inferenceModel(lambda x: names["branch"](x), options)(torch.ones(2))
        return next(line for line in caplog.messages if ".py:" in line)

    quiet = Options().showCompilationProgressBar(False)
    assert "helper_of_mine.py:2" in read_at(quiet)
    line = read_at(quiet.clone().appendToLocationExcludes("helper_of"))
    assert "helper_of_mine" not in line
    assert "test_settings.py" in line


def test_a_named_model_has_its_name_in_its_plan() -> None:
    plain, named = (poptorch.inferenceModel(lambda x: x + 1, options.backend("reference"))
                    for options in (Options(), Options().modelName("adder")))  # fmt: skip
    for wrapper in (plain, named):
        wrapper.compile(torch.ones(1))
    assert str(named.plan()).startswith("model adder\n")
    assert "model" not in str(plain.plan()).splitlines()[0]


# Public methods that stand for other options, or for none.
NO_SETTERS = {
    "appendToLocationExcludes", "clone", "createOrSet", "defaultOutputMode", "deleteIfExists",
    "enablePipelining", "exists", "from_json", "loadFromFile", "profile", "set", "toDict", "update",
    "withoutEffect", "Precision.runningStatisticsAlwaysFloat",
    "Precision.runningVarianceAlwaysFloat",
}  # fmt: skip


def fields(part: object = Spec(training=True), path: str = "") -> dict[str, object]:
    """Fields of the Spec and of its parts, by their paths."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{path}{field.name}"
        found |= fields(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def test_every_field_of_the_spec_has_a_row_and_a_reader() -> None:
    """Read by its name: what reads another's, the tests of that part show."""
    rows = [value for setting in ALL for value in setting.row.values]
    named = {path for value in rows for path in (value.field, value.decides) if path}
    # The small model's tiles come from a variable; ``training`` from the wrapper; which part this
    # is from the index of the process; what joins its machines from the job.
    elsewhere = {"training", "target.tiles", "target.part", "target.link"}
    reached = {path for name in named for path in fields() if f"{path}.".startswith(f"{name}.")}
    assert reached | elsewhere == fields().keys()
    assert named - fields().keys() <= {path.rpartition(".")[0] for path in fields()}
    paths = [p for p in PACKAGE.rglob("*.py") if "options" not in p.relative_to(PACKAGE).parts]
    read = set(re.findall(r"\.(\w+)\b(?!\s*=[^=])", "\n".join(map(Path.read_text, paths))))
    assert {path.rpartition(".")[2] for path in fields()} <= read, "give it a reader or remove it"


def test_every_setter_has_a_row() -> None:
    rows = [setting.option for setting in ALL]
    assert len(rows) == len(set(rows))
    for prefix in ("", "Training.", "Precision."):
        group = getattr(Options(), prefix[:-1]) if prefix else None
        members = vars(type(group)).items() if group else inspect.getmembers(Options)
        public = {name for name, each in members if inspect.isfunction(each) and name[0] != "_"}
        methods = {prefix + name for name in public}
        written = {name for name in rows if name.rpartition(".")[0] == prefix[:-1]}
        assert methods - NO_SETTERS == written


GOOD = {
    "bool": [True], "int": [1], "float": [1.5], "string": ["text"],
    "list": [["a"], ("a", "b"), {0, 1}], "dictionary": [{"key": "value"}, {"key": True}],
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_every_key_takes_its_type_and_no_other(kind: str) -> None:
    for key in KEYS[kind]:
        for value in GOOD[kind]:
            validate_popart({key: value})
        for other in GOOD.keys() - {kind}:
            assert key not in KEYS[other]
            said = f"(?s)Unknown {other} option: {key}.*takes a value of type {kind}"
            with pytest.raises(Error, match=said):
                validate_popart({key: GOOD[other][0]})


@pytest.mark.parametrize("key, value, phrase", [
    *(("nonsense", values[0], f"Unknown {kind} option") for kind, values in GOOD.items()),
    ("nonsense", None, "Unknown value type"), ("dotChecks", [None], "Unknown value type"),
    ("engineOptions", {1: "a"}, "Unknown value type"),
    ("autoRecomputation", 5, "out of range"), ("virtualGraphMode", -1, "out of range"),
    ("hardwareInstrumentations", [0, 2], "out of range"),
    (7, True, "Unknown bool option: 7"),
    ("outlineTreshold", 1.0, "did you mean outlineThreshold"),
])  # fmt: skip
def test_refused_settings(key, value, phrase: str) -> None:
    with pytest.raises(Error, match=phrase):
        validate_popart({key: value})


def test_the_log_directory_is_ignored_with_a_warning(caplog) -> None:
    validate_popart({"logDir": "x"})
    assert "Options.logDir" in caplog.text


def test_the_bar_users_know(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    bar = CompilationProgressBar()
    assert bar.elapsed is None
    for done in (0, 50, 100):
        bar(done, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("\rGraph compilation:   0%|")
    assert "Graph compilation: 100%|" in captured.err
    assert re.search(r"\| 100/100 \[\d\d:\d\d<00:00\]", captured.err)
    assert bar.elapsed == datetime.timedelta(seconds=2)
    bar(0, 100)  # a second compilation
    bar.close()
    assert "Graph compilation:   0%|" in capsys.readouterr().err


def test_a_line_of_the_log_stands_alone(capsys):
    bar = CompilationProgressBar()
    bar(30, 100)
    capsys.readouterr()
    log.python.warning("something")
    bar.close()
    cleared, line, again = re.split(r"(\[\d\d:.*something\n)", capsys.readouterr().err)
    assert re.fullmatch(r"\r +\r", cleared)
    assert "something" in line
    assert again.startswith("\rGraph compilation:  30%|")
    log.python.warning("the bar is closed")
    assert capsys.readouterr().err.startswith("[")


def test_a_compilation_never_goes_back_and_ends_at_all_of_it(monkeypatch):
    seen = []
    monkeypatch.setattr(CompilationProgressBar, "__call__", lambda self, share: seen.append(share))
    model = poptorch.inferenceModel(torch.nn.ReLU(), options().showCompilationProgressBar(True))
    model(torch.ones(1))
    assert seen == sorted(seen)
    assert len(seen) > 2
    assert seen[-1] == 100


def test_one_process_of_a_job_shows_a_bar(capsys):
    for process in (0, 1):
        opts = options().showCompilationProgressBar(True)
        opts.Distributed.configureProcessId(process, 2)
        with poptorch.inferenceModel(torch.nn.Identity(), opts)._session._progress() as progress:
            progress(0.5)
            progress(1.0)
        assert bool(capsys.readouterr().err) is not bool(process)


def test_copies_start_afresh(capsys):
    own = Options()
    own._progress_bar(10, 100)
    for other in (own.clone(), pickle.loads(pickle.dumps(own))):
        assert other._progress_bar.elapsed is None
    own._progress_bar.close()


ParallelPhasedExecution = poptorch.ParallelPhasedExecution
SerialPhasedExecution = poptorch.SerialPhasedExecution


def placed(strategy):
    return freeze(Options().setExecutionStrategy(strategy), training=True).placement


REFUSED = {
    "Block IDs are supposed to be strings": [lambda: Stage(0)],
    "must either be block IDs": [
        lambda given=given: Phase(*given)
        for given in ((), (0,), ("A", Stage("B")), (["A"],), (None,))
    ],
    "associated with more than one stage": [
        lambda cls=cls: cls(Stage("a", "b"), Stage("b"))
        for cls in (PipelinedExecution, ShardedExecution, SerialPhasedExecution)
    ],
    "There is currently no AutoStage": [SerialPhasedExecution, ParallelPhasedExecution],
    "Unknown block": [lambda: ShardedExecution("a").stage("x")],
    ".": [
        *(lambda given=given: PipelinedExecution(*given) for given in (
            (0,), (AutoStage.SameAsIpu, "a"), (Phase("a"),), ([],), ([Stage("a")],), (None,))),
        lambda: Stage("a").ipu("3"),
        *(lambda n=n: SerialPhasedExecution("A", "B").phase(n) for n in (-1, 2, "0", 1.0)),
        lambda: SerialPhasedExecution("A").useSeparateBackwardPhase(1),
        lambda: SerialPhasedExecution("A").setTensorsLiveness(1),
        lambda: ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd("yes"),
        lambda: SerialPhasedExecution("A").phase(0).ipus(0, 2),
    ],
}  # fmt: skip


@pytest.mark.spec("parallel", 14, 25)
@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused(title):
    for call in REFUSED[title]:
        with pytest.raises(AssertionError, match=title):
            call()


@pytest.mark.spec("parallel", 26, 27)
def test_phases_of_blocks_and_of_stages_in_every_way_to_pass_them():
    assert (len(Phase("A", "B").stages), Phase("A", "B").stage(0).blocks) == (1, ("A", "B"))
    parallel = Phase(Stage("A"), Stage("B"))
    assert len(parallel.stages) == 2
    SerialPhasedExecution(parallel, Phase("C", "D")).phase(0).ipus(0, 2)
    with pytest.raises(AssertionError):
        parallel.ipus(1, "1")
    assert repr(parallel) == "Phase(Stage('A').ipu(0), Stage('B').ipu(2))"
    expected = placed(SerialPhasedExecution(Phase("A"), Phase("B")))
    for arguments in (
        ("A", "B"), (Stage("A"), Stage("B")), (["A"], ["B"]), ([Stage("A")], [Stage("B")]),
        ([Phase("A"), Phase("B")],), ([["A"], ["B"]],), ((Phase("A"), "B"),),
    ):  # fmt: skip
        assert placed(SerialPhasedExecution(*arguments)) == expected
    one = SerialPhasedExecution(["A", "B"])
    assert ([stage.blocks for stage in one.phase(0).stages], len(one._phases)) == ([("A", "B")], 1)
    assert SerialPhasedExecution("A", "B").phase(1).stage(0).blocks == ("B",)


@pytest.mark.parametrize("cls", [PipelinedExecution, ShardedExecution])
def test_stages_by_position(cls):
    strategy = cls(Stage("a").ipu(5), "b", ["c", "d"], ("e",))
    assert placed(strategy).stages == (
        NamedStage(("a",), 0, ipu=5), NamedStage(("b",), 1), NamedStage(("c", "d"), 2),
        NamedStage(("e",), 3),
    )  # fmt: skip
    assert strategy.stage("d").blocks == ("c", "d")
    assert cls(Stage("a", "a")).stage("a").blocks == ("a", "a")
    stage = Stage("a")
    assert stage.ipu(3) is stage


@pytest.mark.spec("parallel", 20)
def test_automatic_stages_and_interleaving() -> None:
    assert issubclass(ShardedExecution, PipelinedExecution)
    assert placed(ShardedExecution("a")).strategy is Strategy.SHARDED
    assert placed(PipelinedExecution()).auto_stage is AutoStage.SameAsIpu
    assert placed(PipelinedExecution(AutoStage.AutoIncrement)).auto_stage is AutoStage.AutoIncrement
    named = placed(PipelinedExecution("a"))
    assert named.auto_stage is None
    assert not named.interleaved
    assert placed(PipelinedExecution("a").useInterleavedSchedule()).interleaved
    assert not placed(ShardedExecution("a").useInterleavedSchedule()).interleaved


def test_phased_settings():
    serial = SerialPhasedExecution("A", "B")
    assert serial.useSeparateBackwardPhase() is serial
    assert serial.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is serial
    assert serial._backend_options() == {
        "execution_mode": 2, "separate_backward_phase": True, "tensors_liveness": 3,
        "serial_phases_execution": True,
    }  # fmt: skip
    parallel = ParallelPhasedExecution("A", "B").sendTensorsOffChipAfterFwd()
    assert placed(parallel).liveness is Liveness.OffChipAfterFwd
    parallel.sendTensorsOffChipAfterFwd(False)
    assert parallel._backend_options()["tensors_liveness"] == 0
    assert parallel._backend_options()["serial_phases_execution"] is False
    assert repr(serial) == (
        "SerialPhasedExecution(Phase(Stage('A')), Phase(Stage('B')))"
        ".useSeparateBackwardPhase().setTensorsLiveness(Liveness.OffChipAfterEachPhase)"
    )
