"""Rules of options beyond types: at once, and when the Spec is made; lines of the log."""

import pickle
import random

import pytest
import torch

import poptorch
from poptorch._ir.spec import Location
from poptorch.enums import CommGroupType, ConnectionType, OutputMode, ReductionType
from poptorch.options import (
    Options,
    PipelinedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)
from poptorch.options.freeze import engine_options, freeze, log_options, prepare


def group(options: Options, size: int, kind: CommGroupType) -> None:
    options.replicationFactor(4).inputReplicaGrouping(size, kind)


@pytest.mark.spec("options", 8, 10, 12, 21, 37)
@pytest.mark.spec("precision", 16)
@pytest.mark.parametrize("call, values, error, phrase", [
    (lambda o, v: o.Training.accumulationAndReplicationReductionType(v),
     [poptorch.ReductionType.NoReduction, 0, "Mean"], ValueError, "must be set to"),
    (lambda o, v: o.Precision.setPartialsType(v), ["half", torch.int8], ValueError, "must be"),
    (lambda o, v: o.Precision.runningStatisticsAlwaysFloat(v), ["yes"], ValueError, "True or"),
    (lambda o, v: o.TensorLocations.numIOTiles(v), [33, 30, 194, True], AssertionError, "even"),
    (lambda o, v: o.randomSeed(v), [1 << 64, -(10**20)], ValueError, "out of range"),
    (lambda o, v: o.outputMode(OutputMode.EveryN, v), [None, 0, "2"], AssertionError, "period"),
    (lambda o, v: o.anchorTensor("a", "b", OutputMode.EveryN, v),
     [None, 0], AssertionError, "needs a positive output_return_period"),
    (lambda o, v: o.setAvailableMemoryProportion({v: 0.1}),
     ["CPU0", 0], AssertionError, "must start with IPU"),
    (lambda o, v: o.setAvailableMemoryProportion({v: 0.1}),
     ["IPUx", "IPU"], ValueError, "must be an integer"),
    (lambda o, v: o.connectionType(v), [1], AssertionError, "Unexpected type"),
    (lambda o, v: o.updatableNamedBuffers(v), [(1, 2), "weight"], AssertionError, "type"),
    (lambda o, v: o._Popart.setPatterns(*v), [([], 1), ({}, "1")], AssertionError, "type"),
    (lambda o, v: group(o, 2, v), [CommGroupType.All], ValueError, "cannot be All"),
    (lambda o, v: group(o, v, CommGroupType.Consecutive), [8], ValueError, "larger than"),
    (lambda o, v: group(o, v, CommGroupType.Orthogonal), [3], ValueError, "a factor of"),
])  # fmt: skip
def test_what_is_refused_at_once(call, values, error, phrase: str, caplog) -> None:
    for value in values:
        options = Options()
        with pytest.raises(error, match=phrase):
            call(options, value)
        assert repr(options.replicationFactor(1)) == repr(Options())
    assert not caplog.records


@pytest.mark.spec("options", 6, 7, 9, 18, 36)
def test_how_values_are_stored() -> None:
    options = Options()
    names = ("random_seed", "ipu_id", "use_model", "model_name", "ipu_version")
    assert not any(options.exists(name) for name in names)
    torch.manual_seed(17)
    expected = torch.rand(3)
    torch.manual_seed(1)
    options.randomSeed(17).useIpuId(0).useIpuModel(True).modelName("m").useOfflineIpuTarget()
    assert torch.equal(torch.rand(3), expected)  # the host has the seed at once
    assert options.connection_type == ConnectionType.Never
    assert [options(name) for name in names] == [17, 0, True, "m", 2]
    options.connectionType(ConnectionType.OnDemand).outputMode(OutputMode.Sum)
    options.syncPattern(poptorch.SyncPattern.SinglePipeline)
    stored = (options.connection_type, options.output_mode, options.sync_pattern)
    assert (stored, options.ipu_version) == ((1, 3, 1), 2)
    assert {type(value) for value in stored} == {int}
    assert options.maxRepeatLogs(None).max_repeat_logs == 2**64 - 1  # an int without a limit
    assert (poptorch.VariableRetrievalMode.AllReplicas, OutputMode.Final) == (2, 0)
    options.sourceLocationExcludes(["a"]).appendToLocationExcludes("b", "c")
    assert options._source_location_excludes == ["a", "b", "c"]
    for behaviour in poptorch.HalfFloatCastingBehavior:
        assert Options().Precision.halfFloatCasting(int(behaviour)).half_float_casting is behaviour


