"""From Options to the Spec: resolution, compile-time conditions, hashing, lines of the log."""

import pytest

import poptorch
from poptorch._ir.spec import Location
from poptorch.enums import ConnectionType, OutputMode, ReductionType
from poptorch.options import Options, PipelinedExecution, ShardedExecution, TensorLocationSettings
from poptorch.options.freeze import engine_options, freeze, log_options, prepare


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
