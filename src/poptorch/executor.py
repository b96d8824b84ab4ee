"""``PoplarExecutor``: the face of a wrapped model. Source: spec/executor.md."""

from __future__ import annotations

import copy
import datetime
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import _session
from ._base import log
from ._base.errors import Error
from ._ir.optim_spec import OptimSpec
from ._ir.plan import Plan
from .ops.blocks import module_repr
from .optim.freeze import freeze as freeze_optimizer
from .options import Options
from .options.freeze import freeze


class PoplarExecutor:
    """A model wrapped by ``trainingModel`` or ``inferenceModel``; not created directly.

    Reading any attribute that is not listed here reads it from the wrapped module.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._options = options
        self._optimizer = optimizer
        self._compilation = _session.CompilationProgress(False)
        shallow = _shallow_copy(model)
        self._user_model = model if optimizer is not None else shallow
        owner = weakref.ref(self)
        self._session = _session.Session(
            shallow,
            freeze(options, training=optimizer is not None),
            (lambda paths: _alive(owner)._freeze_optimizer(paths)) if optimizer else None,
            owner,
            lambda: _alive(owner)._new_progress(),
        )
        if optimizer is not None:
            _session.wrap(model, self)
            self._session.link()
        # An executor that is dropped must not take trained weights with it.
        self._finalizer = weakref.finalize(self, _finish, self._session, self._user_model)
        self._finalizer.atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a combined batch, compiling for these inputs first if need be.

        Args:
            args, kwargs: as for the module's ``forward``; dimension 0 of every tensor is the
                micro-batch size x device iterations x input groups x accumulation steps.

        Returns:
            What ``forward`` returns, with the results that the output mode selects.

        Raises:
            AssertionError: the arguments do not fit the signature, or the batch does not divide.
            poptorch.Error: anything else that is wrong with the inputs or the model.
        """
        self._rewrap()
        return self._session.run(args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for inputs like these without running. Ignored, with a warning, when compiled."""
        if self.isCompiled():
            log.python.warning("Call to compile() ignored: the model is already compiled.")
            return
        self._rewrap()
        self._session.compile(args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> list[Any]:
        """List everything in ``forward`` that cannot be compiled for inputs like these.

        Returns:
            Findings, each with the construct, the line and a remedy; printing the list gives a
            report. ``fatal`` are those that prevent compiling. The model is unchanged.
        """
        return self._session.explain(args, kwargs)

    def isCompiled(self) -> bool:
        """Tell whether the model is compiled."""
        return self._session.compiled is not None

    def destroy(self) -> None:
        """Bring the weights to the host, release the executable and unwrap the model.

        The model is an ordinary module afterwards; calling the executor again compiles again.
        """
        _finish(self._session, self._user_model)

    @property
    def model(self) -> nn.Module:
        """The user's module; for inference, the executor's own shallow copy of it."""
        return self._user_model

    def plan(self) -> Plan:
        """Return the compiled program with its placement; ``print`` shows it.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        self._session.device  # noqa: B018 (raises when there is none)
        compiled = self._session.compiled
        assert compiled is not None
        return compiled.plan

    @property
    def options(self) -> Options:
        """The executor's own frozen options."""
        return self._options

    def copyWeightsToHost(self) -> None:
        """Copy parameters and buffers from the device into the module's tensors.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        self._session.download()

    def copyWeightsToDevice(self) -> None:
        """Copy the module's parameters and buffers to the device.

        Training progress that was not copied to the host before is discarded.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        self._session.upload()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy to the host only if the device has newer values; return whether it did."""
        return self._session.bring_host_up_to_date()

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or the same one after its hyper-parameters changed.

        Raises:
            AssertionError: unsupported optimizer type.
            poptorch.Error: what changed was compiled in.
        """
        previous, self._optimizer = self._optimizer, optimizer
        try:
            self._session.new_optimizer()
        except BaseException:
            self._optimizer = previous
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load into the module and, if compiled, copy to the device.

        Returns:
            The missing and unexpected keys, as ``nn.Module.load_state_dict`` does.
        """
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isCompiled():
            self.copyWeightsToDevice()
        return result

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            poptorch.Error: not compiled, or the progress bar is switched off.
        """
        if not self.isCompiled():
            raise Error("Please compile the model before asking for its compilation time")
        if not self._options._show_compilation_progress_bar:
            raise Error(
                "The compilation time is measured by the progress bar, which is off",
                fix="options.showCompilationProgressBar(True)",
            )
        return self._compilation.elapsed

    def _freeze_optimizer(self, paths: Mapping[int, str]) -> tuple[OptimSpec, dict[str, float]]:
        assert self._optimizer is not None
        return freeze_optimizer(self._optimizer, paths)

    def _rewrap(self) -> None:
        """Calling a destroyed training executor wraps the module again."""
        if self._optimizer is not None and not self._session.linked:
            _session.wrap(self._user_model, self)
            self._session.link()

    def _new_progress(self) -> _session.CompilationProgress:
        self._compilation = _session.CompilationProgress(
            self._options._show_compilation_progress_bar
        )
        return self._compilation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._user_model, name)

    def __repr__(self) -> str:
        return module_repr(self._user_model)


def _finish(session: _session.Session, model: nn.Module) -> None:
    session.release()
    if session.linked:
        session.unlink()
        _session.unwrap(model)


def _alive(owner: weakref.ref[PoplarExecutor]) -> PoplarExecutor:
    executor = owner()
    assert executor is not None
    return executor


def _shallow_copy(model: nn.Module) -> nn.Module:
    """Share tensors and sub-modules with the user's module, but not its top-level attributes."""
    return copy.copy(model)