@pytest.mark.spec("options", 10, 11)
def test_input_grouping_is_checked_against_the_factor_set_before() -> None:
    options = Options().replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Orthogonal)
    assert (options.input_group_size, options.input_cgt) == (2, CommGroupType.Orthogonal)
    for anything in (1, 7, None, "x"):
        options.inputReplicaGrouping(anything, CommGroupType.NoGrouping)
        assert (options.input_group_size, options.input_cgt) == (1, CommGroupType.Consecutive)


@pytest.mark.spec("options", 14)
def test_output_modes_and_periods_also_of_anchors(caplog) -> None:
    options = Options().outputMode(OutputMode.EveryN, 3)
    assert (options.output_mode, options.output_return_period) == (1, 3)
    assert not options.defaultOutputMode()
    with caplog.at_level("INFO", logger="poptorch::python"):
        options.outputMode(OutputMode.All, 7)
    assert "ignored" in caplog.text
    assert options.outputMode(OutputMode.Default).defaultOutputMode()
    assert options.anchorTensor("a", "long", OutputMode.All, 7) is None
    options.anchorTensor("b", "long", OutputMode.EveryN, 7)
    options.anchorTensor("c", "long")
    assert options.anchored_tensors == {"a": ["long", False, OutputMode.All, 1],
                                        "b": ["long", False, OutputMode.EveryN, 7],
                                        "c": ["long", True, None, 1]}  # fmt: skip
    options.anchorTensor("a", "other")
    assert options.anchored_tensors["a"][0] == "other"


@pytest.mark.spec("options", 19, 35)
@pytest.mark.spec("programs", 10)
@pytest.mark.spec("runtime", 22)
def test_later_memory_proportions_and_engine_options_replace_earlier_ones() -> None:
    options = Options().setAvailableMemoryProportion({"IPU0": 0.2, "IPU1": 2})
    assert options.available_memory_proportion == {0: 0.2, 1: 2}
    options.setAvailableMemoryProportion({"IPU3": 0, "IPU4": 1})
    assert options.available_memory_proportion == {3: 0, 4: 1}
    assert freeze(options, training=False).runtime.memory_proportions == ((3, 0), (4, 1))
    options = Options()
    options._Popart.setEngineOptions({"mine": "1"})
    options.enableProfiling("reports")
    assert options._Popart.options["engineOptions"] == {
        "mine": "1", "debug.allowOutOfMemory": "true", "autoReport.directory": "reports",
        "autoReport.all": "true",
    }  # fmt: skip
    options.enableProfiling()
    assert options._Popart.options["engineOptions"]["autoReport.directory"] == "."
    options._Popart.setEngineOptions({"mine": "1"})
    assert options._Popart.options["engineOptions"] == {"mine": "1"}
    options._Popart.set("engineOptions", 1.5)
    with pytest.raises(AssertionError, match="Unexpected type for engineOptions"):
        options.enableProfiling()


@pytest.mark.spec("options", 33)
@pytest.mark.spec("precision", 16)
def test_dithering_discards_the_partials_of_convolutions_only() -> None:
    options = Options()
    for dtype, text in ((torch.float32, "float"), (torch.half, "half")):
        options.Precision.setPartialsType(dtype)
        assert options._Popart.options["partialsTypeMatMuls"] == text
        assert options._Popart.options["convolutionOptions"] == {"partialsType": text}
    options.Training.setConvolutionDithering(True)
    assert options._Popart.options["convolutionOptions"] == {"enableConvDithering": True}
    assert options._Popart.options["partialsTypeMatMuls"] == "half"


