"""From Options to the Spec: resolution, compile-time conditions, hashing."""

import pickle

import pytest
import torch

from poptorch._base.errors import Error
from poptorch._ir.spec import Location, Spec
from poptorch.enums import (
    CommGroupType,
    ConnectionType,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from poptorch.options import (
    Options,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)
from poptorch.options.freeze import engine_options, freeze, prepare, use_running_mean


def test_default_options_are_the_default_spec():
    spec = freeze(Options(), training=True)
    assert spec.for_cache() == Spec(training=True)


def test_prepare_gives_the_executor_its_own_frozen_copy():
    options = Options()
    own = {training: prepare(options, training) for training in (True, False)}
    assert options.defaultOutputMode()
    assert (own[True].output_mode, own[False].output_mode) == (0, 2)
    for frozen in (options, *own.values()):
        with pytest.raises(AttributeError, match="frozen"):
            frozen.Training.gradientAccumulation(2)


@pytest.mark.spec("options", 13)
def test_anchors_without_a_mode_inherit_the_resolved_one():
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


@pytest.mark.spec("options", 31)
@pytest.mark.spec("programs", 2)
def test_the_executors_copy_has_a_dictionary():
    own = prepare(Options().deviceIterations(3), training=True)
    assert own.toDict()["device_iterations"] == 3
    assert own.toDict()["output_mode"] == OutputMode.Final
    with pytest.raises(AttributeError, match="frozen"):
        own.deviceIterations(4)


def test_freeze_leaves_the_options_alone_and_agrees_with_prepare():
    options = Options().deviceIterations(4).randomSeed(3)
    text = repr(options)
    spec = freeze(options, training=False)
    assert repr(options) == text
    assert spec == freeze(prepare(options, training=False), training=False)
    assert spec.output.mode is OutputMode.All


def test_every_setting_reaches_a_hashable_spec_with_a_stable_repr():
    def build():
        options = Options().deviceIterations(4).replicationFactor(4).randomSeed(5)
        options.inputReplicaGrouping(2, CommGroupType.Orthogonal).broadcastBuffers(False)
        options.Training.gradientAccumulation(3)
        options.Training.accumulationAndReplicationReductionType(ReductionType.Sum)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            MeanReductionStrategy.Running
        )
        options.Precision.setPartialsType(torch.half).enableStochasticRounding(True)
        options.Precision.narrow64Bit(False)
        options.setAvailableMemoryProportion({"IPU1": 0.5, "IPU0": 0.25})
        options.updatableNamedBuffers(["b", "a"])
        options._Popart.set("dotChecks", {"x", "y", "z"}).set("autoRecomputation", 2)
        options.TensorLocations.numIOTiles(64)
        options.enableExecutableCaching("cache").modelName("m")
        return options

    spec = freeze(build(), training=True)
    assert hash(spec) == hash(freeze(build(), training=True))
    assert repr(spec) == repr(freeze(build(), training=True))
    assert " at 0x" not in repr(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert (spec.loops.iterations, spec.loops.accumulation, spec.loops.input_groups) == (4, 3, 2)
    assert spec.reduction.type is ReductionType.Sum
    assert spec.reduction.strategy is MeanReductionStrategy.Running
    assert spec.precision.stochastic_rounding
    assert not spec.precision.narrow_64bit
    assert spec.updatable_buffers == ("b", "a")
    assert spec.recompute is True
    assert spec.locations.io_tiles == 64
    assert (spec.runtime.cache_dir, spec.runtime.model_name) == ("cache", "m")
    assert spec.target.seed == 5


def test_a_refused_wrap_leaves_the_options_writable():
    options = Options()
    options.output_mode = 9
    with pytest.raises(Error, match="output_mode holds no OutputMode"):
        prepare(options, training=True)
    assert prepare(options.outputMode(OutputMode.Sum), training=True).output_mode == 3


@pytest.mark.spec("programs", 3)
def test_inference_ignores_no_accumulation_but_refuses_it_when_prepared():
    options = Options()
    options.Training.gradientAccumulation(4)
    with pytest.raises(Error, match="gradientAccumulation to 1") as caught:
        prepare(options, training=False)
    assert "deviceIterations" in str(caught.value)
    options.setExecutionStrategy(ShardedExecution())
    with pytest.raises(Error, match="gradientAccumulation to 1") as caught:
        prepare(options, training=False)
    assert "deviceIterations" not in str(caught.value)
    assert options.deviceIterations(2).device_iterations == 2  # not frozen by the failure


@pytest.mark.parametrize(
    "configure, phrase",
    [
        (lambda o: o.deviceIterations(0), "deviceIterations must be at least 1"),
        (lambda o: o.replicationFactor(-1), "replicationFactor must be at least 1"),
        (lambda o: o.Training.gradientAccumulation(0), "gradientAccumulation must be at least 1"),
        (lambda o: o.lanes(-1), "lanes must be at least 0"),
        (lambda o: o.maxRepeatLogs(-1), "maxRepeatLogs must be at least 0"),
        (lambda o: o.Distributed.configureProcessId(2, 2), "process id"),
        (lambda o: o.Distributed.configureProcessId(-1, 2), "process id"),
        (lambda o: o.Distributed.configureProcessId(0, 0), "at least 1"),
        (lambda o: o.Distributed.stageProcesses(0), "stageProcesses must be at least 1"),
        (
            lambda o: o.Distributed.configureProcessId(0, 3).stageProcesses(2),
            "must divide the number of processes",
        ),
        (
            lambda o: o.backend("reference").Distributed.configureProcessId(0, 2).stageProcesses(2),
            "Only the staged backend",
        ),
        (lambda o: o.useIpuModel(True).useOfflineIpuTarget(), "not supported for the IPU model"),
        (lambda o: o.useIpuId(1).useOfflineIpuTarget(), "useIpuId"),
        (lambda o: o.useOfflineIpuTarget(3), "Invalid offline IPU version"),
        (lambda o: o.anchorTensor("a", "b", OutputMode.EveryN, 2), "must divide deviceIterations"),
        (lambda o: o._Popart.set("enableStableNorm", 1), "Unknown int option: enableStableNorm"),
        (lambda o: o._Popart.set("partialsTypeMatMuls", "double"), "float or half"),
        (lambda o: setattr(o, "output_mode", 9), "output_mode holds no OutputMode"),
        (lambda o: setattr(o, "sync_pattern", 9), "sync_pattern holds no SyncPattern"),
        (lambda o: o.setAvailableMemoryProportion({"IPU0": [1]}), "must be numbers"),
        (lambda o: o.setAvailableMemoryProportion({"IPU0": 3}), "numbers from 0 to 1"),
        (lambda o: o.setAvailableMemoryProportion({"IPU0": -1}), "numbers from 0 to 1"),
        (
            lambda o: o._Popart.set("accumulationAndReplicationReductionType", 2),
            "must be set to ReductionType",
        ),
        (lambda o: o._Popart.set("engineOptions", {"a": 1}), "engine options must be str"),
    ],
)
def test_compile_time_conditions(configure, phrase):
    options = Options()
    configure(options)
    with pytest.raises(Error, match=phrase):
        freeze(options, training=True)


@pytest.mark.spec("options", 15)
def test_periods_are_checked_against_the_iterations_at_compile():
    with pytest.raises(AssertionError):
        Options().outputMode(OutputMode.EveryN)
    options = Options().outputMode(OutputMode.EveryN, 4)
    for iterations in (1, 6):
        with pytest.raises(Error, match="must divide deviceIterations"):
            freeze(options.clone().deviceIterations(iterations), training=True)
    assert freeze(options.deviceIterations(8), training=True).output.period == 4


def test_the_input_grouping_is_checked_again():
    options = Options().replicationFactor(4).inputReplicaGrouping(4)
    options.replicationFactor(6)
    with pytest.raises(Error, match="must be a factor of"):
        freeze(options, training=True)


@pytest.mark.spec("options", 17)
@pytest.mark.spec("runtime", 8)
def test_use_ipu_model_beats_the_environment_in_both_directions(monkeypatch):
    def device(options=None):
        return freeze(options or Options(), training=False).target

    assert device().device == "ipu"
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert device().device == "model"
    assert device().generation == 2
    assert device(Options().useIpuModel(False)).device == "ipu"
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "0")
    assert device(Options().useIpuModel(True)).device == "model"


