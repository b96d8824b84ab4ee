"""Rules of options beyond types: what setters refuse, how they store values, copies and texts."""

import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from poptorch._ir.spec import Spec
from poptorch.enums import CommGroupType, ConnectionType, OutputMode
from poptorch.options import Options, PipelinedExecution, Stage
from poptorch.options.freeze_options import freeze, resolved_output
from poptorch.options.option_table import OF_FIELD, Value

Setter = Callable[[Options, Any], object]


# A setter; values that it refuses; the type and a part of the message of the error.
REFUSED: dict[str, tuple[Setter, list[Any], type[Exception], str]] = {
    "reduction type": (
        lambda o, v: o.Training.accumulationAndReplicationReductionType(v),
        [poptorch.ReductionType.NoReduction, 0, "Mean"], ValueError, "must be set to"),
    "partials type": (
        lambda o, v: o.Precision.setPartialsType(v),
        ["half", torch.int8], ValueError, "must be"),
    "running statistics": (
        lambda o, v: o.Precision.runningStatisticsAlwaysFloat(v),
        ["yes"], ValueError, "True or"),
    "number of I/O tiles": (
        lambda o, v: o.TensorLocations.numIOTiles(v),
        [33, 30, 194, True], AssertionError, "even"),
    "random seed": (
        lambda o, v: o.randomSeed(v),
        [1 << 64, -(10**20)], ValueError, "out of range"),
    "return period of outputs": (
        lambda o, v: o.outputMode(OutputMode.EveryN, v),
        [None, 0, "2"], AssertionError, "period"),
    "return period of an anchor": (
        lambda o, v: o.anchorTensor("a", "b", OutputMode.EveryN, v),
        [None, 0], AssertionError, "needs a positive output_return_period"),
    "name of a device": (
        lambda o, v: o.setAvailableMemoryProportion({v: 0.1}),
        ["CPU0", 0], AssertionError, "must start with IPU"),
    "number of a device": (
        lambda o, v: o.setAvailableMemoryProportion({v: 0.1}),
        ["IPUx", "IPU"], ValueError, "must be an integer"),
    "connection type": (
        lambda o, v: o.connectionType(v),
        [1], AssertionError, "Unexpected type"),
    "updatable buffers": (
        lambda o, v: o.updatableNamedBuffers(v),
        [(1, 2), "weight"], AssertionError, "type"),
    "patterns": (
        lambda o, v: o._Popart.setPatterns(*v),
        [([], 1), ({}, "1")], AssertionError, "type"),
    "kind of a group": (
        lambda o, v: o.replicationFactor(4).inputReplicaGrouping(2, v),
        [CommGroupType.All], ValueError, "cannot be All"),
    "large group": (
        lambda o, v: o.replicationFactor(4).inputReplicaGrouping(v, CommGroupType.Consecutive),
        [8], ValueError, "larger than"),
    "group that does not divide": (
        lambda o, v: o.replicationFactor(4).inputReplicaGrouping(v, CommGroupType.Orthogonal),
        [3], ValueError, "a factor of"),
}  # fmt: skip