@pytest.mark.spec("options", 30)
def test_the_process_by_openmpi_by_hand_and_by_variables(monkeypatch) -> None:
    def place() -> tuple[int, int]:
        return distributed.processId, distributed.numProcesses

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert place() == (3, 4)
    assert distributed.disable() is distributed
    assert place() == (0, 1)
    distributed.configureProcessId(2, 5)
    assert place() == (2, 5)
    monkeypatch.setenv("MY_COUNT", "7")
    distributed.setEnvVarNames("MY_COUNT", "MY_ID")
    assert place() == (0, 7)
    monkeypatch.setenv("MY_ID", "first")
    with pytest.raises(ValueError):
        distributed.setEnvVarNames("MY_COUNT", "MY_ID")


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1"}, {}]
)
def test_processes_that_cannot_meet_are_an_error(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = Options()
    if not variables:
        options.Distributed.configureProcessId(1, 2)
    model = torch.nn.Linear(1, 1)
    training = poptorch.trainingModel(model, options, loss=torch.nn.L1Loss())
    title = "Nothing says where the processes of this job meet"
    with pytest.raises(poptorch.Error, match=title) as caught:
        training(torch.ones(1, 1), torch.ones(1, 1))
    for said in ("of 2", "Distributed.disable()", "test_rules.py"):
        assert said in str(caught.value)
    training.destroy()
    other = poptorch.inferenceModel(model, options)  # it waits for nobody
    assert other(torch.ones(1, 1)).shape == (1, 1)


@pytest.mark.spec("options", 22)
def test_locations_are_snapshots_of_their_settings() -> None:
    settings = TensorLocationSettings()
    assert settings.toDict() == {}
    settings.minElementsForOffChip(3).minElementsForReplicatedTensorSharding(4)
    settings.useOnChipStorage(False).useReplicatedTensorSharding()
    settings.useIOTilesToLoad().useIOTilesToStore(False)
    known = {
        "minElementsForOffChip": 3, "minElementsForReplicatedTensorSharding": 4, "onChip": 0,
        "useReplicatedTensorSharding": 1, "useIOTilesToLoad": 1, "useIOTilesToStore": 0,
    }  # fmt: skip
    assert settings.toDict() == known
    options = Options()
    options.TensorLocations.setWeightLocation(settings)
    settings.useOnChipStorage(None)
    assert not settings.exists("onChip")
    assert options.TensorLocations.location_weight == known
    for setter in (settings.useIOTilesToLoad, settings.minElementsForOffChip):
        with pytest.raises(AssertionError):
            setter("1")


@pytest.mark.spec("runtime", 13)
@pytest.mark.spec("options", 16)
@pytest.mark.spec("programs", 17)
def test_the_environment_is_read_at_construction(monkeypatch, tmp_path, caplog) -> None:
    before = Options()
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 3}')
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    with caplog.at_level("INFO", logger="poptorch::python"):
        after = Options()
    assert "From POPTORCH_CACHE_DIR environment variable" in caplog.text
    assert (before.device_iterations, after.device_iterations) == (1, 3)
    assert after.Distributed.numProcesses == 2
    assert not after.exists("use_model")  # read at compile
    cache = after._Popart.options
    assert (cache["enableEngineCaching"], cache["cachePath"]) == (True, str(tmp_path))
    after.enableExecutableCaching(None)
    assert (cache["enableEngineCaching"], cache["cachePath"]) == (False, str(tmp_path))
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": "elsewhere"}')
    assert Options()._Popart.options["cachePath"] == "elsewhere"
    for text, error in (("{", ValueError), ('{"unknownSetter": 1}', AttributeError)):
        monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)
        with pytest.raises(error):
            Options()