def test_the_small_and_the_versioned_model(monkeypatch):
    monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", "1")
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu21")
    target = freeze(Options(), training=False).target
    assert (target.device, target.tiles, target.generation) == ("model", 4, 21)
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert freeze(Options(), training=False).target.tiles is None
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu3")
    with pytest.raises(Error, match="Invalid IPU model version"):
        freeze(Options(), training=False)


def test_offline_targets():
    target = freeze(Options().useOfflineIpuTarget(21), training=False).target
    assert (target.device, target.generation) == ("offline", 21)
    never = Options().connectionType(ConnectionType.Never)
    target = freeze(never, training=False).target
    assert (target.device, target.generation) == ("offline", None)


def test_the_backend_is_an_option_then_a_variable(monkeypatch):
    def backend(options):
        return freeze(options, training=False).target.backend

    assert backend(Options()) == "auto"
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    assert backend(Options()) == "reference"
    assert backend(Options().backend("inductor")) == "inductor"


@pytest.mark.spec("options", 20)
@pytest.mark.spec("runtime", 28)
def test_the_environments_engine_options_win(monkeypatch, caplog):
    text = '{"autoReport.directory": "/env", "extra": "1"}'
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    options = Options()
    options._Popart.setEngineOptions({"mine": "2"})
    options.enableProfiling("/mine")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "overridden" in warnings[0]
    assert "autoReport.directory" in warnings[0]
    merged = engine_options(options)
    assert merged["autoReport.directory"] == "/env"
    assert merged["autoReport.all"] == "true"
    assert merged["mine"] == "2"
    assert merged["extra"] == "1"
    for bad in ("{", "[]", '{"a": 1}'):
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", bad)
        with pytest.raises(Error, match="POPLAR_ENGINE_OPTIONS"):
            freeze(Options(), training=True)