@pytest.mark.spec("options", 8, 10, 12, 15, 21, 37)
@pytest.mark.spec("precision", 16)
@pytest.mark.parametrize(
    "call, value, error, phrase",
    [
        pytest.param(call, value, error, phrase, id=f"{what}: {value}")
        for what, (call, values, error, phrase) in REFUSED.items()
        for value in values
    ],
)
def test_a_wrong_value_is_refused_at_once_and_changes_nothing(
    call: Setter,
    value: Any,
    error: type[Exception],
    phrase: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = Options()

    with pytest.raises(error, match=phrase):
        call(options, value)

    assert repr(options.replicationFactor(1)) == repr(Options())
    assert caplog.messages == []


# How values are stored.


@pytest.mark.spec("options", 6)
@pytest.mark.parametrize(
    "name, change, value",
    [
        ("random_seed", lambda o: o.randomSeed(17), 17),
        ("ipu_id", lambda o: o.useIpuId(0), 0),
        ("use_model", lambda o: o.useIpuModel(True), True),
        ("model_name", lambda o: o.modelName("m"), "m"),
        ("ipu_version", lambda o: o.useOfflineIpuTarget(), 2),
    ],
)
def test_a_value_without_a_default_does_not_exist_until_it_is_set(
    name: str, change: Callable[[Options], Options], value: object
) -> None:
    options = Options()
    assert not options.exists(name)

    change(options)

    assert options(name) == value


@pytest.mark.spec("options", 7)
def test_a_random_seed_seeds_torch_at_once() -> None:
    torch.manual_seed(17)
    expected = torch.rand(3)
    torch.manual_seed(1)

    Options().randomSeed(17)

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.spec("options", 18)
def test_an_offline_target_never_connects_unless_a_connection_is_chosen_later() -> None:
    options = Options().useOfflineIpuTarget()
    assert options.connection_type == ConnectionType.Never

    options.connectionType(ConnectionType.OnDemand)

    assert options.connection_type == ConnectionType.OnDemand
    assert options.ipu_version == 2


@pytest.mark.spec("options", 8)
@pytest.mark.parametrize(
    "name, change, number",
    [
        ("connection_type", lambda o: o.connectionType(ConnectionType.OnDemand), 1),
        ("output_mode", lambda o: o.outputMode(OutputMode.Sum), 3),
        ("sync_pattern", lambda o: o.syncPattern(poptorch.SyncPattern.SinglePipeline), 1),
    ],
)
def test_enums_are_stored_as_whole_numbers(
    name: str, change: Callable[[Options], Options], number: int
) -> None:
    stored = change(Options())(name)

    assert type(stored) is int
    assert stored == number


@pytest.mark.spec("options", 9)
def test_some_members_of_enums_have_unexpected_numbers() -> None:
    assert poptorch.VariableRetrievalMode.AllReplicas == 2
    assert OutputMode.Final == 0


@pytest.mark.spec("options", 36)
def test_no_limit_of_repeated_lines_is_the_largest_number() -> None:
    assert Options().maxRepeatLogs(None).max_repeat_logs == 2**64 - 1


def test_location_excludes_are_replaced_or_added_to() -> None:
    options = Options().sourceLocationExcludes(["a"])

    options.appendToLocationExcludes("b", "c")

    assert options._source_location_excludes == ["a", "b", "c"]


@pytest.mark.parametrize("behaviour", poptorch.HalfFloatCastingBehavior)
def test_casting_takes_the_number_of_a_member(
    behaviour: poptorch.HalfFloatCastingBehavior,
) -> None:
    stored = Options().Precision.halfFloatCasting(int(behaviour)).half_float_casting

    assert stored is behaviour


@pytest.mark.spec("options", 10)
def test_input_grouping_is_checked_against_the_factor_set_before() -> None:
    options = Options().replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Orthogonal)

    assert options.input_group_size == 2
    assert options.input_cgt == CommGroupType.Orthogonal


@pytest.mark.spec("options", 11)
@pytest.mark.parametrize("anything", [1, 7, None, "x"])
def test_without_grouping_the_size_of_a_group_is_one(anything: Any) -> None:
    options = Options().replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Orthogonal)

    options.inputReplicaGrouping(anything, CommGroupType.NoGrouping)

    assert options.input_group_size == 1
    assert options.input_cgt == CommGroupType.Consecutive


# Output modes and anchors.


def test_every_nth_output_has_the_period_that_was_set() -> None:
    options = Options().outputMode(OutputMode.EveryN, 3)

    assert options.output_mode == OutputMode.EveryN
    assert options.output_return_period == 3
    assert not options.defaultOutputMode()


@pytest.mark.spec("options", 14)
def test_a_period_is_ignored_with_a_line_wherever_the_mode_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="poptorch::python"):
        options = Options().outputMode(OutputMode.All, 7)

    assert "The output return period 7 is ignored" in caplog.text
    assert resolved_output(options, training=True) == (OutputMode.All, 1)


def test_the_output_mode_can_be_left_to_the_wrapper_again() -> None:
    options = Options().outputMode(OutputMode.All)

    options.outputMode(OutputMode.Default)

    assert options.defaultOutputMode()


@pytest.mark.spec("options", 14)
@pytest.mark.parametrize(
    "arguments, stored",
    [
        ((OutputMode.All, 7), ["long", False, OutputMode.All, 1]),
        ((OutputMode.EveryN, 7), ["long", False, OutputMode.EveryN, 7]),
        ((), ["long", True, None, 1]),
    ],
    ids=["a mode", "a mode with a period", "the wrapper's mode"],
)
def test_an_anchor_has_the_long_name_whether_the_mode_is_inherited_the_mode_and_the_period(
    arguments: tuple[Any, ...], stored: list[Any]
) -> None:
    options = Options()

    returned = options.anchorTensor("short", "long", *arguments)

    assert returned is None  # as PopTorch's method
    assert options.anchored_tensors == {"short": stored}


def test_a_later_anchor_of_the_same_name_replaces_the_earlier_one() -> None:
    options = Options()
    options.anchorTensor("a", "long", OutputMode.All)

    options.anchorTensor("a", "other")

    assert options.anchored_tensors == {"a": ["other", True, None, 1]}


# Memory proportions, engine options, partials.


@pytest.mark.spec("programs", 10)
def test_memory_proportions_are_stored_by_the_number_of_the_device() -> None:
    options = Options().setAvailableMemoryProportion({"IPU0": 0.2, "IPU1": 2})

    assert options.available_memory_proportion == {0: 0.2, 1: 2}


