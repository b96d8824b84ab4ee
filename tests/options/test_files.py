"""Options from files and from JSON, and the calls that make the same options again."""

import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import poptorch
from poptorch.enums import AutoStage, CommGroupType, ConnectionType, Liveness, OutputMode
from poptorch.options import ConfigFileError, Options, Phase, PipelinedExecution, Stage
from poptorch.options.files import apply_calls, as_calls

Write = Callable[[str], Path]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """Writes a file of options, ``options.conf``."""

    def write(text: str) -> Path:
        path = tmp_path / "options.conf"
        path.write_text(text)
        return path

    return write


@pytest.mark.spec("options", 27)
def test_the_error_of_a_file_has_its_own_class() -> None:
    assert ConfigFileError.__bases__ == (Exception,)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would block forever."""
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(AssertionError, match="not a regular file"):
        Options().loadFromFile(tmp_path / "pipe")


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Options().loadFromFile(tmp_path / "missing")


@pytest.mark.spec("options", 27)
def test_a_file_may_have_comments_and_blank_lines_and_later_lines_win(config: Write) -> None:
    path = config("""
        # a comment, then a blank line

        deviceIterations(4)   # a trailing comment
        deviceIterations(8)
    """)
    options = Options()

    returned = options.loadFromFile(path)

    assert returned is options
    assert options.device_iterations == 8


@pytest.mark.spec("options", 27)
@pytest.mark.parametrize("line, name, value", [
    ("outputMode(poptorch.OutputMode.All)", "output_mode", OutputMode.All),
    ("connectionType(poptorch.enums.ConnectionType.OnDemand)",
     "connection_type", ConnectionType.OnDemand),
    ('setAvailableMemoryProportion({"IPU0": 0.5})', "available_memory_proportion", {0: 0.5}),
    ("replicationFactor(2).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)",
     "input_group_size", 2),
    ("Training.gradientAccumulation(2)", "Training.gradient_accumulation", 2),
    ("TensorLocations.setWeightLocation("
     "poptorch.TensorLocationSettings().useOnChipStorage(False))",
     "TensorLocations.location_weight", {"onChip": 0}),
])  # fmt: skip
def test_a_line_of_a_file_sets_an_option(
    line: str, name: str, value: object, config: Write
) -> None:
    options = Options().loadFromFile(config(line))

    assert operator.attrgetter(name)(options) == value


@pytest.mark.spec("options", 27)
@pytest.mark.parametrize(
    "line, key, value",
    [
        ('_Popart.set("outlineThreshold", 10.0)', "outlineThreshold", 10.0),
        ('_popart.setPatterns({"A": True}, level=-1)', "patterns_level", -1),
        ("Precision.setPartialsType(torch.half)", "partialsTypeMatMuls", "half"),
        ('updatableNamedBuffers(["a", "b"])', "updatableNamedBuffers", ["a", "b"]),
    ],
)
def test_a_line_of_a_file_sets_a_key_of_the_backend(
    line: str, key: str, value: object, config: Write
) -> None:
    options = Options().loadFromFile(config(line))

    assert options._Popart.options[key] == value


@pytest.mark.spec("options", 27)
def test_a_line_of_a_file_can_make_a_strategy(config: Write) -> None:
    path = config(
        'setExecutionStrategy(poptorch.ShardedExecution(poptorch.Stage("a").ipu(1), ["b", "c"]))'
    )

    options = Options().loadFromFile(path)

    strategy = repr(options._execution_strategy)
    assert strategy == "ShardedExecution(Stage('a').ipu(1), Stage('b', 'c'))"


@pytest.mark.spec("options", 28)
def test_a_syntax_error_counts_lines_that_hold_something(config: Write) -> None:
    path = config("# comment\n\ndeviceIterations(4)\n\n  replicationFactor(2\nlogDir('x')\n")

    with pytest.raises(ConfigFileError, match=r"SyntaxError at line 2") as error:
        Options().loadFromFile(path)

    assert "\n> replicationFactor(2" in str(error.value)


@pytest.mark.spec("options", 28)
def test_a_syntax_error_names_the_file_without_its_folder(config: Write) -> None:
    path = config("replicationFactor(2")

    with pytest.raises(ConfigFileError, match=r"of options\.conf") as error:
        Options().loadFromFile(path)

    assert str(path.parent) not in str(error.value)


@pytest.mark.spec("options", 28)
def test_a_file_with_a_syntax_error_applies_nothing(config: Write) -> None:
    options = Options()

    with pytest.raises(ConfigFileError):
        options.loadFromFile(config("deviceIterations(4)\nreplicationFactor(2"))

    assert repr(options) == repr(Options())


@pytest.mark.parametrize(
    "line",
    [
        "deviceIterations(open('x'))",
        "deviceIterations(__import__('os').system('true'))",
        "deviceIterations.__func__(1)",
        "Training._popart.set('a', 1)",
        "logDir('{0.__class__}'.format(poptorch.OutputMode))",
        "logDir(os.name)",
        "logDir(poptorch._base)",
        "deviceIterations(2 ** 3)",
        "_Popart.set(**{'key': 'a', 'value': 1})",
        "deviceIterations(4); logDir('x')",
        "device_iterations = 4",
        "set(x=lambda: 1)",
        "deviceIterations(\x00)",
        "setPartialsType" + "(" * 500,
    ],
)
def test_only_calls_with_plain_arguments_are_understood(config: Write, line: str) -> None:
    options = Options()

    with pytest.raises(ConfigFileError, match="SyntaxError at line 1"):
        options.loadFromFile(config(line))

    assert repr(options) == repr(Options())


@pytest.mark.parametrize(
    "line, error",
    [
        ("unknownSetter(1)", AttributeError),
        ("outputMode(poptorch.OutputMode.Nothing)", AttributeError),
        ("logDir(torch.load)", AttributeError),
        ("deviceIterations('4')", AssertionError),
        ("inputReplicaGrouping(3, poptorch.CommGroupType.All)", ValueError),
        ("device_iterations(4)", AttributeError),
        ("logDir(poptorch.ConnectionType.Always.name.ljust(9))", AttributeError),
        ("modelName(poptorch.ConnectionType.mro().pop().mro())", AttributeError),
    ],
)
def test_an_error_of_a_call_comes_after_the_lines_before_it(
    config: Write, line: str, error: type[Exception]
) -> None:
    options = Options()

    with pytest.raises(error):
        options.loadFromFile(config(f"logDir('first')\n{line}\nlogDir('last')"))

    assert options.log_dir == "first"


@pytest.mark.spec("options", 34)
def test_deprecated_names_work_in_files_with_a_warning_each(
    config: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = config("anchorMode(poptorch.AnchorMode.Sum)\nPopart.set('a', 1)")

    options = Options().loadFromFile(path)

    assert options.output_mode == OutputMode.Sum
    assert options._Popart.options["a"] == 1
    assert [text for text in caplog.messages if "deprecated" in text] == caplog.messages
    assert len(caplog.messages) == 2


# JSON.


@pytest.mark.spec("options", 29)
@pytest.mark.parametrize(
    "setter, argument, name, value",
    [
        ("deviceIterations", 4, "device_iterations", 4),
        ("outputMode", "OutputMode.All", "output_mode", OutputMode.All),
        ("logDir", "not.anEnum", "log_dir", "not.anEnum"),
        ("modelName", "OutputMode.Unknown", "model_name", "OutputMode.Unknown"),
        ("disableModuleNamescope", [], "_module_namescope_enabled", False),
        ("setAvailableMemoryProportion", {"IPU1": 0.25}, "available_memory_proportion", {1: 0.25}),
    ],
)
def test_json_maps_a_setter_to_its_argument(
    setter: str, argument: object, name: str, value: object
) -> None:
    options = Options()

    returned = options.from_json(json.dumps({setter: argument}))

    assert returned is options
    assert getattr(options, name) == value


@pytest.mark.parametrize(
    "setter, argument, key, value",
    [
        ("_Popart.set", ["outlineThreshold", 10.0], "outlineThreshold", 10.0),
        ("Precision.enableFloatingPointExceptions", True, "enableFloatingPointChecks", True),
    ],
)
def test_json_maps_a_setter_of_a_group_to_its_arguments(
    setter: str, argument: object, key: str, value: object
) -> None:
    options = Options().from_json(json.dumps({setter: argument}))

    assert options._Popart.options[key] == value


@pytest.mark.spec("options", 29)
def test_json_takes_a_member_of_an_enum_only_where_it_is_the_only_argument() -> None:
    with pytest.raises(AssertionError):
        Options().from_json('{"outputMode": ["OutputMode.All"]}')


@pytest.mark.parametrize(
    "unknown",
    [
        '"unknown": 1',
        '"Training.unknown": 1',
        '"device_iterations": 1',
        '"__class__": 1',
        '"_values.clear": []',
        '"toDict.__self__.logDir": "x"',
        '"log_dir.ljust": [9]',
    ],
)
def test_json_with_an_unknown_setter_applies_nothing(unknown: str) -> None:
    options = Options()

    with pytest.raises(AttributeError):
        options.from_json(f'{{"deviceIterations": 7, {unknown}}}')

    assert options.device_iterations == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", "4"])
def test_json_that_is_not_a_dictionary_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Options().from_json(text)


# Calls that make the same options again.


@pytest.mark.parametrize(
    "strategy",
    [
        PipelinedExecution(AutoStage.AutoIncrement).useInterleavedSchedule(),
        PipelinedExecution("a", Stage("b")),
        poptorch.ShardedExecution(),
        poptorch.ParallelPhasedExecution(
            [Stage("a"), Stage("b")], ["c"]
        ).sendTensorsOffChipAfterFwd(),
        poptorch.SerialPhasedExecution(Phase(Stage("Stage", "b").ipu(3)), Phase("c"))
        .useSeparateBackwardPhase()
        .setTensorsLiveness(Liveness.OffChipAfterFwd),
    ],
    ids=repr,
)
def test_calls_rebuild_strategies(strategy: Any) -> None:
    """``test_settings.py`` rebuilds every option by itself."""
    options = Options().setExecutionStrategy(strategy)
    restored = Options()

    apply_calls(restored, as_calls(options))

    assert repr(restored._execution_strategy) == repr(strategy)


@pytest.fixture
def set_by_several_arguments() -> Options:
    """Options with quotes, with several arguments, and with several calls of one setter."""
    options = Options().modelName("it's Stage")
    options.outputMode(OutputMode.EveryN, 2).maxRepeatLogs(None)
    options.replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Orthogonal)
    options.anchorTensor("a", "x")
    options.anchorTensor("b", "y", OutputMode.Sum)
    options._Popart.set("dotChecks", ["A", "B"]).set("outlineThreshold", 1.5)
    return options


def test_calls_rebuild_settings_of_several_arguments(
    set_by_several_arguments: Options,
) -> None:
    restored = Options()

    apply_calls(restored, as_calls(set_by_several_arguments))

    assert repr(restored) == repr(set_by_several_arguments)
    assert as_calls(restored) == as_calls(set_by_several_arguments)


def test_default_options_are_written_without_calls() -> None:
    assert as_calls(Options()) == ""


# Texts that are nested too deep for a parser.


DEEP = 9**5
NESTED = {
    "lists": f"deviceIterations({'[' * DEEP}{']' * DEEP})",
    "signs": f"deviceIterations({'-' * DEEP}1)",
    "calls": f"deviceIterations(1){'.deviceIterations(1)' * 2000}",
    "attributes": f"a{'.a' * 3000}()",
    "some lists": f"deviceIterations({'[' * 150}{']' * 150})",
}


@pytest.mark.parametrize("kind", NESTED)
def test_a_file_with_too_many_levels_is_an_error_and_sets_nothing(kind: str, config: Write) -> None:
    options = Options()

    with pytest.raises(ConfigFileError, match="SyntaxError at line 2"):
        options.loadFromFile(config(f"deviceIterations(7)\n{NESTED[kind]}\n"))

    assert options.device_iterations == 1


def test_json_that_is_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        Options().from_json("[" * DEEP)
