"""``Options``: general setters, defaults, repr, copies (spec/options.md sections 2 to 4)."""

import random

import pytest
import torch

from poptorch.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.options import (
    Options,
    PipelinedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)

DEFAULTS = {
    "replication_factor": 1,
    "input_group_size": 1,
    "input_cgt": CommGroupType.Consecutive,
    "broadcast_buffers": True,
    "device_iterations": 1,
    "log_dir": ".",
    "max_repeat_logs": 4,
    "auto_round_num_ipus": False,
    "anchored_tensors": {},
    "output_mode": 4,
    "output_return_period": 1,
    "connection_type": 0,
    "sync_pattern": 0,
    "available_memory_proportion": {},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_stored_defaults(name):
    assert Options()(name) == DEFAULTS[name]


def test_private_state_that_outside_code_reads():
    options = Options()
    assert isinstance(options._execution_strategy, PipelinedExecution)
    assert options._popart is options._Popart
    assert options._relax_optimizer_checks is False
    assert options._show_compilation_progress_bar is True
    assert options._module_namescope_enabled is True
    assert len(options._source_location_excludes) == 3


@pytest.mark.spec("options", 6)
def test_values_created_on_first_use():
    options = Options()
    names = ("random_seed", "ipu_id", "use_model", "model_name", "ipu_version")
    assert not any(options.exists(name) for name in names)
    options.randomSeed(1).useIpuId(0).useIpuModel(True).modelName("m").useOfflineIpuTarget()
    assert [options(name) for name in names] == [1, 0, True, "m", 2]


@pytest.mark.spec("programs", 1)
def test_setters_chain():
    options = Options()
    chain = (
        options.deviceIterations(4)
        .replicationFactor(2)
        .broadcastBuffers(False)
        .autoRoundNumIPUs()
        .setAvailableMemoryProportion({"IPU0": 0.5})
        .syncPattern(SyncPattern.ReplicaAndLadder)
        .enableStableNorm(True)
        .enableSyntheticData(False)
        .logDir("logs")
        .logCycleCount(True)
        .showCompilationProgressBar(False)
        .disableModuleNamescope()
        .relaxOptimizerAttributesChecks()
        .updatableNamedBuffers(["b"])
        .setExecutionStrategy(ShardedExecution())
        .backend("reference")
    )
    assert chain is options
    assert options.broadcast_buffers is False
    assert options.auto_round_num_ipus is True
    assert options._Popart.options["updatableNamedBuffers"] == ["b"]
    assert options._values["backend"] == "reference"


@pytest.mark.spec("options", 7)
def test_random_seed_seeds_the_host_at_once():
    torch.manual_seed(17)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Options().randomSeed(17)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(AssertionError):
        Options().randomSeed("17")


def test_a_frozen_random_seed_leaves_the_host_alone():
    options = Options()
    options._freeze()
    state = torch.get_rng_state()
    with pytest.raises(AttributeError, match="frozen"):
        options.randomSeed(3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.spec("options", 8)
def test_enums_are_stored_as_ints_but_only_members_are_accepted():
    options = Options()
    options.connectionType(ConnectionType.OnDemand).outputMode(OutputMode.Sum)
    options.syncPattern(SyncPattern.SinglePipeline)
    stored = (options.connection_type, options.output_mode, options.sync_pattern)
    assert stored == (1, 3, 1)
    assert {type(value) for value in stored} == {int}
    for setter in (options.connectionType, options.outputMode, options.syncPattern):
        with pytest.raises(AssertionError):
            setter(1)


@pytest.mark.spec("options", 10)
def test_input_grouping_is_checked_against_the_factor_set_before():
    options = Options().replicationFactor(4)
    for size, kind, phrase in (
        (2, CommGroupType.All, "cannot be All"),
        (8, CommGroupType.Consecutive, "cannot be larger than"),
        (3, CommGroupType.Orthogonal, "must be a factor of"),
    ):
        with pytest.raises(ValueError, match=phrase):
            options.inputReplicaGrouping(size, kind)
    with pytest.raises(ValueError, match="cannot be larger than"):
        Options().inputReplicaGrouping(2, CommGroupType.Consecutive)
    options.inputReplicaGrouping(2, CommGroupType.Orthogonal)
    assert (options.input_group_size, options.input_cgt) == (2, CommGroupType.Orthogonal)


@pytest.mark.spec("options", 11)
@pytest.mark.parametrize("anything", [1, 7, None, "x"])
def test_no_grouping_means_size_one(anything):
    options = Options().inputReplicaGrouping(anything, CommGroupType.NoGrouping)
    assert (options.input_group_size, options.input_cgt) == (1, CommGroupType.Consecutive)


def test_output_modes(caplog):
    options = Options().outputMode(OutputMode.EveryN, 3)
    assert (options.output_mode, options.output_return_period) == (1, 3)
    assert not options.defaultOutputMode()
    with caplog.at_level("INFO", logger="poptorch::python"):
        options.outputMode(OutputMode.All, 7)
    assert "ignored" in caplog.text
    options.outputMode(OutputMode.Default)
    assert options.defaultOutputMode()


def test_every_n_needs_a_positive_period_at_once():
    for period in (None, 0, -1, 1.0, "2"):
        with pytest.raises(AssertionError):
            Options().outputMode(OutputMode.EveryN, period)


@pytest.mark.spec("options", 14)
def test_an_anchors_period_is_one_unless_every_n():
    options = Options()
    assert options.anchorTensor("a", "long", OutputMode.All, 7) is None
    options.anchorTensor("b", "long", OutputMode.EveryN, 7)
    options.anchorTensor("c", "long")
    assert options.anchored_tensors == {
        "a": ["long", False, OutputMode.All, 1],
        "b": ["long", False, OutputMode.EveryN, 7],
        "c": ["long", True, None, 1],
    }
    options.anchorTensor("a", "other")
    assert options.anchored_tensors["a"][0] == "other"


def test_anchors_cannot_be_added_to_frozen_options():
    options = Options()
    options._freeze()
    with pytest.raises(AttributeError, match="frozen"):
        options.anchorTensor("a", "b")


@pytest.mark.spec("options", 16)
@pytest.mark.spec("programs", 17)
def test_caching_can_be_switched_off_again(monkeypatch, tmp_path):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    options = Options()
    assert options._Popart.options["enableEngineCaching"] is True
    options.enableExecutableCaching(None)
    assert options._Popart.options["enableEngineCaching"] is False
    assert options._Popart.options["cachePath"] == str(tmp_path)


def test_the_cache_variable_is_logged(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    with caplog.at_level("INFO", logger="poptorch::python"):
        Options()
    assert "From POPTORCH_CACHE_DIR environment variable" in caplog.text


@pytest.mark.spec("runtime", 13)
def test_the_environment_is_read_at_construction(monkeypatch, tmp_path):
    before = Options()
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 3}')
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    after = Options()
    assert (before.device_iterations, after.device_iterations) == (1, 3)
    assert after.Distributed.numProcesses == 2
    assert after._Popart.options["cachePath"] == str(tmp_path)
    assert not after.exists("use_model")  # read at compile
    assert after.deviceIterations(5).device_iterations == 5


def test_default_options_win_over_the_dedicated_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": "elsewhere"}')
    assert Options()._Popart.options["cachePath"] == "elsewhere"


def test_bad_default_options_fail_the_constructor(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "{")
    with pytest.raises(ValueError):
        Options()
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"unknownSetter": 1}')
    with pytest.raises(AttributeError):
        Options()


@pytest.mark.spec("options", 35)
@pytest.mark.spec("programs", 10)
def test_memory_proportions_replace_each_other():
    options = Options().setAvailableMemoryProportion({"IPU0": 0.2, "IPU1": 2})
    assert options.available_memory_proportion == {0: 0.2, 1: 2}
    assert options.setAvailableMemoryProportion({"IPU3": 0.1}) is options
    assert options.available_memory_proportion == {3: 0.1}
    with pytest.raises(AssertionError):
        options.setAvailableMemoryProportion({"CPU0": 0.1})
    with pytest.raises(ValueError):
        options.setAvailableMemoryProportion({"IPUx": 0.1})
    assert options.available_memory_proportion == {3: 0.1}


@pytest.mark.spec("options", 36)
def test_unlimited_repeated_logs_are_an_int():
    assert Options().maxRepeatLogs(None).max_repeat_logs == 2**64 - 1
    assert Options().maxRepeatLogs(9).max_repeat_logs == 9


@pytest.mark.spec("options", 18)
def test_an_offline_target_implies_never():
    options = Options().useOfflineIpuTarget()
    assert (options.connection_type, options.ipu_version) == (ConnectionType.Never, 2)
    options.connectionType(ConnectionType.Always)
    assert (options.connection_type, options.ipu_version) == (ConnectionType.Always, 2)


@pytest.mark.spec("runtime", 22)
def test_profiling_keeps_engine_options_set_before():
    options = Options()
    options._Popart.setEngineOptions({"mine": "1"})
    options.enableProfiling("reports")
    assert options._Popart.options["engineOptions"] == {
        "mine": "1",
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": "reports",
        "autoReport.all": "true",
    }
    options.enableProfiling()
    assert options._Popart.options["engineOptions"]["autoReport.directory"] == "."


@pytest.mark.spec("options", 19)
def test_engine_options_set_after_profiling_replace_it():
    options = Options().enableProfiling()
    options._Popart.setEngineOptions({"mine": "1"})
    assert options._Popart.options["engineOptions"] == {"mine": "1"}


def test_source_location_excludes():
    options = Options().sourceLocationExcludes(["a"]).appendToLocationExcludes("b", "c")
    assert options._source_location_excludes == ["a", "b", "c"]
    with pytest.raises(AssertionError):
        options.sourceLocationExcludes("abc")


@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.modelName(3),
        lambda o: o.enableStableNorm("no"),
        lambda o: o.Precision.enableStochasticRounding("no"),
        lambda o: o.Training.setAutomaticLossScaling("no"),
        lambda o: o.Training.setConvolutionDithering("no"),
        lambda o: o.enableExecutableCaching(3),
        lambda o: o.enablePipelining(torch.ones(2)),
        lambda o: o.profile(torch.ones(2)),
        lambda o: o.enableProfiling(torch.ones(2)),
        lambda o: o.useOfflineIpuTarget(torch.ones(2)),
        lambda o: o.updatableNamedBuffers((1, 2)),
        lambda o: o.updatableNamedBuffers("weight"),
    ],
)
def test_a_value_of_another_type_is_refused_at_once(call):
    options = Options()
    text = repr(options)
    with pytest.raises(AssertionError, match="Unexpected type"):
        call(options)
    assert repr(options) == text


