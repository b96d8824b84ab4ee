"""Run ``transformers.Trainer`` with the whole update as one compiled program.

Source: the Trainer's own documentation, https://huggingface.co/docs/transformers/trainer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import poptorch
from poptorch._compile import registry
from poptorch._ir.slots import NORM
from poptorch.dataloader import join
from poptorch.options.freeze_options import freeze
from poptorch.poptorch_core import InvalidValue

try:
    import transformers
except ModuleNotFoundError as error:
    error.add_note('  Fix:    pip install "poptorch[transformers]"')
    raise

from ._padding import MOST, Lengths, NamedBatch, Padding

_RNG_FILE = "poptorch_rng.pt"
_PROGRAMS = MOST + 2  # batches with fewer rows need programs, too


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` whose training and evaluation steps are compiled.

    One update is one call of a compiled program: all accumulation steps, ``compute_loss`` with
    label smoothing, backward, clipping. Arguments, schedulers, callbacks, logging, metrics and
    resuming work as usual. This Trainer and the original one can load each other's checkpoints.

    Two things differ. The norm of the gradients is logged only if they are clipped by it. Batches
    that have an ``attention_mask`` are padded a little further than the collator pads them, to one
    of at most eight lengths, because each length needs its own compiled program. The Trainer first
    makes sure, in eager PyTorch, that padding does not change the model's results.

    Args:
        args, kwargs: arguments of ``transformers.Trainer``.
        options: backend, caches, precision and so on. A copy of them is used. Batch size and
            accumulation steps come from the Trainer's arguments. Up to ten programs are kept for
            batches of different shapes; ``options.programs`` can set another number above 1.
        pad_lengths: whether batches are padded to a few lengths. Batches that
            ``poptorch.PadToSizes`` makes as the ``data_collator`` keep the sizes it was given.

    Raises:
        poptorch.Error: an argument asks for another way to run the model, such as
            ``torch_compile``.
    """

    def __init__(
        self,
        *args: Any,
        options: poptorch.Options | None = None,
        pad_lengths: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _check(self.args)
        self._poptorch_options = _checked(options)
        self._pads = pad_lengths and not isinstance(self.data_collator, poptorch.PadToSizes)
        self._lengths: dict[tuple[str, ...], Lengths] = {}  # by the names in a batch
        self._training: poptorch.PoplarExecutor | None = None
        self._evaluation: poptorch.PoplarExecutor | None = None
        # the optimizer with which _training was created
        self._trained_with: torch.optim.Optimizer | None = None
        self._window: list[dict[str, Any]] = []
        self._random: list[int] | None = None
        self._operations: dict[tuple[tuple[str, torch.Size], ...], int] = {}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``transformers.Trainer``."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.model.__dict__.pop("zero_grad", None)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer; it also clips gradients, because clipping is part of the update."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self.args.max_grad_norm > 0:
            _inner(optimizer).max_grad_norm = self.args.max_grad_norm
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Keep a micro-batch; after the last one of an update, run the update.

        Returns:
            The loss of the whole update, as the Trainer scales it, after its last micro-batch; zero
            after the others.
        """
        self._window.append(dict(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros(())
        window, self._window = self._window, []
        self.model.train()  # the comparison in ``pad`` needs this mode, too
        executor = self._trainer()
        count, steps, items = len(window), self.args.gradient_accumulation_steps, None
        share = 1 if self._is_scaled(num_items_in_batch) else count
        if num_items_in_batch is not None:
            items = torch.as_tensor(num_items_in_batch).repeat(steps)
        scale = torch.full((steps,), 1 / share)
        window = self._lengths_of("training", window[0]).pad(window) if self._pads else window
        usual = count == steps and len(set(map(_rows, window))) == 1
        if not executor.isCompiled() and (self._random is not None or not usual):
            # the random state exists only after compiling
            executor.compile(scale, items, **join(window[:1] * steps))
        if self._random is not None:
            executor.rng_state, self._random = self._random, None
        if usual:
            loss: torch.Tensor = executor(scale, items, **join(window))
            return loss.sum()

        def of(number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return scale[:number], None if items is None else items[:number]

        each = [(of(1), micro_batch) for micro_batch in window]
        loss = executor._run_micro_batches((of(count), join(window)), each)
        return loss.sum()

    def _lengths_of(self, what: str, batch: NamedBatch) -> Lengths:
        names = (what, *sorted(batch))
        if names not in self._lengths:
            compared = _Loss(self) if what == "training" else _Evaluation(self)
            padding = Padding.of(self.model, self.processing_class)
            programs = self._poptorch_options._values["programs"]
            self._lengths[names] = Lengths(padding, programs - 1, compared)
        return self._lengths[names]

    def _is_scaled(self, items: torch.Tensor | int | None) -> bool:
        """Return whether the loss is already divided by the number of items of all steps, as the
        base class decides it.
        """
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is not None:
            return bool(is_scaled)
        by_model = self.model_accepts_loss_kwargs and items is not None
        return bool(by_model or self.compute_loss_func is not None)

    def _trainer(self) -> poptorch.PoplarExecutor:
        optimizer: torch.optim.Optimizer = _inner(self.optimizer)
        if self._training is not None and self._trained_with is optimizer:
            self._training.setOptimizer(optimizer)
            return self._training
        if self._training is not None:
            self._training.destroy()
        options = self._poptorch_options.clone()
        options.outputMode(poptorch.OutputMode.Sum)
        options.Training.gradientAccumulation(self.args.gradient_accumulation_steps)
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
        if self._returns_norm():
            options.anchorTensor(NORM, NORM, poptorch.OutputMode.Final)
        self._training = poptorch.trainingModel(_TrainerStep(self), options, optimizer)
        # the base class calls it at every step
        if type(self.model).zero_grad is nn.Module.zero_grad:
            self.model.zero_grad = optimizer.zero_grad  # this method does not read the weights
        self._trained_with = optimizer
        return self._training

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the number of operations of a step; see ``transformers.Trainer``.

        It is computed once for inputs of the same shapes. The base class reads the weights at every
        micro-batch, which would copy them from the device.
        """
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        shapes = tuple((name, x.shape) for name, x in tensors.items())
        if shapes not in self._operations:
            self._operations[shapes] = super().floating_point_ops(inputs)
        return self._operations[shapes]

    def _returns_norm(self) -> bool:
        """Return whether the step returns the norm of the gradients. It does not if the gradients
        are divided among chips.
        """
        backend = registry.choose(freeze(self._poptorch_options, training=True).target.backend)
        return self.args.max_grad_norm > 0 and not registry.works_by_stages(backend)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._training is None or not self._returns_norm():
            return None
        return self._training.getAnchoredTensor(NORM)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return None, because the gradients never leave the program."""
        return grad_norm

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate one batch with a wrapped model; see ``transformers.Trainer``."""
        if self._evaluation is None:
            options = self._poptorch_options.clone()
            self._evaluation = poptorch.inferenceModel(_Evaluation(self), options)
        self.model.eval()
        wrapped: Any = _Padded(self._evaluation, self) if self._pads else self._evaluation
        return super().prediction_step(wrapped, inputs, prediction_loss_only, ignore_keys)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._training is not None and self._training.isCompiled():
            self._training.copyWeightsToHostIfNeeded()
        return super()._finalize_training(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)
        self._send_weights()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._send_weights()

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._training is not None and self._training.isCompiled():
            torch.save(self._training.rng_state, os.path.join(output_dir, _RNG_FILE))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = os.path.join(checkpoint or "", _RNG_FILE)
        if checkpoint is not None and os.path.isfile(path):
            self._random = torch.load(path, weights_only=True)

    def _send_weights(self) -> None:
        for executor in (self._training, self._evaluation):
            if executor is not None and executor.isAttachedToDevice():
                executor.copyWeightsToDevice()


class _TrainerStep(nn.Module):
    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model
        self._trainer = trainer

    def forward(
        self, scale: torch.Tensor, items: torch.Tensor | None, /, **inputs: Any
    ) -> torch.Tensor:
        count = None if items is None else items[0]
        loss = self._trainer.compute_loss(self.model, dict(inputs), num_items_in_batch=count)
        return poptorch.identity_loss(loss * scale[0], reduction="sum")


class _Loss(nn.Module):
    """Compute the loss of one micro-batch as the Trainer does, and also return the model's outputs.

    The loss alone could hide a difference in its inputs that gradients would show.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model
        self._trainer = trainer

    def forward(self, **inputs: Any) -> Any:
        loss, outputs = self._trainer.compute_loss(self.model, dict(inputs), return_outputs=True)
        return loss, _without_caches(self.model, outputs)


class _Evaluation(nn.Module):
    """Return the model's results that are tensors or containers of tensors, for evaluation."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model

    def forward(self, **inputs: Any) -> Any:
        return _without_caches(self.model, self.model(**inputs))


def _without_caches(model: nn.Module, outputs: Any) -> Any:
    """Return a model's outputs without those that the Trainer ignores in evaluation."""
    if not isinstance(outputs, Mapping):
        return outputs
    config = getattr(model, "config", None)
    ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
    return {key: value for key, value in outputs.items() if key not in ignored}


class _Padded:
    """A model that gets padded batches and returns results for the original batches."""

    def __init__(self, executor: poptorch.PoplarExecutor, trainer: Trainer) -> None:
        self._executor, self._trainer = executor, trainer

    def __call__(self, **inputs: Any) -> Any:
        lengths = self._trainer._lengths_of("evaluation", inputs)
        (padded,) = lengths.pad([inputs])
        return lengths.cut(self._executor(**padded), inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def _rows(batch: NamedBatch) -> int:
    """Return how many rows the first tensor of a batch has."""
    return next((t.shape[0] for t in batch.values() if isinstance(t, torch.Tensor) and t.dim()), 1)


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _check(args: Any) -> None:
    others = ("torch_compile", "deepspeed", "fsdp", "use_liger_kernel", "auto_find_batch_size")
    for name in others:
        if getattr(args, name, None):
            raise poptorch.Error(
                f"Trainer: {name} cannot be combined with poptorch",
                got=f"TrainingArguments({name}={getattr(args, name)!r})",
                fix=f"omit {name}, or use transformers.Trainer",
            )


def _checked(options: poptorch.Options | None) -> poptorch.Options:
    options = poptorch.Options() if options is None else options.clone()
    if options._values["programs"] <= 1:
        options.programs(_PROGRAMS)
    counts = {
        "deviceIterations": options.device_iterations,
        "replicationFactor": options.replication_factor,
        "the work of other processes (poprun --min-instances)": options.Distributed._each,
        "Training.gradientAccumulation": options.Training.gradient_accumulation,
    }
    for name, count in counts.items():
        if count != 1:
            raise InvalidValue(
                f"Trainer: {name} must be set in the TrainingArguments",
                got=str(count),
                fix="use gradient_accumulation_steps and per_device_train_batch_size",
            )
    return options
