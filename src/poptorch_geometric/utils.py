"""Help to write and test models. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import MessagePassing

import poptorch.wrappers
from poptorch.optim import Adam
from poptorch.options import Options
from poptorch.poptorch_core import Unsupported

__all__ = ["TrainingStepper", "set_aggregation_dim_size"]


def set_aggregation_dim_size(model: nn.Module, dim_size: int) -> None:
    """Set how many rows every message passing layer of a model aggregates into.

    Args:
        model: each layer gets a hook.
        dim_size: the number of rows. Layers with more target nodes use their number of target
            nodes.
    """

    def hook(module: Any, inputs: Any) -> Any:
        kwargs = inputs[-1]
        kwargs["dim_size"] = max(dim_size, kwargs.get("dim_size") or 0)
        return kwargs

    for module in model.modules():
        if isinstance(module, MessagePassing):
            module.register_aggregate_forward_pre_hook(hook)


class TrainingStepper:
    """Train a model in eager PyTorch and wrapped, and compare the results.

    Args:
        model: returns ``(out, loss)``. Two copies of it are trained.
        lr: the learning rate.
        optimizer: called as ``optimizer(parameters, lr=lr)`` for each copy.
        options: options of the wrapped model; default ``poptorch.Options()``.
        rtol, atol: tolerances; by default those of ``torch.testing.assert_close``.
        enable_fp_exception: enable ``Precision.enableFloatingPointExceptions``.
        equal_nan: treat NaN as equal to NaN.

    Attributes:
        cpu_model, ipu_model: the copies; the second one is wrapped.
        training_model: the wrapper that trains; None without parameters.
        inference_model: another wrapper, for inference.
        optimizer: the optimizer of the wrapped model; None without parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.001,
        optimizer: Any = Adam,
        options: Options | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        enable_fp_exception: bool = True,
        equal_nan: bool = False,
    ) -> None:
        options = Options() if options is None else options
        options.Precision.enableFloatingPointExceptions(enable_fp_exception)
        model.train()
        self._close: dict[str, Any] = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
        self.cpu_model, self.ipu_model = copy.deepcopy(model), copy.deepcopy(model)
        self.training_model: Any = None
        self.optimizer: Any = None
        self._cpu_optimizer: Any = None
        if any(True for _ in model.parameters()):
            self._cpu_optimizer = optimizer(self.cpu_model.parameters(), lr=lr)
            self.optimizer = optimizer(self.ipu_model.parameters(), lr=lr)
            self.training_model = poptorch.wrappers.trainingModel(
                self.ipu_model, options, self.optimizer
            )
        self.inference_model = poptorch.wrappers.inferenceModel(self.ipu_model, options.clone())
        self.check_parameters()

    def run(self, steps: int, batch: Any, ipu_batch: Any = None) -> None:
        """Run a number of steps of both; compare outputs and parameters, and finally the losses.

        Args:
            batch: the arguments, a tuple.
            ipu_batch: other arguments for the wrapped model. In this case, the first rows of the
                outputs are compared.

        Raises:
            AssertionError: something differs, which the message names, or there are no parameters.
        """
        assert self.training_model is not None, "Nothing to train: the model has no parameters"
        cpu_loss = ipu_loss = None
        for _ in range(steps):
            cpu_out, cpu_loss = self.cpu_step(batch)
            ipu_out, ipu_loss = self.ipu_step(batch if ipu_batch is None else ipu_batch)
            if ipu_batch is not None:
                rows = min(len(cpu_out), len(ipu_out))
                cpu_out, ipu_out = cpu_out[:rows], ipu_out[:rows]
            self._compare("Output", ipu_out, cpu_out)
            self.check_parameters()
        self._compare("loss", ipu_loss, cpu_loss)

    def cpu_step(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Make a step in eager PyTorch; return ``(out, loss)``."""
        self.cpu_model.train()
        self._cpu_optimizer.zero_grad()
        out, loss = self.cpu_model(*batch)
        loss.backward()
        self._cpu_optimizer.step()
        return out, loss

    def ipu_step(self, batch: Any, copy_weights: bool = True) -> tuple[Any, torch.Tensor]:
        """Make a step of the wrapped model; return ``(out, loss)``.

        Args:
            copy_weights: copy the parameters to the host.
        """
        self.ipu_model.train()
        out, loss = self.training_model(*batch)
        if copy_weights:
            self.training_model.copyWeightsToHost()
        return out, loss

    def run_inference(self, batch: Any) -> None:
        """Compare an evaluation. If there are several results, compare the first one.

        Raises:
            AssertionError: they differ.
        """
        self.cpu_model.eval()
        self.ipu_model.eval()
        with torch.no_grad():
            expected = self.cpu_model(*batch)
        got = self.inference_model(*batch)
        self._compare("inference", _first(got), _first(expected))

    def check_parameters(self) -> None:
        """Compare all parameters.

        Raises:
            AssertionError: one differs; the message begins with its name.
        """
        ours = dict(self.ipu_model.named_parameters())
        for name, parameter in self.cpu_model.named_parameters():
            self._compare(name, ours[name], parameter)

    def benchmark(self, steps: int, batch: Any, devices: Any = "ipu") -> dict[str, float]:
        """Return the seconds of some steps as ``ipu_time`` and ``cpu_time``, after a warm-up.

        Args:
            devices: "ipu", "cpu".

        Raises:
            NotImplementedError: "gpu".
        """
        if "gpu" in devices:
            raise Unsupported(
                "There is no wrapped model on a GPU to compare with",
                got=f"devices={devices!r}",
                fix='use devices="ipu", devices="cpu", or a tuple of both',
            )
        do: dict[str, Any] = {"ipu": lambda: self.ipu_step(batch, copy_weights=False),
              "cpu": lambda: self.cpu_step(batch)}  # fmt: skip
        times = {}
        for device, step in do.items():
            if device in devices:
                step()
                begin = time.perf_counter()
                for _ in range(steps):
                    step()
                times[f"{device}_time"] = time.perf_counter() - begin
        return times

    def _compare(self, what: str, got: Any, expected: Any) -> None:
        torch.testing.assert_close(
            got, expected, **self._close, check_dtype=False, msg=lambda text: f"{what}: {text}"
        )


def _first(results: Any) -> Any:
    return results[0] if isinstance(results, (tuple, list)) else results
