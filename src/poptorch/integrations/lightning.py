"""Run the steps of a ``LightningModule`` as compiled programs: a strategy for Lightning.

Source: Lightning's own documentation,
https://lightning.ai/docs/pytorch/stable/extensions/strategy.html.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import poptorch
from poptorch._base import nested_values
from poptorch._capture.metrics import intercepted
from poptorch._session.calls import Arguments
from poptorch.dataloader import join

from ._deferred_calls import Calls, DeferredResult, ResultsOfCalls

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import GradientAccumulationScheduler as Scheduler
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from torchmetrics import Metric
except ModuleNotFoundError as error:
    error.add_note('  Fix:    pip install "poptorch[lightning]"')
    raise

_GRADIENT_HOOKS = (
    "backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "configure_gradient_clipping",
)  # fmt: skip
_RANDOM = "poptorch_random_state"
_CONVERT = "remove precision from the Trainer, and convert the module: module.half() or .bfloat16()"
_AUTOMATIC = "remove self.automatic_optimization = False from the module"
_log = logging.getLogger("poptorch::python")


class PopTorchStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Run the steps of a ``LightningModule`` compiled: training with backward, clipping, update.

    Write ``Trainer(strategy=PopTorchStrategy(), accelerator="cpu")``. ``self.log`` and metrics work
    inside a step: they receive the results of the step after it has run. Schedulers, callbacks,
    checkpoints, early stopping, ``accumulate_grad_batches`` and ``gradient_clip_val`` work as
    usual.

    Two things differ. Gradients stay in the program: hooks that read them see none, and you get a
    warning. The Python code of a step runs once; ``batch_idx`` is a tensor there.

    Args:
        options: backend, caches, precision, execution strategy and so on. A copy of them is used.
            The number of accumulation steps is the Trainer's ``accumulate_grad_batches``. If this
            is 1, ``Training.gradientAccumulation`` of the options is used instead. Up to four
            programs are kept, one for each combination of input shapes and types;
            ``options.programs`` can set another number above 1.
        inference_opts: the options of validating, testing and predicting. By default these are
            ``options``, with sharded execution in place of a pipeline, which one batch cannot fill.

    Raises:
        poptorch.Error: the options have device iterations or replicas. When fitting begins, the
            strategy also refuses manual optimization, several optimizers, clipping by value, the
            Trainer's argument ``precision``, and different accumulation steps in the Trainer and in
            the options.
    """

    strategy_name = "poptorch"

    def __init__(
        self,
        options: poptorch.Options | None = None,
        inference_opts: poptorch.Options | None = None,
    ) -> None:
        super().__init__(device="cpu")
        self._poptorch_options = _options_of_trainer(options)
        if inference_opts is None:
            self._inference_options = _for_inference(self._poptorch_options.clone())
        else:
            self._inference_options = _options_of_trainer(inference_opts)
        self._training: poptorch.PoplarExecutor | None = None
        self._others: dict[str, poptorch.PoplarExecutor] = {}
        self._window: list[tuple[Any, ...]] = []
        self._calls = Calls()
        # from a checkpoint, for the next program that is compiled
        self._random: list[int] | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the settings of the Trainer and the module, and set up as the base class does."""
        super().setup(trainer)
        if self.precision_plugin.precision != "32-true":
            _refuse("precision", self.precision_plugin.precision, _CONVERT)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not self.lightning_module.automatic_optimization:
            _refuse("automatic_optimization", False, _AUTOMATIC)
        if len(self.optimizers) != 1:
            _refuse(
                "any other number of optimizers than one",
                f"{len(self.optimizers)} optimizers from configure_optimizers",
                "return one optimizer from configure_optimizers",
            )
        self._accumulate(trainer)
        if trainer.gradient_clip_val:
            if trainer.gradient_clip_algorithm == "value":
                _refuse(
                    "gradient_clip_algorithm",
                    "value",
                    "clip by the norm: Trainer(gradient_clip_algorithm='norm')",
                )
            self.optimizers[0].max_grad_norm = trainer.gradient_clip_val
        for name in _GRADIENT_HOOKS:
            if is_overridden(name, self.lightning_module):
                _log.warning("%s sees no gradients, because they stay in the program", name)

    def _accumulate(self, trainer: pl.Trainer) -> None:
        """Use the accumulation steps of the options if the Trainer does not set any."""
        accumulation = self._poptorch_options.Training.gradient_accumulation
        changing = any(isinstance(each, Scheduler) for each in trainer.callbacks)
        if accumulation == 1 or accumulation == trainer.accumulate_grad_batches:
            return
        if changing or trainer.accumulate_grad_batches != 1:
            _refuse(
                "different gradient accumulation in the options and in the Trainer",
                f"Training.gradientAccumulation({accumulation})",
                "remove it from the options, and set only Trainer(accumulate_grad_batches=...)",
            )
        trainer.accumulate_grad_batches = accumulation

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keep a micro-batch; after the last one of an update, run the update.

        Returns:
            The result of the module's ``training_step``. The loss is the sum over the update, as
            the Trainer scales it. Other results are those of the last micro-batch.
        """
        trainer = self.lightning_module.trainer
        self._window.append((*args, *kwargs.values()))
        count, steps = len(self._window), trainer.accumulate_grad_batches
        if count < steps and not trainer.is_last_batch:
            return torch.zeros(())
        window, self._window = self._window, []
        executor = self._trainer(steps)
        rows = [_rows(batch) for batch, *_ in window]
        usual = count == steps and len(set(rows)) == 1
        if not executor.isCompiled() and (self._random is not None or not usual):
            first = window[:1] * steps  # the random state exists only after compiling
            executor.compile(torch.full((steps,), 1 / steps), *_arguments(first))
        if self._random is not None:
            executor.rng_state, self._random = self._random, None
        scale = torch.full((count,), 1 / steps)
        inputs = scale, *_arguments(window)
        if usual:
            losses, results = executor(*inputs)
        else:
            each: list[Arguments] = [((scale[:1], *_arguments([one])), {}) for one in window]
            losses, results = executor._run_micro_batches((inputs, {}), each)
        result = self._calls.make(results, rows)
        loss = losses.sum() * steps  # the Trainer divides it again
        return {**result, "loss": loss} if isinstance(result, dict) else loss

    def _trainer(self, steps: int) -> poptorch.PoplarExecutor:
        optimizer = self.optimizers[0]
        if self._training is not None:
            if self._training.options.Training.gradient_accumulation == steps:
                self._training.setOptimizer(optimizer)
                return self._training
            self._training.destroy()  # for example by a GradientAccumulationScheduler
        options = self._poptorch_options.clone().outputMode(poptorch.OutputMode.All)
        options.Training.gradientAccumulation(steps)
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
        step = _TrainingStep(self.lightning_module, "training_step", self._calls)
        self._training = poptorch.trainingModel(step, options, optimizer)
        return self._training

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss: the program has already run the backward pass."""
        return closure_loss.detach()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled ``validation_step`` of the module, and log the values that it logs."""
        return self._evaluate("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled ``test_step`` of the module, and log the values that it logs."""
        return self._evaluate("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled ``predict_step`` of the module."""
        return self._evaluate("predict_step", (*args, *kwargs.values()))

    def _evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        executor = self._others.get(name)
        if executor is None:
            step = _LightningStep(self.lightning_module, name, self._calls)
            executor = poptorch.inferenceModel(step, self._inference_options.clone())
            self._others[name] = executor
        return self._calls.make(executor(*_arguments([args])))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the module and into its compiled programs."""
        super().load_model_state_dict(checkpoint, strict)
        for executor in (self._training, *self._others.values()):
            if executor is not None and executor.isAttachedToDevice():
                executor.copyWeightsToDevice()

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the random state of dropout, which is stored in the program."""
        if self._training is not None and self._training.isCompiled():
            checkpoint = {**checkpoint, _RANDOM: self._training.rng_state}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; the next update continues with its random state, if it has one."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._random = checkpoint.get(_RANDOM)
        return checkpoint

    def teardown(self) -> None:
        """Turn the module into an ordinary one again, with the trained weights."""
        for executor in (*self._others.values(), self._training):
            if executor is not None:
                executor.destroy()
        self._training = None
        self._others.clear()
        super().teardown()


class _LightningStep(nn.Module):
    """One step of a module. It also returns the tensors that the postponed calls need."""

    def __init__(self, module: pl.LightningModule, name: str, calls: Calls) -> None:
        super().__init__()
        self.module = module
        self._name = name
        self._calls = calls

    def forward(self, *args: Any) -> ResultsOfCalls:
        result, results = self._run(*args)
        self._calls.keep(results, _returned, "return")(result)
        return results

    def _weighted(self, log: Callable[..., Any]) -> Callable[..., Any]:
        """Weight each logged value by the rows of its micro-batch when an epoch's mean is taken."""

        def logged(*args: Any, **settings: Any) -> Any:
            if self._calls.rows is not None and settings.get("batch_size") is None:
                settings["batch_size"] = self._calls.rows
            return log(*args, **settings)

        return logged

    def _run(
        self, batch: Any, index: torch.Tensor | None = None, *rest: Any
    ) -> tuple[Any, ResultsOfCalls]:
        module, results = self.module, ResultsOfCalls()
        checks: dict[str, Any] = {"log": _checked, "log_dict": _checked_dict}

        def of_metric(metric: Any, name: str) -> Any:
            method = metric if name == "forward" else object.__getattribute__(metric, name)
            return self._calls.keep(results, method, f"{type(metric).__name__}.{name}")

        for name, check in checks.items():
            log = self._weighted(getattr(module, name))
            keep = self._calls.keep(results, log, f"self.{name}", check)
            object.__setattr__(module, name, keep)
        try:
            numbers = () if index is None else (index[0], *rest)
            with intercepted(of_metric):
                return getattr(module, self._name)(batch, *numbers), results
        finally:
            for name in checks:
                object.__delattr__(module, name)


class _TrainingStep(_LightningStep):
    def forward(self, scale: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ResultsOfCalls]:  # type: ignore[override]
        result, results = self._run(*args)
        loss, rest = result, None
        if isinstance(result, dict):
            rest = dict(result)
            loss = rest.pop("loss")
        self._calls.keep(results, _returned, "return")(rest)
        return poptorch.identity_loss(loss * scale[0], reduction="sum"), results


def _returned(result: Any) -> Any:
    return result


def _checked(name: str, value: Any, *args: Any, **settings: Any) -> None:
    if not isinstance(value, torch.Tensor | int | float | Metric | DeferredResult):
        raise poptorch.Error(
            "self.log in a compiled step accepts only a number or a metric",
            got=f"{name}: {type(value).__name__}",
            fix="log the value in a hook, for example on_validation_epoch_end",
        )


def _checked_dict(dictionary: Any, *args: Any, **settings: Any) -> None:
    if isinstance(dictionary, Mapping):
        for item in dictionary.items():
            _checked(*item)


def _arguments(window: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    batch, *numbers = zip(*window, strict=True)
    whole = join(batch)
    if not numbers:
        return (whole,)
    return (whole, torch.tensor(numbers[0]), *(number[0] for number in numbers[1:]))


def _rows(batch: Any) -> int:
    """Return how many rows the first tensor of a batch has."""
    tensors, _ = nested_values.flatten(batch)
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)


def _options_of_trainer(options: poptorch.Options | None) -> poptorch.Options:
    """Return a copy of options for programs that each take one batch of the Trainer."""
    own = poptorch.Options() if options is None else options.clone()
    more = "set Trainer(accumulate_grad_batches=...) to take more batches at once"
    if own.device_iterations > 1:
        _refuse("options.deviceIterations", own.device_iterations, more)
    if own.replication_factor > 1:
        _refuse("options.replicationFactor", own.replication_factor, more)
    return own.programs(4) if own._values["programs"] <= 1 else own


def _for_inference(options: poptorch.Options) -> poptorch.Options:
    options.Training.gradientAccumulation(1)
    strategy = options._execution_strategy
    if type(strategy) is not poptorch.PipelinedExecution:
        return options
    automatic = [] if strategy._auto_stage is None else [strategy._auto_stage]
    sharded = poptorch.ShardedExecution(*automatic, *strategy._all_stages)
    return options.setExecutionStrategy(sharded)


def _refuse(name: str, value: Any, fix: str) -> None:
    raise poptorch.Error(f"PopTorchStrategy does not support {name}", got=repr(value), fix=fix)
