"""From options to the frozen Spec: what is resolved, what is refused, and lines of the log."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import poptorch
from poptorch.enums import ConnectionType, OutputMode, ReductionType
from poptorch.options import Options, PipelinedExecution, ShardedExecution
from poptorch.options.freeze_options import engine_options, freeze, log_options, prepare

# Anchors without a mode.


@pytest.fixture
def anchoring() -> Options:
    """An anchor ``a`` without a mode and an anchor ``b`` that sums, over four iterations."""
    options = Options().deviceIterations(4)
    options.anchorTensor("a", "x")
    options.anchorTensor("b", "y", OutputMode.Sum)
    return options


@pytest.mark.spec("options", 13)
@pytest.mark.parametrize("training, mode", [(True, OutputMode.Final), (False, OutputMode.All)])
def test_an_anchor_without_a_mode_has_the_wrappers_mode(
    anchoring: Options, training: bool, mode: OutputMode
) -> None:
    own = prepare(anchoring, training)

    assert own.anchored_tensors["a"][2:] == [mode, 1]


@pytest.mark.spec("options", 13)
def test_an_anchor_without_a_mode_has_the_mode_and_the_period_that_were_set(
    anchoring: Options,
) -> None:
    own = prepare(anchoring.outputMode(OutputMode.EveryN, 2), training=True)

    assert own.anchored_tensors["a"][2:] == [OutputMode.EveryN, 2]


@pytest.mark.spec("options", 13)
def test_prepared_options_and_their_originals_freeze_to_the_same_anchors(
    anchoring: Options,
) -> None:
    anchoring.outputMode(OutputMode.EveryN, 2)
    expected = (("a", "x", OutputMode.EveryN, 2), ("b", "y", OutputMode.Sum, 1))

    own = prepare(anchoring, training=True)

    assert freeze(own, training=True).anchors == expected
    assert freeze(anchoring, training=True).anchors == expected


# Accumulation in inference.


@pytest.fixture
def accumulating() -> Options:
    options = Options()
    options.Training.gradientAccumulation(4)
    return options


@pytest.mark.spec("programs", 3)
def test_inference_refuses_accumulation_and_advises_device_iterations_in_a_pipeline(
    accumulating: Options,
) -> None:
    with pytest.raises(poptorch.Error, match=r"(?s)gradientAccumulation to 1.*deviceIterations"):
        prepare(accumulating, training=False)


@pytest.mark.spec("programs", 3)
def test_inference_without_a_pipeline_does_not_advise_device_iterations(
    accumulating: Options,
) -> None:
    accumulating.setExecutionStrategy(ShardedExecution())

    with pytest.raises(poptorch.Error, match="gradientAccumulation to 1") as error:
        prepare(accumulating, training=False)

    assert "deviceIterations" not in str(error.value)


def test_options_that_inference_has_refused_are_not_frozen(accumulating: Options) -> None:
    with pytest.raises(poptorch.Error):
        prepare(accumulating, training=False)

    assert accumulating.deviceIterations(2).device_iterations == 2


# Conditions that need several options.


@pytest.mark.parametrize("configure, phrase", [
    (lambda o: o.Distributed.configureProcessId(2, 2), "process id"),
    (lambda o: o.Distributed.configureProcessId(0, 0), "at least 1"),
    (lambda o: o.Distributed.configureProcessId(0, 3).stageProcesses(2),
     "must be a multiple of options.Distributed.stageProcesses"),
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
    (lambda o: setattr(o, "sync_pattern", 9), "sync_pattern must be a member of SyncPattern"),
    (lambda o: setattr(o, "output_mode", 9), "output_mode must be a member of OutputMode"),
    (lambda o: o.setAvailableMemoryProportion({"IPU0": [1]}), "must be numbers"),
    (lambda o: o.setAvailableMemoryProportion({"IPU0": 3}), "numbers from 0 to 1"),
    (lambda o: o._Popart.set("accumulationAndReplicationReductionType", 2),
     "must be set to ReductionType"),
    (lambda o: o._Popart.set("engineOptions", {"a": 1}), "engine options must be str"),
])  # fmt: skip
@pytest.mark.spec("options", 15)
def test_options_that_do_not_go_together_are_refused_when_they_are_frozen(
    configure: Callable[[Options], object], phrase: str
) -> None:
    options = Options()
    configure(options)

    with pytest.raises(poptorch.Error, match=phrase):
        freeze(options, training=True)


# The device.


class Device(NamedTuple):
    """What selects a device: its kind, its generation, and the number of tiles if it is small."""

    kind: str
    generation: int | None = None
    tiles: int | None = None


def device(options: Options) -> Device:
    target = freeze(options, training=False).target
    return Device(target.device, target.generation, target.tiles)


MODEL = "POPTORCH_IPU_MODEL"
SMALL_MODEL = "POPTORCH_SMALL_IPU_MODEL"
VERSION = "POPTORCH_IPU_MODEL_VERSION"


@pytest.mark.parametrize(
    "options, expected",
    [
        (Options(), Device("ipu")),
        (Options().useOfflineIpuTarget(21), Device("offline", 21)),
        (Options().connectionType(ConnectionType.Never), Device("offline")),
        (Options().useIpuModel(True), Device("model", 2)),
    ],
    ids=["nothing set", "offline target", "no connection", "IPU model"],
)
def test_options_decide_the_device(options: Options, expected: Device) -> None:
    assert device(options) == expected


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({SMALL_MODEL: "1", VERSION: "ipu21"}, Device("model", 21, tiles=4)),
        ({MODEL: "1", SMALL_MODEL: "1", VERSION: "ipu21"}, Device("model", 21)),
        ({MODEL: "1", SMALL_MODEL: "1"}, Device("model", 2)),
        ({MODEL: "0"}, Device("ipu")),
    ],
    ids=["small model", "model before small model", "no version", "no model"],
)
def test_variables_decide_the_device_where_options_do_not(
    variables: dict[str, str], expected: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert device(Options()) == expected


@pytest.mark.spec("options", 17)
@pytest.mark.spec("runtime", 8)
@pytest.mark.parametrize(
    "variable, use, expected", [("1", False, Device("ipu")), ("0", True, Device("model", 2))]
)
def test_use_ipu_model_wins_over_the_environment_either_way(
    variable: str, use: bool, expected: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODEL, variable)

    assert device(Options().useIpuModel(use)) == expected


def test_an_unknown_version_of_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL, "1")
    monkeypatch.setenv(VERSION, "ipu3")

    with pytest.raises(poptorch.Error, match="Invalid IPU model version"):
        device(Options())


# Engine options of the environment, keys of the backend, the cache.


@pytest.fixture
def overridden_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> Options:
    """Engine options of Python and of profiling; the environment names another directory."""
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "/env", "extra": "1"}')
    options = Options()
    options._Popart.setEngineOptions({"mine": "2"})
    return options.enableProfiling("/mine")


@pytest.mark.spec("options", 20)
@pytest.mark.spec("runtime", 28)
def test_engine_options_of_the_environment_win(overridden_by_the_environment: Options) -> None:
    own = poptorch.inferenceModel(abs, overridden_by_the_environment).options

    assert engine_options(own) == {
        "autoReport.all": "true",
        "autoReport.directory": "/env",
        "debug.allowOutOfMemory": "true",
        "extra": "1",
        "mine": "2",
    }


@pytest.mark.spec("options", 20)
def test_a_warning_names_the_engine_option_that_is_overridden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "/env"}')

    Options().enableProfiling("/mine")

    (warning,) = caplog.messages
    assert "autoReport.directory is overridden" in warning


@pytest.mark.spec("runtime", 28)
@pytest.mark.parametrize("bad", ["{", "[]", '{"a": 1}'])
def test_engine_options_of_the_environment_that_cannot_be_read_are_refused(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", bad)

    with pytest.raises(poptorch.Error, match="POPLAR_ENGINE_OPTIONS"):
        freeze(Options(), training=True)


def test_the_backends_reduction_type_wins_over_the_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = Options()
    options._Popart.set("accumulationAndReplicationReductionType", 0)

    spec = freeze(options, training=True)

    assert spec.reduction.type is ReductionType.Sum
    assert "forced by the user" in caplog.text


@pytest.mark.parametrize("value", [1, 0])
def test_the_backends_recomputation_wins_over_the_options(value: int) -> None:
    options = Options()
    options._Popart.set("autoRecomputation", value)

    assert freeze(options, training=True).recompute is bool(value)


def cached_in(folder: str | None) -> Options:
    return Options().enableExecutableCaching(folder)


@pytest.mark.parametrize(
    "options, variable, folder",
    [
        (Options(), None, None),
        (cached_in("a"), None, "a"),
        (cached_in("a").enableExecutableCaching(None), None, None),
        (cached_in("a").useIpuModel(True), None, None),
        (Options(), "b", "b"),
        (cached_in("a"), "b", "a"),
        (cached_in(None), "b", None),
    ],
    ids=[
        "nothing set",
        "set",
        "set back",
        "IPU model",
        "variable",
        "set before variable",
        "None before variable",
    ],
)
def test_options_or_a_variable_decide_the_cache_folder(
    options: Options, variable: str | None, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("POPART_CACHE_DIR", variable)

    assert freeze(options, training=True).runtime.cache_dir == folder


# Lines of the log.


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[Options], list[str]]:
    """Return the log lines about options when a training model is wrapped."""

    def collect(options: Options) -> list[str]:
        own = prepare(options, training=True)
        for name in ("poptorch:cpp", "poptorch::python"):
            caplog.set_level("DEBUG", logger=name)
        caplog.clear()
        log_options(own)
        return caplog.messages

    return collect


Lines = Callable[[Options], list[str]]


def test_every_value_is_logged_once(lines: Lines) -> None:
    options = Options().autoRoundNumIPUs().setAvailableMemoryProportion({"IPU1": 0.5})
    options.updatableNamedBuffers(["b1", "b2"]).anchorTensor("short", "long", OutputMode.EveryN, 2)

    counts = collections.Counter(lines(options))

    assert counts["poptorch.Options set auto_round_num_ipus to value true"] == 1
    assert counts["poptorch.Options set available_memory_proportion[1] to 0.5"] == 1
    assert counts["poptorch.Options added b2 to updatableNamedBuffers"] == 1
    assert counts["poptorch.Options set anchored_tensors[short] to long EVERYN/2"] == 1
    assert counts["poptorch.Options set execution_mode to value 0"] == 1


def test_the_progress_bar_is_not_logged(lines: Lines) -> None:
    assert not [line for line in lines(Options()) if "progress_bar" in line]


def test_the_log_says_that_the_user_chose_the_model(lines: Lines) -> None:
    found = lines(Options().useIpuModel(True))

    assert "From the user configuration: Ipu model: Enabled" in found


def test_the_log_says_that_a_variable_chose_the_model(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODEL, "1")

    found = lines(Options().setExecutionStrategy(PipelinedExecution("a")))

    assert "From POPTORCH_IPU_MODEL environment variable: Ipu model: Enabled" in found


@pytest.mark.parametrize("model", [False, True])
def test_the_log_says_that_caching_is_off_with_the_model_only(
    model: bool, lines: Lines, tmp_path: Path
) -> None:
    options = cached_in(str(tmp_path))
    if model:
        options.useIpuModel(True)

    warning = "Executable caching does not work with the IPU model, and is disabled"
    assert (warning in lines(options)) is model


def test_the_log_names_the_backend_of_the_environment(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")

    assert "From POPTORCH_BACKEND environment variable: reference" in lines(Options())


def test_the_log_does_not_name_a_backend_of_the_environment_that_options_replace(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")

    found = lines(Options().backend("inductor"))

    assert not [line for line in found if "POPTORCH_BACKEND" in line]
