"""Every option: its default, a value and what that changes, wrong values; nothing is silent."""

import copy
import enum
import pickle

import pytest
import torch

import poptorch
from poptorch.autocasting import Policy
from poptorch.enums import CommGroupType, HalfFloatCastingBehavior, OutputMode
from poptorch.options import Options, ShardedExecution, TensorLocationSettings, overview
from poptorch.options.files import apply_calls, as_calls
from poptorch.options.freeze import freeze, prepare
from poptorch.options.popart import KEYS
from poptorch.options.table import IDLE, UNSET, Setting

OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)
LOCATED = ("Activation", "Weight", "Optimizer", "Accumulator")
# Arguments where the default's type does not say enough.
ARGUMENTS = {
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
# What the executor reads from the options themselves: optim/test_replacement.py.
READ_BY_THE_EXECUTOR = ("relaxOptimizerAttributesChecks",)
# Besides hints, what may change without another compilation.
OUTSIDE_THE_KEY = (
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