def test_locations_default_to_off_chip_with_phases():
    assert freeze(Options(), training=True).locations.weight == Location(on_chip=True)
    options = Options().setExecutionStrategy(SerialPhasedExecution("A"))
    settings = TensorLocationSettings().useReplicatedTensorSharding().minElementsForOffChip(5)
    options.TensorLocations.setOptimizerLocation(settings)
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage())
    homes = freeze(options, training=True).locations
    assert homes.activation == homes.accumulator == Location(on_chip=False)
    assert homes.weight == Location(on_chip=True)
    assert homes.optimizer == Location(on_chip=False, min_off_chip=5)  # one replica: not sharded
    assert freeze(options.replicationFactor(2), training=True).locations.optimizer.sharded


@pytest.mark.spec("options", 32)
def test_the_replication_factor_is_per_process():
    options = Options().replicationFactor(2)
    options.Distributed.configureProcessId(1, 3)
    assert freeze(options, training=True).loops.replicas == 2


def test_processes_that_share_stages_are_one_share_of_the_data():
    options = Options().replicationFactor(3)
    options.Distributed.configureProcessId(4, 6).stageProcesses(2)
    spec = freeze(options, training=False)
    assert (spec.loops.processes, spec.target.process_id, spec.target.part) == (3, 2, 0)
    assert (spec.processes, spec.process, spec.first_replica) == (6, 4, 6)
    assert spec.target.backend == "staged"
    options.Distributed.configureProcessId(5, 6)
    assert freeze(options, training=False).for_cache() == spec.for_cache()


def test_what_may_change_without_another_compilation():
    def key(configure):
        options = Options()
        configure(options)
        return freeze(options, training=True).for_cache()

    plain = key(lambda o: None)
    for same in (
        lambda o: o.randomSeed(3),
        lambda o: o.logDir("x").modelName("y"),
        lambda o: o.enableExecutableCaching("z"),
        lambda o: o.enableProfiling(),
        lambda o: o.useIpuId(2),
        lambda o: o.showCompilationProgressBar(False),
        lambda o: o.connectionType(ConnectionType.OnDemand),
    ):
        assert key(same) == plain
    for other in (
        lambda o: o.deviceIterations(2),
        lambda o: o.replicationFactor(2),
        lambda o: o.Training.gradientAccumulation(2),
        lambda o: o.outputMode(OutputMode.All),
        lambda o: o.setExecutionStrategy(ShardedExecution(Stage("a"))),
        lambda o: o.backend("reference"),
    ):
        assert key(other) != plain


def test_explicit_backend_settings_beat_the_librarys_choice(caplog):
    options = Options()
    options._Popart.set("accumulationAndReplicationReductionType", 0)
    assert freeze(options, training=True).reduction.type is ReductionType.Sum
    assert "forced by the user" in caplog.text


def test_the_cache_directory(monkeypatch):
    def directory(options):
        return freeze(options, training=True).runtime.cache_dir

    assert directory(Options()) is None
    assert directory(Options().enableExecutableCaching("a")) == "a"
    assert directory(Options().enableExecutableCaching("a").enableExecutableCaching(None)) is None
    assert directory(Options().enableExecutableCaching("a").useIpuModel(True)) is None
    monkeypatch.setenv("POPART_CACHE_DIR", "b")
    assert directory(Options()) == "b"
    assert directory(Options().enableExecutableCaching("a")) == "a"
    assert directory(Options().enableExecutableCaching(None)) is None


def test_optimisers_that_accumulate_in_half_keep_a_running_mean():
    options = Options()
    own = prepare(options, training=True)
    use_running_mean(own)
    assert freeze(own, True).reduction.strategy is MeanReductionStrategy.Running
    assert freeze(options, True).reduction.strategy is MeanReductionStrategy.Post
    with pytest.raises(AttributeError, match="frozen"):
        own.deviceIterations(2)