def test_engine_options_that_are_no_dict_are_not_added_to():
    options = Options()
    options._Popart.set("engineOptions", 1.5)
    with pytest.raises(AssertionError, match="Unexpected type for engineOptions"):
        options.enableProfiling()


@pytest.mark.parametrize("seed", [10**30, -(10**20), 1 << 64])
def test_seeds_that_torch_has_no_room_for(seed):
    with pytest.raises(ValueError, match="The random seed is out of range"):
        Options().randomSeed(seed)


def test_a_strategy_must_be_one_of_the_four():
    with pytest.raises(AssertionError):
        Options().setExecutionStrategy("pipelined")


def test_repr_starts_with_the_values_then_the_groups():
    text = repr(Options().replicationFactor(4).modelName("net"))
    assert text.startswith("Options(replication_factor=4, input_group_size=1, ")
    assert "model_name='net'" in text
    groups = ["Distributed=", "Jit=", "Precision=", "TensorLocations=", "Training=", "_Popart="]
    places = [text.index(f", {name}_") for name in groups]
    assert places == sorted(places)
    assert "\n" not in text
    assert "Popart=_Popart" in text
    assert "GraphProcessing" not in text


def _configure(options, order):
    settings = TensorLocationSettings().useOnChipStorage(False)
    calls = [
        lambda: options.deviceIterations(2),
        lambda: options.randomSeed(3),
        lambda: options.modelName("m"),
        lambda: options.Training.gradientAccumulation(8),
        lambda: options.TensorLocations.setWeightLocation(settings),
        lambda: options.setAvailableMemoryProportion({"IPU0": 0.1, "IPU1": 0.2}),
        lambda: options._Popart.set("strange", object()),
        lambda: options._Popart.set("callback", print_twice),
        lambda: options._Popart.set("dotChecks", {"b", "a"}),
    ]
    random.Random(order).shuffle(calls)
    for call in calls:
        call()
    return options