@pytest.mark.spec("options", 25)
def test_repr_compares_configurations() -> None:
    calls = [
        lambda options: options.modelName("m").deviceIterations(2),
        lambda options: options.setExecutionStrategy(PipelinedExecution(Stage("a"))),
        lambda options: options.Training.gradientAccumulation(8),
        lambda options: options.setAvailableMemoryProportion({"IPU0": 0.1, "IPU1": 0.2}),
        lambda options: options._Popart.set("strange", object()),
        lambda options: options._Popart.set("callback", test_repr_compares_configurations),
        lambda options: options._Popart.set("dotChecks", {"b", "a"}),
    ]

    def configured(order: int) -> Options:
        options = Options().replicationFactor(4)
        for call in random.Random(order).sample(calls, len(calls)):
            call(options)
        return options

    first, second = configured(1), configured(2)
    text = repr(first)
    assert text == repr(second)
    assert not [part for part in (" at 0x", "\n") if part in text]
    assert text.startswith(
        "Options(replication_factor=4, device_iterations=2, available_memory_proportion="
        "{0: 0.1, 1: 0.2}, model_name='m', _execution_strategy=PipelinedExecution(Stage('a')), "
        "Training=_TrainingOptions(gradient_accumulation=8), _Popart=_PopartOptions(callback="
    )
    second.Training.gradientAccumulation(4)
    assert repr(first) != repr(second)


def test_what_values_hold_is_copied_too() -> None:
    strategy = poptorch.SerialPhasedExecution("a", "b").useSeparateBackwardPhase()
    options = Options().setExecutionStrategy(strategy)
    options.anchorTensor("x", "y")
    options._Popart.set("engineOptions", {"k": "v"})
    text = repr(options)
    for twin in (options.clone(), pickle.loads(pickle.dumps(options))):
        assert repr(twin) == text
        twin.anchored_tensors["x"][0] = "changed"
        twin._Popart.options["engineOptions"]["k"] = "w"
        twin._execution_strategy.stage("a").ipu(3)
        assert (twin._execution_strategy.phase(0).stage(0)._ipu, repr(options)) == (3, text)


def test_to_dict_merges_every_group_flat() -> None:
    options = Options().replicationFactor(3)
    with pytest.raises(AssertionError, match="An output mode must be picked"):
        options.toDict()
    options.outputMode(OutputMode.All).TensorLocations.numIOTiles(32)
    options._Popart.set("outlineThreshold", 1.5)
    options.setExecutionStrategy(poptorch.SerialPhasedExecution("A"))
    expected = {
        "execution_mode": 2, "serial_phases_execution": True, "outlineThreshold": 1.5,
        "replication_factor": 3, "gradient_accumulation": 1, "num_distributed_processes": 1,
        "numIOTiles": 32,
    }  # fmt: skip
    result = options.toDict()
    assert {key: result[key] for key in expected} == expected
    assert callable(result["compilation_progress_bar_fn"])
    options.showCompilationProgressBar(False)
    assert "compilation_progress_bar_fn" not in options.toDict()
    options._Popart.set("numIOTiles", 64)
    with pytest.raises(AssertionError, match="set twice"):
        options.toDict()


@pytest.mark.spec("options", 13)
def test_anchors_without_a_mode_inherit_the_resolved_one() -> None:
    options = Options().deviceIterations(4)
    options.anchorTensor("a", "x")
    options.anchorTensor("b", "y", OutputMode.Sum)
    assert prepare(options, training=True).anchored_tensors["a"][2:] == [OutputMode.Final, 1]
    assert prepare(options, training=False).anchored_tensors["a"][2:] == [OutputMode.All, 1]
    every = options.clone().outputMode(OutputMode.EveryN, 2)
    own = prepare(every, training=True)
    assert own.anchored_tensors["a"][2:] == [OutputMode.EveryN, 2]
    anchors = (("a", "x", OutputMode.EveryN, 2), ("b", "y", OutputMode.Sum, 1))
    assert freeze(own, True).anchors == freeze(every, True).anchors == anchors


@pytest.mark.spec("programs", 3)
def test_inference_ignores_no_accumulation_but_refuses_it_when_prepared() -> None:
    options = Options()
    options.Training.gradientAccumulation(4)
    with pytest.raises(poptorch.Error, match=r"(?s)gradientAccumulation to 1.*deviceIterations"):
        prepare(options, training=False)
    options.setExecutionStrategy(ShardedExecution())
    with pytest.raises(poptorch.Error, match="gradientAccumulation to 1") as caught:
        prepare(options, training=False)
    assert "deviceIterations" not in str(caught.value)
    assert options.deviceIterations(2).device_iterations == 2  # not frozen by the failure