@pytest.mark.spec("options", 35)
def test_later_memory_proportions_replace_earlier_ones() -> None:
    options = Options().setAvailableMemoryProportion({"IPU0": 0.2, "IPU1": 2})

    options.setAvailableMemoryProportion({"IPU3": 0, "IPU4": 1})

    assert options.available_memory_proportion == {3: 0, 4: 1}
    assert freeze(options, training=False).runtime.memory_proportions == ((3, 0), (4, 1))


def engine(options: Options) -> dict[str, str]:
    stored: dict[str, str] = options._Popart.options["engineOptions"]
    return stored


@pytest.mark.spec("options", 19)
def test_profiling_adds_to_engine_options_set_before() -> None:
    options = Options()
    options._Popart.setEngineOptions({"mine": "1"})

    options.enableProfiling("reports")

    assert engine(options) == {
        "autoReport.all": "true",
        "autoReport.directory": "reports",
        "debug.allowOutOfMemory": "true",
        "mine": "1",
    }


@pytest.mark.spec("runtime", 22)
def test_profiling_without_a_folder_uses_the_working_folder() -> None:
    options = Options().enableProfiling("reports")

    options.enableProfiling()

    assert engine(options)["autoReport.directory"] == "."


@pytest.mark.spec("options", 19)
def test_engine_options_replace_those_of_profiling_set_before() -> None:
    options = Options().enableProfiling("reports")

    options._Popart.setEngineOptions({"mine": "1"})

    assert engine(options) == {"mine": "1"}


def test_profiling_refuses_engine_options_that_are_not_a_dictionary() -> None:
    options = Options()
    options._Popart.set("engineOptions", 1.5)

    with pytest.raises(AssertionError, match="Unexpected type for engineOptions"):
        options.enableProfiling()


@pytest.mark.spec("precision", 16)
@pytest.mark.parametrize("dtype, text", [(torch.float32, "float"), (torch.half, "half")])
def test_a_partials_type_is_for_products_and_convolutions(dtype: torch.dtype, text: str) -> None:
    options = Options()

    options.Precision.setPartialsType(dtype)

    assert options._Popart.options["partialsTypeMatMuls"] == text
    assert options._Popart.options["convolutionOptions"] == {"partialsType": text}


@pytest.mark.spec("options", 33)
def test_dithering_discards_the_partials_of_convolutions_only() -> None:
    options = Options()
    options.Precision.setPartialsType(torch.half)

    options.Training.setConvolutionDithering(True)

    assert options._Popart.options["convolutionOptions"] == {"enableConvDithering": True}
    assert options._Popart.options["partialsTypeMatMuls"] == "half"


# Variables of the environment, read when options are made.


@pytest.mark.spec("runtime", 13)
def test_default_options_of_the_environment_are_read_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Options()
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 3}')

    after = Options()

    assert before.device_iterations == 1
    assert after.device_iterations == 3


@pytest.mark.parametrize(
    "text, error", [("{", ValueError), ('{"unknownSetter": 1}', AttributeError)]
)
def test_default_options_that_cannot_be_applied_are_an_error(
    text: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)

    with pytest.raises(error):
        Options()


@pytest.mark.spec("runtime", 13)
def test_the_number_of_processes_is_read_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")

    assert Options().Distributed.numProcesses == 2


@pytest.mark.spec("runtime", 13)
def test_the_model_of_an_ipu_is_not_read_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")

    assert not Options().exists("use_model")


@pytest.mark.spec("runtime", 13)
def test_the_cache_folder_of_the_environment_is_used_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "folder")

    with caplog.at_level("INFO", logger="poptorch::python"):
        cache = Options()._Popart.options

    assert cache["enableEngineCaching"] is True
    assert cache["cachePath"] == "folder"
    assert "From POPTORCH_CACHE_DIR environment variable" in caplog.text


@pytest.mark.spec("options", 16)
@pytest.mark.spec("programs", 17)
def test_no_caching_wins_over_the_cache_folder_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "folder")

    cache = Options().enableExecutableCaching(None)._Popart.options

    assert cache["enableEngineCaching"] is False
    assert cache["cachePath"] == "folder"


def test_default_options_win_over_the_cache_folder_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "folder")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": "elsewhere"}')

    assert Options()._Popart.options["cachePath"] == "elsewhere"


# The text of options, and copies.


def a_function() -> None:
    """A value whose usual text has an address of memory."""


def configured(order: int) -> Options:
    """Options after the same calls in a random order."""
    calls: list[Callable[[Options], object]] = [
        lambda options: options.modelName("m").deviceIterations(2),
        lambda options: options.setExecutionStrategy(PipelinedExecution(Stage("a"))),
        lambda options: options.Training.gradientAccumulation(8),
        lambda options: options.setAvailableMemoryProportion({"IPU0": 0.1, "IPU1": 0.2}),
        lambda options: options._Popart.set("strange", object()),
        lambda options: options._Popart.set("callback", a_function),
        lambda options: options._Popart.set("dotChecks", {"b", "a"}),
    ]
    options = Options().replicationFactor(4)
    for call in random.Random(order).sample(calls, len(calls)):
        call(options)
    return options


