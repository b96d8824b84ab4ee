"""The option groups (spec/options.md section 5)."""

import pytest
import torch

from poptorch.enums import (
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    VariableRetrievalMode,
)
from poptorch.options import Options, TensorLocationSettings


@pytest.mark.spec("options", 9)
def test_enum_values_that_surprise():
    assert VariableRetrievalMode.AllReplicas == 2
    assert OutputMode.Final == 0


@pytest.mark.spec("options", 12)
@pytest.mark.parametrize("value", [ReductionType.NoReduction, 0, 1, "Mean", None])
def test_only_mean_and_sum_reduce_gradients(value):
    training = Options().Training
    with pytest.raises(ValueError, match="must be set to"):
        training.accumulationAndReplicationReductionType(value)
    assert training.accumulation_and_replication_reduction_type == ReductionType.Mean


def test_training_defaults_and_setters():
    training = Options().Training
    assert training.gradient_accumulation == 1
    assert training.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Post
    training.accumulationAndReplicationReductionType(ReductionType.Sum)
    assert training.accumulation_and_replication_reduction_type is ReductionType.Sum
    running = MeanReductionStrategy.Running
    assert training.setMeanAccumulationAndReplicationReductionStrategy(running) is training
    assert training.meanAccumulationAndReplicationReductionStrategy is running
    with pytest.raises(AssertionError):
        training.setMeanAccumulationAndReplicationReductionStrategy(1)
    training.setAutomaticLossScaling(True)
    assert training._popart.options["automaticLossScalingSettings.enabled"] is True


@pytest.mark.spec("options", 33)
def test_dithering_discards_the_partials_of_convolutions_only():
    options = Options()
    options.Precision.setPartialsType(torch.half)
    assert options._Popart.options["convolutionOptions"] == {"partialsType": "half"}
    options.Training.setConvolutionDithering(True)
    assert options._Popart.options["convolutionOptions"] == {"enableConvDithering": True}
    assert options._Popart.options["partialsTypeMatMuls"] == "half"


def test_floating_point_exceptions_take_a_bool():
    options = Options()
    assert options.Precision.enableFloatingPointExceptions(True) is options.Precision
    assert options._Popart.options["enableFloatingPointChecks"] is True
    with pytest.raises(AssertionError):
        options.Precision.enableFloatingPointExceptions(1)


@pytest.mark.spec("precision", 16)
@pytest.mark.parametrize("value", ["half", torch.float64, torch.int32, None])
def test_partials_are_float_or_half(value):
    options = Options()
    with pytest.raises(ValueError):
        options.Precision.setPartialsType(value)
    assert "partialsTypeMatMuls" not in options._Popart.options
    texts = []
    for dtype in (torch.half, torch.float16, torch.float, torch.float32):
        options.Precision.setPartialsType(dtype)
        texts.append(options._Popart.options["partialsTypeMatMuls"])
    assert texts == ["half", "half", "float", "float"]


@pytest.mark.spec("options", 37)
def test_running_statistics_still_check_their_argument(caplog):
    precision = Options().Precision
    with pytest.raises(ValueError):
        precision.runningStatisticsAlwaysFloat("yes")
    assert not caplog.records
    assert precision.runningStatisticsAlwaysFloat(True) is precision
    assert "deprecated" in caplog.text


def test_settings_without_effect_warn(caplog):
    options = Options()
    text = repr(options)
    for call in (
        lambda: options.Precision.halfFloatCasting("anything"),
        lambda: options.Jit.traceModel(True),
    ):
        caplog.clear()
        call()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "deprecated" in caplog.text
    assert repr(options) == text


def test_the_integer_of_a_casting_behaviour_means_the_same():
    for behaviour in HalfFloatCastingBehavior:
        precision = Options().Precision.halfFloatCasting(int(behaviour))
        assert precision.half_float_casting is behaviour


def test_narrowing_of_64_bit_results():
    precision = Options().Precision
    assert precision.narrow_64bit is True
    assert precision.narrow64Bit(False).narrow_64bit is False
    with pytest.raises(AssertionError):
        precision.narrow64Bit(None)


@pytest.mark.spec("options", 30)
def test_openmpi_is_picked_up_and_can_be_ignored(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    assert distributed.disable() is distributed
    assert (distributed.processId, distributed.numProcesses) == (0, 1)


def test_process_ids_by_hand_and_by_variables(monkeypatch):
    distributed = Options().Distributed
    distributed.configureProcessId(2, 5)
    assert (distributed.processId, distributed.numProcesses) == (2, 5)
    with pytest.raises(AssertionError):
        distributed.configureProcessId("2", 5)
    monkeypatch.setenv("MY_COUNT", "7")
    distributed.setEnvVarNames("MY_COUNT", "MY_ID")
    assert (distributed.processId, distributed.numProcesses) == (0, 7)
    monkeypatch.setenv("MY_ID", "first")
    with pytest.raises(ValueError):
        distributed.setEnvVarNames("MY_COUNT", "MY_ID")


@pytest.mark.spec("options", 21)
@pytest.mark.parametrize("value", [33, 30, 0, 194, 64.0, "64", True, None])
def test_io_tiles_are_even_and_within_limits(value):
    locations = Options().TensorLocations
    with pytest.raises(AssertionError, match="numIOTiles must be an even number"):
        locations.numIOTiles(value)
    for good in (32, 64, 192):
        assert locations.numIOTiles(good).exists("numIOTiles")


def test_location_settings():
    settings = TensorLocationSettings()
    assert settings.toDict() == {}
    settings.minElementsForOffChip(3).minElementsForReplicatedTensorSharding(4)
    settings.useOnChipStorage(False).useReplicatedTensorSharding()
    settings.useIOTilesToLoad().useIOTilesToStore(False)
    assert settings.toDict() == {
        "minElementsForOffChip": 3,
        "minElementsForReplicatedTensorSharding": 4,
        "onChip": 0,
        "useReplicatedTensorSharding": 1,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
    }
    settings.useOnChipStorage(None)
    assert not settings.exists("onChip")
    for setter in (settings.useIOTilesToLoad, settings.minElementsForOffChip):
        with pytest.raises(AssertionError):
            setter("1")


@pytest.mark.spec("options", 22)
def test_locations_are_snapshots():
    options = Options()
    settings = TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setWeightLocation(settings)
    settings.useOnChipStorage(True)
    assert options.TensorLocations.location_weight == {"onChip": 0}
    for setter in (
        options.TensorLocations.setActivationLocation,
        options.TensorLocations.setOptimizerLocation,
        options.TensorLocations.setAccumulatorLocation,
    ):
        with pytest.raises(AssertionError):
            setter({"onChip": 0})
        assert setter(settings) is options.TensorLocations


def test_popart_stores_anything():
    popart = Options()._Popart
    assert popart.options == {
        "instrumentWithHardwareCycleCounter": False,
        "rearrangeAnchorsOnHost": False,
    }
    assert popart.set("nonsense", 1j) is popart
    popart.setPatterns({"A": True}, 1)
    assert popart.options["patterns"] == {"A": True}
    assert popart.options["patterns_level"] == 1
    for arguments in (([], 1), ({}, "1")):
        with pytest.raises(AssertionError):
            popart.setPatterns(*arguments)