@pytest.mark.parametrize("configure, phrase", [
    (lambda o: o.Distributed.configureProcessId(2, 2), "process id"),
    (lambda o: o.Distributed.configureProcessId(0, 0), "at least 1"),
    (lambda o: o.Distributed.configureProcessId(0, 3).stageProcesses(2),
     "must divide the number of processes"),
    (lambda o: o.backend("reference").Distributed.configureProcessId(0, 2).stageProcesses(2),
     "Only the staged backend"),
    (lambda o: o.useIpuModel(True).useOfflineIpuTarget(), "not supported for the IPU model"),
    (lambda o: o.useIpuId(1).useOfflineIpuTarget(), "useIpuId"),
    (lambda o: o.useOfflineIpuTarget(3), "Invalid offline IPU version"),
    (lambda o: o.anchorTensor("a", "b", OutputMode.EveryN, 2), "must divide deviceIterations"),
    (lambda o: o.outputMode(OutputMode.EveryN, 4).deviceIterations(6),
     "must divide deviceIterations"),
    (lambda o: o.replicationFactor(4).inputReplicaGrouping(4).replicationFactor(6),
     "must be a factor of"),
    (lambda o: o._Popart.set("partialsTypeMatMuls", "double"), "float or half"),
    (lambda o: setattr(o, "sync_pattern", 9), "sync_pattern holds no SyncPattern"),
    (lambda o: setattr(o, "output_mode", 9), "output_mode holds no OutputMode"),
    (lambda o: o.setAvailableMemoryProportion({"IPU0": [1]}), "must be numbers"),
    (lambda o: o.setAvailableMemoryProportion({"IPU0": 3}), "numbers from 0 to 1"),
    (lambda o: o._Popart.set("accumulationAndReplicationReductionType", 2),
     "must be set to ReductionType"),
    (lambda o: o._Popart.set("engineOptions", {"a": 1}), "engine options must be str"),
])  # fmt: skip
@pytest.mark.spec("options", 15)
def test_compile_time_conditions(configure, phrase: str) -> None:
    options = Options()
    configure(options)
    with pytest.raises(poptorch.Error, match=phrase):
        freeze(options, training=True)


@pytest.mark.spec("options", 17)
@pytest.mark.spec("runtime", 8)
def test_what_decides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(options: Options | None = None) -> tuple[str, int | None, int | None]:
        target = freeze(options or Options(), training=False).target
        return target.device, target.generation, target.tiles

    assert device() == ("ipu", None, None)
    assert device(Options().useOfflineIpuTarget(21)) == ("offline", 21, None)
    assert device(Options().connectionType(ConnectionType.Never)) == ("offline", None, None)
    monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", "1")
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu21")
    assert device() == ("model", 21, 4)
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert device() == ("model", 21, None)
    assert device(Options().useIpuModel(False)) == ("ipu", None, None)
    monkeypatch.delenv("POPTORCH_IPU_MODEL_VERSION")
    assert device() == ("model", 2, None)
    monkeypatch.delenv("POPTORCH_SMALL_IPU_MODEL")
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "0")
    assert device() == ("ipu", None, None)
    assert device(Options().useIpuModel(True)) == ("model", 2, None)
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu3")
    with pytest.raises(poptorch.Error, match="Invalid IPU model version"):
        device()


@pytest.mark.spec("options", 20)
@pytest.mark.spec("runtime", 28)
def test_the_environments_engine_options_win(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "/env", "extra": "1"}')
    options = Options()
    options._Popart.setEngineOptions({"mine": "2"})
    options.enableProfiling("/mine")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "autoReport.directory is overridden" in warning
    assert engine_options(poptorch.inferenceModel(abs, options).options) == {
        "autoReport.directory": "/env", "autoReport.all": "true", "debug.allowOutOfMemory": "true",
        "mine": "2", "extra": "1",
    }  # fmt: skip
    for bad in ("{", "[]", '{"a": 1}'):
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", bad)
        with pytest.raises(poptorch.Error, match="POPLAR_ENGINE_OPTIONS"):
            freeze(Options(), training=True)


