"""``PopTorchStrategy`` against Lightning's strategy: same losses, logs, weights and checkpoints."""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics import classification as metrics
from torchmetrics.classification import MulticlassAccuracy

import poptorch
from helpers.closeness import relative
from helpers.wrapping import Having, normal, options
from poptorch.integrations.lightning import PopTorchStrategy

pytestmark = [
    pytest.mark.slow,
    # its advice on workers, logging and validation
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*when using `ckpt_path`, callbacks.*"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
DATA = TensorDataset(normal(18, 4), normal(18, 2, seed=1))


class Net(pl.LightningModule):
    """A module with all steps that Lightning calls."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"size": x.abs().mean(), "constant": 2.0})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def tested(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    test_step = tested  # pytest's rules are not for it

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Record(pl.Callback):
    """Records the logged values and the loss that callbacks receive."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: nn.Module) -> None:
        self.epochs.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def trainer(ours: bool, folder: Path, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    strategy = PopTorchStrategy(options()) if ours else "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about loggers and hardware
        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            callbacks=list(callbacks),
            **{
                "max_epochs": 2,
                "enable_checkpointing": False,
                "logger": False,
                "num_sanity_val_steps": 0,
                **settings,
            },
        )


def assert_all_close(ours: list[Any], theirs: list[Any]) -> None:
    for one, another in zip(ours, theirs, strict=True):
        assert one == pytest.approx(another, rel=relative(16, 5))


def loader(size: int = 4) -> DataLoader:
    return DataLoader(DATA, batch_size=size)


@pytest.mark.parametrize(
    "counts, batches, updates", [({0: 1}, 5, 10), ({0: 3}, 4, 4), ({0: 1, 1: 2}, 4, 6)]
)
def test_losses_logs_and_weights_are_the_same(
    counts: Any, batches: Any, updates: Any, tmp_path: Path
) -> None:
    """The last of five batches is short; of four, three make an update and the last another."""
    module = Net()
    other, records = copy.deepcopy(module), []
    for net, ours in ((module, True), (other, False)):
        records.append(Record())
        settings = {"gradient_clip_val": 0.1, "limit_train_batches": batches}
        change = callbacks.GradientAccumulationScheduler(counts)
        run = trainer(ours, tmp_path, records[-1], change, **settings)
        run.fit(net, loader(), loader(8))
        assert run.global_step == updates
    mine, theirs = records
    assert len(mine.steps) == 2 * batches
    assert "val_loss" in mine.epochs[0]
    if updates == 2 * batches:  # a batch that only adds to an update is run with the last of them
        assert mine.losses == pytest.approx(theirs.losses, rel=relative(16, 5))
        assert_all_close(mine.steps, theirs.steps)
    assert_all_close(mine.epochs, theirs.epochs)
    torch.testing.assert_close(module.state_dict(), other.state_dict())


def test_with_accumulation_callbacks_get_the_loss_of_an_update_with_its_last_batch(
    tmp_path: Path,
) -> None:
    module = Net()
    other, records = copy.deepcopy(module), []

    for net, ours in ((module, True), (other, False)):
        records.append(Record())
        settings = {"limit_train_batches": 4, "accumulate_grad_batches": 2, "max_epochs": 1}
        trainer(ours, tmp_path, records[-1], **settings).fit(net, loader())

    mine, theirs = (record.losses for record in records)
    first, second = theirs[0] + theirs[1], theirs[2] + theirs[3]
    assert mine == pytest.approx([0, first, 0, second], rel=relative(16, 5))


class Measured(Net):
    """Metrics of all kinds: updated, called, in a collection, of numbers, in no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = MulticlassAccuracy(2)
        both = [metrics.MulticlassPrecision(2), metrics.MulticlassRecall(2)]
        self.both = MetricCollection(both, prefix="both_")
        valid = {"acc": MulticlassAccuracy(2), "f1": metrics.MulticlassF1Score(2)}
        self.valid = MetricCollection(valid)
        self.seen, self.hidden = MeanMetric(), [MeanMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        out = self(x)
        loss = nn.functional.cross_entropy(out, y.argmax(1))
        self.log("now", self.rank(out, y.argmax(1)), on_step=True, on_epoch=True)
        self.log("rank", self.rank, on_step=True, on_epoch=True)
        self.log_dict(self.both(out, y.argmax(1)), on_epoch=True)
        self.seen.update(loss, weight=2)
        self.hidden[0].update(x)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("most", out.max(), reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "out": out}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.valid.update(self(x), y.argmax(1))
        self.log_dict(self.valid)

    def on_train_epoch_end(self) -> None:
        self.log("hidden", self.hidden[0].compute())


def test_a_usual_run_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "poptorch"):
        trainer(True, tmp_path, max_epochs=1).fit(Net(), loader())

    assert [record.getMessage() for record in caplog.records] == []


def watched(steps: int, folder: Path) -> dict[bool, tuple[pl.Trainer, Record]]:
    """Train twice with callbacks that look at metrics; first ours."""
    module, ended = Measured(), {}
    for ours in (True, False):
        record = Record()
        stop = callbacks.EarlyStopping("f1", patience=1, mode="min", min_delta=0.5)
        best = ModelCheckpoint(folder / str(ours), "{epoch}-{acc:.3f}", monitor="acc", mode="max")
        run = trainer(
            ours,
            folder,
            record,
            stop,
            best,
            LearningRateMonitor("epoch"),
            max_epochs=4,
            enable_checkpointing=True,
            gradient_clip_val=0.1,
            accumulate_grad_batches=steps,
            logger=CSVLogger(folder, f"logs {ours}"),
            num_sanity_val_steps=1,
        )
        run.fit(copy.deepcopy(module), loader(), loader(8))
        ended[ours] = run, record
    return ended


@pytest.mark.parametrize("steps", [1, 2])
def test_metrics_and_the_callbacks_that_read_them(steps: int, tmp_path: Path) -> None:
    (mine, record), (plain, other) = watched(steps, tmp_path).values()
    names = {"rank_epoch", "now_epoch", "both_MulticlassRecall_epoch", "most", "seen", "acc", "f1"}
    assert names <= set(record.epochs[0])
    assert {"now_step", "rank_step"} <= set(record.steps[-1])
    assert mine.callback_metrics["hidden"] == plain.callback_metrics["hidden"]
    assert_all_close(record.epochs, other.epochs)
    if steps == 1:
        assert_all_close(record.steps, other.steps)
    assert mine.current_epoch == plain.current_epoch < 4  # stopped early
    ours, theirs = (run.checkpoint_callback for run in (mine, plain))
    assert Path(ours.best_model_path).name == Path(theirs.best_model_path).name
    seen = [*mine.callbacks, *plain.callbacks]
    rates = [each.lrs for each in seen if isinstance(each, LearningRateMonitor)]
    assert rates[0] == rates[1]


def test_testing_and_predicting_give_the_results_of_the_plain_trainer(tmp_path: Path) -> None:
    module = Net()
    ours, plain = trainer(True, tmp_path), trainer(False, tmp_path)
    mine = ours.test(module, [loader(8), loader(9)], verbose=False)
    theirs = plain.test(module, [loader(8), loader(9)], verbose=False)
    assert len(mine) == 2
    assert_all_close(mine, theirs)
    rows = torch.cat(ours.predict(module, loader(8)))
    torch.testing.assert_close(rows, module(DATA.tensors[0]).detach())


def test_checkpoints_resume_in_either_way(tmp_path: Path) -> None:
    whole = Net()
    start = copy.deepcopy(whole)
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(True, tmp_path, saving, enable_checkpointing=True, max_epochs=3).fit(whole, loader())
    for ours in (True, False):
        resumed, run = copy.deepcopy(start), trainer(ours, tmp_path, max_epochs=3)
        run.fit(resumed, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=False)
        assert run.global_step == 15
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict())


def test_a_resumed_run_draws_the_numbers_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Net()
    whole.layers[1] = torch.nn.Dropout(0.5)
    start = copy.deepcopy(whole)
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    settings = {"max_epochs": 2, "limit_train_batches": 3}
    trainer(True, tmp_path, saving, enable_checkpointing=True, **settings).fit(whole, loader())
    run = trainer(True, tmp_path, **settings)
    torch.manual_seed(7)
    run.fit(start, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=False)
    torch.testing.assert_close(start.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_wrapped_models_metric_is_refused_with_its_line() -> None:
    accuracy = MulticlassAccuracy(2)
    model = Having(lambda m, x, labels: m.accuracy.update(x, labels), accuracy=accuracy)
    with pytest.raises(poptorch.Error, match=r"Accuracy.update(.|\n)*m.accuracy.update\(x"):
        poptorch.inferenceModel(model, options())(torch.rand(4, 2), torch.arange(4) % 2)
    model(torch.eye(2), torch.arange(2))
    assert model.accuracy.compute() == 1


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Looks(Net):
    def on_after_backward(self) -> None:
        """Would look at gradients."""


class UsesAMetric(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return self(x).sum() * self.rank(self(x), y.argmax(1))


class LogsAnObject(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("name", "a text")  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)


def test_settings_that_the_strategy_does_not_support_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_value = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    for module, settings, message in (
        (Manual(), {}, "does not support automatic_optimization"),
        (Net(), by_value, "does not support gradient_clip_algorithm"),
        (Net(), {"precision": "bf16-mixed"}, "does not support precision"),
        (LogsAnObject(), {}, "accepts only a number or a metric"),
        (UsesAMetric(), {}, r"known only after the step(.|\n)*MulticlassAccuracy.forward"),
    ):
        with pytest.raises(poptorch.Error, match=message):
            trainer(True, tmp_path, **settings).fit(module, loader())
    with caplog.at_level(logging.WARNING, "poptorch"):
        trainer(True, tmp_path, max_steps=1).fit(Looks(), loader())
    assert "on_after_backward sees no gradients" in caplog.text


class Summed(Measured):
    """A batch norm sees every micro-batch, and no gradient of it is noise."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(4, 8, bias=False)
        self.layers = nn.Sequential(linear, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def rows(count: int, size: int) -> DataLoader:
    data = TensorDataset(normal(count, 4), normal(count, 2, seed=1))
    return DataLoader(data, batch_size=size)


@pytest.mark.larger("test_losses_logs_and_weights_are_the_same")
@pytest.mark.parametrize(
    "count, steps", [(43, 2), (43, 3), (40, 3), (13, 2), (12, 2), (11, 4), (5, 2)]
)
def test_accumulation_with_a_short_last_batch_trains_as_in_plain_lightning(
    count: int, steps: int, tmp_path: Path
) -> None:
    module = Summed()
    other = copy.deepcopy(module)

    runs = []
    for net, ours in ((module, True), (other, False)):
        runs.append(trainer(ours, tmp_path, max_epochs=3, accumulate_grad_batches=steps))
        runs[-1].fit(net, rows(count, 8), rows(count, 16))

    mine, theirs = runs
    assert mine.global_step == theirs.global_step
    torch.testing.assert_close(module.state_dict(), other.state_dict())
    for key, value in theirs.callback_metrics.items():
        assert float(mine.callback_metrics[key]) == pytest.approx(float(value), rel=1e-4), key


def with_options(chosen: poptorch.Options, folder: Path, **settings: Any) -> pl.Trainer:
    made = trainer(False, folder, **settings)
    return pl.Trainer(
        accelerator="cpu",
        strategy=PopTorchStrategy(chosen),
        max_epochs=made.max_epochs,
        accumulate_grad_batches=made.accumulate_grad_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_a_trainer_without_accumulation_accumulates_as_the_options_say(tmp_path: Path) -> None:
    module = Net()
    other = copy.deepcopy(module)

    with_options(options(accumulation=2), tmp_path).fit(module, loader(), loader(8))
    trainer(False, tmp_path, accumulate_grad_batches=2).fit(other, loader(), loader(8))

    torch.testing.assert_close(module.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    "counts, steps, message",
    [
        ({"iterations": 4}, 1, "options.deviceIterations(.|\n)*Trainer.accumulate_grad_batches"),
        ({"replicas": 2}, 1, "options.replicationFactor(.|\n)*Trainer.accumulate_grad_batches"),
        ({"accumulation": 2}, 3, "different gradient accumulation(.|\n)*accumulate_grad_batches"),
    ],
)
def test_options_that_the_trainer_decides_are_refused_with_its_argument(
    counts: dict[str, int], steps: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(poptorch.Error, match=message):
        with_options(options(**counts), tmp_path, accumulate_grad_batches=steps).fit(
            Net(), loader()
        )


class Piped(Net):
    def __init__(self) -> None:
        super().__init__()
        poptorch.BeginBlock(self.layers[2], "last", ipu_id=1)


def test_a_pipeline_trains_and_validates_with_one_batch_at_a_time(tmp_path: Path) -> None:
    module = Piped()

    run = with_options(options(accumulation=3), tmp_path)
    run.fit(module, loader(), loader(8))

    assert run.callback_metrics["val_loss"] > 0


def test_validation_has_its_own_options(tmp_path: Path) -> None:
    strategy = PopTorchStrategy(options(), inference_opts=options().programs(7))

    assert strategy._inference_options._values["programs"] == 7
    with pytest.raises(poptorch.Error, match="deviceIterations"):
        PopTorchStrategy(inference_opts=options(iterations=2))