@pytest.mark.spec("options", 25)
def test_the_text_of_options_does_not_depend_on_the_order_of_calls() -> None:
    assert repr(configured(order=1)) == repr(configured(order=2))


@pytest.mark.spec("options", 25)
@pytest.mark.parametrize("part", [" at 0x", "\n"], ids=["an address", "a line break"])
def test_the_text_of_options_holds_values_only(part: str) -> None:
    assert part not in repr(configured(order=1))


@pytest.mark.spec("options", 25)
def test_the_text_of_options_lists_changes_in_the_order_of_the_table() -> None:
    assert repr(configured(order=1)).startswith(
        "Options(replication_factor=4, device_iterations=2, available_memory_proportion="
        "{0: 0.1, 1: 0.2}, model_name='m', _execution_strategy=PipelinedExecution(Stage('a')), "
        "Training=_TrainingOptions(gradient_accumulation=8), _Popart=_PopartOptions(callback="
    )


def test_options_with_another_value_have_another_text() -> None:
    other = configured(order=1)

    other.Training.gradientAccumulation(4)

    assert repr(other) != repr(configured(order=1))


@pytest.fixture
def holding() -> Options:
    """Options that hold values which can be changed in place."""
    strategy = poptorch.SerialPhasedExecution("a", "b").useSeparateBackwardPhase()
    options = Options().setExecutionStrategy(strategy)
    options.anchorTensor("x", "y")
    options._Popart.set("engineOptions", {"k": "v"})
    return options


@pytest.fixture(params=["cloned", "pickled"])
def copied(request: pytest.FixtureRequest, holding: Options) -> Options:
    """A copy of the options."""
    return holding.clone() if request.param == "cloned" else pickle.loads(pickle.dumps(holding))


@pytest.mark.spec("options", 26, 38)
def test_a_copy_has_the_text_of_its_original(holding: Options, copied: Options) -> None:
    assert repr(copied) == repr(holding)


@pytest.mark.spec("options", 26)
def test_a_clone_copies_the_contents_of_values_too(holding: Options, copied: Options) -> None:
    text = repr(holding)

    copied.anchored_tensors["x"][0] = "changed"
    copied._Popart.options["engineOptions"]["k"] = "w"
    copied._execution_strategy.stage("a").ipu(3)

    assert copied._execution_strategy.phase(0).stage(0)._ipu == 3
    assert repr(holding) == text


# All options in one dictionary.


@pytest.mark.spec("options", 31)
def test_a_dictionary_of_options_needs_an_output_mode() -> None:
    with pytest.raises(AssertionError, match="An output mode must be picked"):
        Options().toDict()


def test_a_dictionary_of_options_has_every_group_on_one_level() -> None:
    options = Options().replicationFactor(3).outputMode(OutputMode.All)
    options.TensorLocations.numIOTiles(32)
    options._Popart.set("outlineThreshold", 1.5)
    options.setExecutionStrategy(poptorch.SerialPhasedExecution("A"))

    result = options.toDict()

    assert result["replication_factor"] == 3
    assert result["gradient_accumulation"] == 1
    assert result["num_distributed_processes"] == 1
    assert result["numIOTiles"] == 32
    assert result["outlineThreshold"] == 1.5
    assert result["execution_mode"] == 2
    assert result["serial_phases_execution"] is True


def test_a_dictionary_of_options_has_the_function_of_a_bar_that_is_shown() -> None:
    options = Options().outputMode(OutputMode.All)

    shown = options.toDict()
    hidden = options.showCompilationProgressBar(False).toDict()

    assert callable(shown["compilation_progress_bar_fn"])
    assert "compilation_progress_bar_fn" not in hidden


def test_a_dictionary_of_options_refuses_a_name_of_two_groups() -> None:
    options = Options().outputMode(OutputMode.All)
    options.TensorLocations.numIOTiles(32)
    options._Popart.set("numIOTiles", 64)

    with pytest.raises(AssertionError, match="set twice"):
        options.toDict()


# Defaults.


@pytest.mark.parametrize("field", ["loops.iterations", "runtime.max_repeat_logs", "lanes"])
def test_a_row_has_the_default_of_its_field(field: str) -> None:
    default = Value("name", OF_FIELD, field=field).default

    assert default == functools.reduce(getattr, field.split("."), Spec())


def test_options_start_with_the_defaults_of_the_fields() -> None:
    opts = Options()

    assert opts.device_iterations == Spec().loops.iterations