def test_locations_default_to_off_chip_with_phases() -> None:
    assert freeze(Options(), training=True).locations.weight == Location(on_chip=True)
    options = Options().setExecutionStrategy(poptorch.SerialPhasedExecution("A"))
    settings = TensorLocationSettings().useReplicatedTensorSharding().minElementsForOffChip(5)
    options.TensorLocations.setOptimizerLocation(settings)
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage())
    homes = freeze(options, training=True).locations
    assert homes.activation == homes.accumulator == Location(on_chip=False)
    assert homes.weight == Location(on_chip=True)
    assert homes.optimizer == Location(on_chip=False, min_off_chip=5)  # one replica: not sharded
    assert freeze(options.replicationFactor(2), training=True).locations.optimizer.sharded


@pytest.mark.spec("options", 32)
def test_processes_that_share_stages_are_one_share_of_the_data() -> None:
    options = Options().replicationFactor(3)
    options.Distributed.configureProcessId(4, 6).stageProcesses(2)
    spec = freeze(options, training=False)
    assert spec.loops.replicas == 3  # per process
    assert (spec.loops.processes, spec.target.process_id, spec.target.part) == (3, 2, 0)
    assert (spec.processes, spec.process, spec.first_replica) == (6, 4, 6)
    assert spec.target.backend == "staged"
    options.Distributed.configureProcessId(5, 6)
    assert freeze(options, training=False).for_cache() == spec.for_cache()


def test_keys_of_the_backend_beat_the_options_of_their_fields(caplog) -> None:
    options = Options()
    options._Popart.set("accumulationAndReplicationReductionType", 0)
    assert freeze(options, training=True).reduction.type is ReductionType.Sum
    assert "forced by the user" in caplog.text
    for value in (1, 0):
        options._Popart.set("autoRecomputation", value)
        assert freeze(options, training=True).recompute is bool(value)


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def directory(options: Options) -> str | None:
        return freeze(options, training=True).runtime.cache_dir

    assert directory(Options()) is None
    assert directory(Options().enableExecutableCaching("a")) == "a"
    assert directory(Options().enableExecutableCaching("a").enableExecutableCaching(None)) is None
    assert directory(Options().enableExecutableCaching("a").useIpuModel(True)) is None
    monkeypatch.setenv("POPART_CACHE_DIR", "b")
    assert directory(Options()) == "b"
    assert directory(Options().enableExecutableCaching("a")) == "a"
    assert directory(Options().enableExecutableCaching(None)) is None


@pytest.fixture
def lines(caplog):
    def collect(options):
        own = prepare(options, training=True)
        for name in ("poptorch:cpp", "poptorch::python"):
            caplog.set_level("DEBUG", logger=name)
        caplog.clear()
        log_options(own)
        return caplog.messages

    return collect


def test_values_anchors_and_what_decided_device_and_backend_are_told(lines, monkeypatch, tmp_path):
    options = Options().autoRoundNumIPUs().setAvailableMemoryProportion({"IPU1": 0.5})
    options.updatableNamedBuffers(["b1", "b2"]).anchorTensor("short", "long", OutputMode.EveryN, 2)
    found = lines(options)
    for expected in (
        "set auto_round_num_ipus to value true",
        "set available_memory_proportion[1] to 0.5",
        "added b2 to updatableNamedBuffers",
        "set anchored_tensors[short] to long EVERYN/2",
        "set execution_mode to value 0",
    ):
        assert found.count(f"poptorch.Options {expected}") == 1
    assert not any("progress_bar" in line for line in found)
    assert "From the user configuration: Ipu model: Enabled" in lines(Options().useIpuModel(True))
    cached = Options().enableExecutableCaching(str(tmp_path))
    warning = "Executable caching doesn't work with the IPU model: it is switched off"
    assert warning not in lines(cached)
    assert warning in lines(cached.clone().useIpuModel(True))
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    own = Options().setExecutionStrategy(PipelinedExecution("a"))
    assert "From POPTORCH_IPU_MODEL environment variable: Ipu model: Enabled" in lines(own)
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    line = "From POPTORCH_BACKEND environment variable: reference"
    assert line in lines(Options())
    assert line not in lines(Options().backend("inductor"))
