"""Configuration files and JSON (spec/options.md sections 8 and 9)."""

import json
import os

import pytest

import poptorch
from poptorch.enums import AutoStage, CommGroupType, ConnectionType, Liveness, OutputMode
from poptorch.options import ConfigFileError, Options, Phase, PipelinedExecution, Stage
from poptorch.options.files import apply_calls, as_calls


@pytest.fixture
def config(tmp_path):
    def write(text, name="options.conf"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_what_is_no_file(tmp_path):
    assert ConfigFileError.__bases__ == (Exception,)
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for ever
    with pytest.raises(AssertionError, match="no regular file"):
        Options().loadFromFile(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        Options().loadFromFile(tmp_path / "missing")


@pytest.mark.spec("options", 27)
def test_a_file_is_a_list_of_calls(config):
    path = config("""
        # a comment, then a blank line

        deviceIterations(4)   # a trailing comment
        deviceIterations(8)
        Training.gradientAccumulation(2)
        _Popart.set("outlineThreshold", 10.0)
        _popart.setPatterns({"A": True}, level=-1)
        outputMode(poptorch.OutputMode.All)
        connectionType(poptorch.enums.ConnectionType.OnDemand)
        Precision.setPartialsType(torch.half)
        TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
        setExecutionStrategy(poptorch.ShardedExecution(poptorch.Stage("a").ipu(1), ["b", "c"]))
        setAvailableMemoryProportion({"IPU0": 0.5})
        updatableNamedBuffers(["a", "b"])
        replicationFactor(2).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    """)
    options = Options()
    assert options.loadFromFile(path) is options
    assert (options.device_iterations, options.Training.gradient_accumulation) == (8, 2)
    assert options.output_mode == OutputMode.All
    assert options.connection_type == ConnectionType.OnDemand
    assert options.TensorLocations.location_weight == {"onChip": 0}
    assert (options.available_memory_proportion, options.input_group_size) == ({0: 0.5}, 2)
    strategy = "ShardedExecution(Stage('a').ipu(1), Stage('b', 'c'))"
    assert repr(options._execution_strategy) == strategy
    popart = options._Popart.options
    assert (popart["outlineThreshold"], popart["patterns_level"]) == (10.0, -1)
    assert popart["partialsTypeMatMuls"] == "half"
    assert popart["updatableNamedBuffers"] == ["a", "b"]


@pytest.mark.spec("options", 28)
def test_a_syntax_error_names_the_effective_line_and_applies_nothing(config):
    path = config("# comment\n\ndeviceIterations(4)\n\n  replicationFactor(2\nlogDir('x')\n")
    options = Options()
    with pytest.raises(ConfigFileError, match=r"SyntaxError at line 2 of options\.conf") as caught:
        options.loadFromFile(path)
    message = str(caught.value)
    assert str(path.parent) not in message
    assert "\n> replicationFactor(2" in message
    assert repr(options) == repr(Options())


@pytest.mark.parametrize("line", [
    "deviceIterations(open('x'))",
    "deviceIterations(__import__('os').system('true'))",
    "deviceIterations.__func__(1)", "Training._popart.set('a', 1)",
    "logDir('{0.__class__}'.format(poptorch.OutputMode))",
    "logDir(os.name)", "logDir(poptorch._base)", "deviceIterations(2 ** 3)",
    "_Popart.set(**{'key': 'a', 'value': 1})", "deviceIterations(4); logDir('x')",
    "device_iterations = 4", "set(x=lambda: 1)", "deviceIterations(\x00)",
    "setPartialsType" + "(" * 500,
])  # fmt: skip
def test_only_calls_with_plain_arguments_are_understood(config, line):
    options = Options()
    with pytest.raises(ConfigFileError, match="SyntaxError at line 1"):
        options.loadFromFile(config(line))
    assert repr(options) == repr(Options())


@pytest.mark.parametrize("line, error", [
    ("unknownSetter(1)", AttributeError),
    ("outputMode(poptorch.OutputMode.Nothing)", AttributeError),
    ("logDir(torch.load)", AttributeError), ("deviceIterations('4')", AssertionError),
    ("inputReplicaGrouping(3, poptorch.CommGroupType.All)", ValueError),
    ("device_iterations(4)", AttributeError),
    ("logDir(poptorch.ConnectionType.Always.name.ljust(9))", AttributeError),
    ("modelName(poptorch.ConnectionType.mro().pop().mro())", AttributeError),
])  # fmt: skip
def test_errors_of_the_calls_come_after_the_earlier_lines(config, line, error):
    options = Options()
    with pytest.raises(error):
        options.loadFromFile(config(f"logDir('first')\n{line}\nlogDir('last')"))
    assert options.log_dir == "first"


def test_deprecated_names_work_in_files(config, caplog):
    path = config("anchorMode(poptorch.AnchorMode.Sum)\nPopart.set('a', 1)")
    options = Options().loadFromFile(path)
    assert (options.output_mode, options._Popart.options["a"]) == (OutputMode.Sum, 1)
    assert len([record for record in caplog.records if "deprecated" in record.message]) == 2


@pytest.mark.spec("options", 29)
def test_json_maps_setters_to_arguments():
    calls = {
        "deviceIterations": 4, "Precision.enableFloatingPointExceptions": True,
        "_Popart.set": ["outlineThreshold", 10.0], "outputMode": "OutputMode.All",
        "logDir": "not.anEnum", "disableModuleNamescope": [],
        "setAvailableMemoryProportion": {"IPU1": 0.25},
    }  # fmt: skip
    options = Options()
    assert options.from_json(json.dumps(calls)) is options
    assert (options.device_iterations, options.output_mode) == (4, OutputMode.All)
    assert (options.log_dir, options.available_memory_proportion) == ("not.anEnum", {1: 0.25})
    assert options._module_namescope_enabled is False
    assert options._Popart.options["outlineThreshold"] == 10.0
    assert options._Popart.options["enableFloatingPointChecks"] is True
    with pytest.raises(AssertionError):  # only the sole argument is converted
        options.from_json('{"outputMode": ["OutputMode.All"]}')
    options.from_json('{"modelName": "OutputMode.Unknown"}')
    assert options.model_name == "OutputMode.Unknown"


UNKNOWN = (
    '"unknown": 1', '"Training.unknown": 1', '"device_iterations": 1', '"__class__": 1',
    '"_values.clear": []', '"toDict.__self__.logDir": "x"', '"log_dir.ljust": [9]',
)  # fmt: skip


@pytest.mark.parametrize("text, error", [
    *((f'{{"deviceIterations": 7, {each}}}', AttributeError) for each in UNKNOWN),
    *((each, ValueError) for each in ("", "{", "[1]", "4")),
])  # fmt: skip
def test_json_that_is_refused_applies_nothing(text, error):
    options = Options()
    with pytest.raises(error):
        options.from_json(text)
    assert options.device_iterations == 1


@pytest.mark.parametrize("strategy", [
    PipelinedExecution(AutoStage.AutoIncrement).useInterleavedSchedule(),
    PipelinedExecution("a", Stage("b")),
    poptorch.ShardedExecution(),
    poptorch.ParallelPhasedExecution([Stage("a"), Stage("b")], ["c"]).sendTensorsOffChipAfterFwd(),
    poptorch.SerialPhasedExecution(Phase(Stage("Stage", "b").ipu(3)), Phase("c"))
    .useSeparateBackwardPhase()
    .setTensorsLiveness(Liveness.OffChipAfterFwd),
], ids=repr)  # fmt: skip
def test_calls_rebuild_what_was_set(strategy):
    """One by one in test_settings.py; here strategies, quotes, several of one setter."""
    options = Options().setExecutionStrategy(strategy).modelName("it's Stage")
    options.outputMode(OutputMode.EveryN, 2).maxRepeatLogs(None)
    options.replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Orthogonal)
    options.anchorTensor("a", "x")
    options.anchorTensor("b", "y", OutputMode.Sum)
    options._Popart.set("dotChecks", ["A", "B"]).set("outlineThreshold", 1.5)
    again = Options()
    apply_calls(again, as_calls(options))
    assert (repr(again), repr(again._execution_strategy)) == (repr(options), repr(strategy))
    assert (as_calls(again), as_calls(Options())) == (as_calls(options), "")


DEEP = 9**5
NESTED = {
    "lists": f"deviceIterations({'[' * DEEP}{']' * DEEP})",
    "signs": f"deviceIterations({'-' * DEEP}1)",
    "calls": f"deviceIterations(1){'.deviceIterations(1)' * 2000}",
    "attributes": f"a{'.a' * 3000}()",
    "some lists": f"deviceIterations({'[' * 150}{']' * 150})",
}


@pytest.mark.parametrize("kind", NESTED)
def test_what_is_too_deep_is_an_error_of_the_file_and_applies_nothing(kind: str, config) -> None:
    options = Options()
    with pytest.raises(ConfigFileError, match="SyntaxError at line 2"):
        options.loadFromFile(config(f"deviceIterations(7)\n{NESTED[kind]}\n"))
    assert options.device_iterations == 1


def test_json_that_is_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="values too deep"):
        Options().from_json("[" * DEEP)