def print_twice():
    pass


@pytest.mark.spec("options", 25)
def test_repr_compares_configurations():
    first, second = _configure(Options(), 1), _configure(Options(), 2)
    assert repr(first) == repr(second)
    assert " at 0x" not in repr(first)
    assert "Training=_TrainingOptions(gradient_accumulation=8, " in repr(first)
    second.Training.gradientAccumulation(4)
    assert repr(first) != repr(second)


@pytest.mark.spec("options", 26)
def test_changing_a_clone_never_changes_the_original():
    options = Options().setExecutionStrategy(PipelinedExecution(Stage("a")))
    options.anchorTensor("x", "y")
    options._Popart.set("engineOptions", {"k": "v"})
    text = repr(options)
    clone = options.clone()
    clone.anchorTensor("x", "z")
    clone.anchored_tensors["x"][0] = "changed"
    clone._Popart.options["engineOptions"]["k"] = "w"
    clone._execution_strategy.stage("a").ipu(3)
    clone.Training.gradientAccumulation(5)
    assert repr(options) == text
    assert repr(options._execution_strategy) == "PipelinedExecution(Stage('a'))"
    assert repr(clone._execution_strategy) == "PipelinedExecution(Stage('a').ipu(3))"


def test_every_setter_of_frozen_options_is_refused():
    options = Options()
    options._freeze()
    settings = TensorLocationSettings()
    for write in (
        lambda: options.deviceIterations(2),
        lambda: options.setExecutionStrategy(ShardedExecution()),
        lambda: options.enableProfiling(),
        lambda: options.showCompilationProgressBar(False),
        lambda: options.disableModuleNamescope(),
        lambda: options.sourceLocationExcludes([]),
        lambda: options.appendToLocationExcludes("a"),
        lambda: options.relaxOptimizerAttributesChecks(),
        lambda: options.Training.gradientAccumulation(2),
        lambda: options.Training.setAutomaticLossScaling(True),
        lambda: options.Precision.enableStochasticRounding(True),
        lambda: options.Precision.narrow64Bit(False),
        lambda: options.Precision.halfFloatCasting(0),
        lambda: options.Distributed.disable(),
        lambda: options.TensorLocations.setWeightLocation(settings),
        lambda: options.Jit.traceModel(False),
        lambda: options._Popart.set("a", 1),
        lambda: options._popart.setPatterns({}),
    ):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            write()
    assert repr(options) == repr(Options())


def test_to_dict_needs_an_output_mode():
    with pytest.raises(AssertionError, match="An output mode must be picked"):
        Options().toDict()


def test_to_dict_merges_every_group_flat():
    options = Options().outputMode(OutputMode.All).replicationFactor(3)
    options.TensorLocations.numIOTiles(32)
    options._Popart.set("outlineThreshold", 1.5)
    result = options.toDict()
    for key, value in {
        "execution_mode": 0,
        "outlineThreshold": 1.5,
        "replication_factor": 3,
        "gradient_accumulation": 1,
        "num_distributed_processes": 1,
        "numIOTiles": 32,
    }.items():
        assert result[key] == value
    assert callable(result["compilation_progress_bar_fn"])
    options.showCompilationProgressBar(False)
    assert "compilation_progress_bar_fn" not in options.toDict()


def test_to_dict_refuses_a_key_of_two_groups():
    options = Options().outputMode(OutputMode.All)
    options.TensorLocations.numIOTiles(32)
    options._Popart.set("numIOTiles", 64)
    with pytest.raises(AssertionError, match="set twice"):
        options.toDict()


@pytest.mark.parametrize("name", ["enableSyntheticData", "logCycleCount", "enableStableNorm"])
def test_a_text_is_no_flag(name):
    options = Options()
    with pytest.raises(AssertionError, match="Unexpected type"):
        getattr(options, name)("no")
    assert repr(options) == repr(Options())
