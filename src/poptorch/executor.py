"""Define ``PoplarExecutor``, the object that wrapping a model returns, with all methods that users
call.

The executor offers PopTorch's methods and leaves their work to ``_session``. Source: PopTorch user
guide, "Features".
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ._base import log
from ._base.errors import AssertionFailure, Error
from ._capture import Explanation
from ._capture.failures import keep_user_frames
from ._ipu_model import scaling
from ._ipu_model.estimate import Estimate
from ._ir.plan import Plan
from ._ir.spec import Spec
from ._planning.repricing import Repricer
from ._session import files, questions, wrapping
from ._session.calls import Arguments
from ._session.programs import Model, make_groupable
from ._session.questions import Latency, Stamps
from ._session.session import Session
from .ops.blocks import module_repr
from .optim.joint import Given, joined
from .options import Options
from .options.files import as_calls
from .options.freeze_options import freeze, log_options, use_running_mean
from .profiling import Channel

_TRACED = (
    "compile", "copyWeightsToDevice", "copyWeightsToHost", "destroy", "loadExecutable", "save",
    "setOptimizer",
)  # fmt: skip


class PoplarExecutor:
    """A wrapped model, which ``trainingModel`` and ``inferenceModel`` create.

    All other attributes are those of the wrapped module. ``print`` shows the state.

    Args:
        model: your module.
        options: a frozen copy of yours.
        optimizer: None for inference.
        loss: deprecated: a function of the output and of the call's second argument.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizer: torch.optim.Optimizer | None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self._options = options
        self._loss = loss
        training = optimizer is not None
        self._channel = Channel(f"poptorch.{'trainingModel' if training else 'inferenceModel'}")
        self._channel.instrument(self, *_TRACED)
        # a shallow copy shares tensors and layers, but not top-level attributes
        shallow = wrapping.shallow(model)
        self._user_model = model if training else shallow
        entry = _with_loss(shallow, loss) if loss is not None else None
        self._session = Session(
            Model(shallow, model, entry, training),
            functools.partial(_settings, options, training),
            optimizer,
            weakref.ref(self),
            functools.partial(_progress, options, self._channel),
        )
        self._session.reports.advise = lambda captures, priced: Repricer(
            options, captures, priced.system, training
        ).advised(priced)
        run = self._channel._event("modelExecution", self._session.run)
        # looking up attributes takes long here, because there is a __getattr__
        self._run = functools.partial(self._session.lock.run, run)
        self._adopt_strategy()
        self._session.wrap()

    def __del__(self) -> None:
        """Free the program without copying trained weights to the host.

        A finalizer that copies them would keep the model and its executor alive, because the model
        may refer to the executor.
        """
        if "_session" in self.__dict__ and not sys.is_finalizing():
            self._session.close(local_only=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a combined batch. The first call compiles it.

        Args:
            args, kwargs: as for the module's ``forward``. Dimension 0 of every tensor is
                micro-batch size x device iterations x input groups x accumulation steps.

        Returns:
            What ``forward`` returns. ``options.outputMode`` selects the micro-batches.

        Raises:
            AssertionError: the arguments do not match the signature, the batch cannot be divided
                into micro-batches, or the target is offline.
            poptorch.Error: the inputs or the model have any other fault.
        """
        try:
            return self._run((args, kwargs))
        except BaseException as error:
            keep_user_frames(error)
            raise

    def _run_micro_batches(self, arguments: Arguments, each: Sequence[Arguments]) -> Any:
        """Run an update of a compiled model on micro-batches of different sizes.

        Args:
            arguments: the arguments for the whole batch, by position and by name.
            each: the arguments for each micro-batch.
        """
        try:
            with self._session.lock():
                return self._session.run_micro_batches(arguments, each)
        except BaseException as error:
            keep_user_frames(error)
            raise

    def compile(self, /, *args: Any, **kwargs: Any) -> None:
        """Compile for inputs like these, without running. Warn if the model is already compiled."""
        try:
            with self._session.lock():
                if self.isCompiled():
                    log.python.warning("Call to compile() ignored: the model is already compiled.")
                    return
                self._session.compile((args, kwargs))
        except BaseException as error:
            keep_user_frames(error)
            raise

    def explain(self, /, *args: Any, **kwargs: Any) -> Explanation:
        """List what in ``forward`` cannot be compiled for inputs like these.

        Returns:
            The findings, each with the construct, your line and a remedy. ``print`` them for a
            report. ``fatal`` contains those that prevent compiling. The model is not changed.
        """
        return questions.explain(self._session, (args, kwargs))

    def destroy(self) -> None:
        """Copy the weights to the module, free the program and unwrap the module.

        The module is an ordinary module again. Another call of the executor compiles again.
        """
        self._session.close()

    @property
    def model(self) -> nn.Module:
        """Your module; for inference a shallow copy of it."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The executor's own frozen options."""
        return self._options

    def copyWeightsToHost(self) -> None:
        """Copy parameters and buffers from the device into the module's tensors.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        self._session.weights.copy_to_host()

    def copyWeightsToDevice(self) -> None:
        """Copy the module's parameters and buffers to the device.

        It overwrites what training changed there. The optimizer's state stays.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        self._session.weights.copy_to_device()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy to the host only if the device has newer values; return whether it copied."""
        return self._session.weights.bring_host_up_to_date()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that ``options.updatableNamedBuffers`` names to the device.

        Raises:
            poptorch.Error: not compiled, or no buffers are named.
        """
        self._session.weights.copy_buffers_to_device()

    def setOptimizer(self, optimizer: Given) -> None:
        """Use another optimizer, or the same one (or list) after its hyper-parameters changed.

        Raises:
            AssertionError: the type of the optimizer is not supported.
            poptorch.Error: a value changed that is a constant of the program.
        """
        with self._session.lock():
            one = joined(optimizer, self._optimizer)
            self._session.set_optimizer(one, self._options._relax_optimizer_checks)
            self._adopt_strategy()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load into the module and, if a device is attached, copy to the device.

        Returns:
            The missing and unexpected keys, as ``nn.Module.load_state_dict`` does.
        """
        with self._session.lock():
            result = self._user_model.load_state_dict(state_dict, strict)
            if self.isAttachedToDevice():
                log.python.debug("load_state_dict: implicit copyWeightsToDevice()")
                self.copyWeightsToDevice()
        return result

    def save(
        self,
        filename: str | os.PathLike[str],
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Save the compiled model, for ``poptorch.load`` and ``loadExecutable``.

        In a job, process 0 writes the file. All processes must call this method if each of them
        keeps a part of the optimizer state.

        Args:
            filename: a file, or a folder, in which ``model.poptorch`` is written. Missing folders
                are created.
            export_model: also save the weights, the optimizer state and the options, for
                ``poptorch.load``. Model, optimizer and options must be picklable.
            save_rng_state: also save the random state.

        Raises:
            poptorch.Error: not compiled.
            AssertionError: a part of the path is a file.
        """
        objects = None
        if export_model:
            objects = files.UserObjects(self._user_model, self._optimizer, self._loss)
        with self._session.lock():
            files.save(self._session, filename, objects, as_calls(self._options), save_rng_state)

    def compileAndExport(
        self,
        filename: str | os.PathLike[str],
        *args: Any,
        export_model: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compile for inputs like these if necessary, and ``save``. This needs no device."""
        with self._session.lock():
            if not self.isCompiled():
                self.compile(*args, **kwargs)
            self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str | os.PathLike[str], trusted: bool = False) -> None:
        """Compile for the input shapes and types for which a file was saved.

        The weights and settings of this executor are kept, and ``forward`` is captured again.
        Compiled code comes from the cache of this machine if it is there. Code in the file runs
        only if you saved the file or trust it.

        Args:
            filename: from ``save`` or ``compileAndExport``.
            trusted: run the machine code in the file. Use this only for files from people whom you
                would allow to run a program on this machine.

        Raises:
            poptorch.Error: there is no such file ("Invalid file"), or it belongs to another model.
        """
        with self._session.lock():
            if self.isCompiled():
                log.python.warning("Call to loadExecutable() ignored: the model is compiled.")
                return
            saved = files.read(filename, trusted)
            files.resume(self._session, saved, whole=False)

    def isAttachedToDevice(self) -> bool:
        """Return whether the executor holds a device; False if it is not compiled."""
        return self._session.weights.store is not None

    def attachToDevice(self) -> None:
        """Acquire a device, and copy the weights, optimizer and random state to it.

        Raises:
            AssertionError: the target is offline (``ConnectionType.Never``).
            poptorch.Error: not compiled, attached already, or no device is free.
        """
        self._session.attach()

    def detachFromDevice(self) -> None:
        """Copy the weights, optimizer and random state to the host, and release the device.

        Raises:
            poptorch.Error: not compiled, or not attached.
        """
        self._session.detach()

    @property
    def rng_state(self) -> list[int] | None:
        """The device's random state, ``[seed, state...]``. Assign it to repeat a run.

        Before the first run it is ``[seed]``, or None without a seed.

        Raises:
            poptorch.Error: not compiled, or destroyed.
            ValueError: the assigned value is not such a state.
        """
        return self._session.rng_state

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        self._session.rng_state = state

    def isCompiled(self) -> bool:
        """Return whether the model is compiled."""
        return bool(self._session.programs.all)

    def plan(self) -> Plan:
        """Return the compiled program with its placement; ``print`` shows it.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        with self._session.lock():
            return self._session.now.plan()

    def export(self, filename: str | os.PathLike[str]) -> None:
        """Write the compiled program as Python code without poptorch, or as a page.

        The function ``step`` in this file does the same as a call, operator by operator: loops,
        forward, backward, update. Layers that repeat are one function. Names and comments refer to
        your modules and lines. Weights, state and the batch for which the model was compiled are
        written to a second file in the same folder::

            import step  # step.py, in the same folder as step.safetensors

            state, batch = step.load("step.safetensors")
            for x, y in batches:
                loss = step.step(*state, x, y)

        Batches have the combined size, and 64 bits are narrowed to 32, as in a call. ``step``
        changes the state, and ``torch.compile`` accepts it. ``state`` consists of a few dicts by
        name: parameters ``p``, buffers, moments, settings such as ``h["lr"]``, and, for dropout, a
        generator whose seed you choose. The results are bit-identical to those of the reference
        backend with the same number of threads. Several replicas of one process are merged into the
        step.

        For ``step.html``, it writes a page instead, which is one file for browsers: the program,
        its operators by module, what they read and write, what they would cost on IPUs, and your
        source.

        Args:
            filename: ``step.py`` for Python code, ``step.html`` for a page. Missing folders are
                created.

        Raises:
            poptorch.Error: not compiled, another suffix, or a part of the program cannot be written
                in this form.
        """
        files.export(self._session, filename)

    def estimate(
        self,
        *args: Any,
        system: str | None = None,
        processes: Sequence[int] = (),
        latency: str | float | None = None,
        bandwidth: str | float | None = None,
        **kwargs: Any,
    ) -> Estimate:
        """Estimate the cost of the program on IPUs; see ``poptorch.estimate``."""
        counts = scaling.counts_of(processes)
        link = scaling.link_of(latency, bandwidth) if counts else None
        with self._session.lock():
            captures = questions.captures(self._session, (args, kwargs))
            repricer = Repricer(self._options, captures, system, self._optimizer is not None)
            priced = repricer.advised(repricer.price({}, guesses=True))
            if link is None:
                return priced
            return repricer.scaled(priced, counts, link, self._session.took)

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            poptorch.Error: not compiled, or the progress bar is disabled.
        """
        if not self.isCompiled():
            raise Error(
                "Please compile the model before asking for its compilation time",
                fix="call the model, or its compile() method, with example inputs first",
            )
        elapsed = self._options._progress_bar.elapsed
        if not self._options._show_compilation_progress_bar or elapsed is None:
            raise Error(
                "The compilation time is measured by the progress bar, which is off",
                fix="call options.showCompilationProgressBar(True) before you wrap the model",
            )
        return elapsed

    def cycleCount(self) -> int:
        """Return an estimate of the cycles of a call on IPUs.

        Raises:
            poptorch.Error: ``options.logCycleCount`` is off, or the model has not run.
        """
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            raise Error(
                "Cycle count logging is disabled",
                fix="call options.logCycleCount(True) before you wrap the model",
            )
        if self._session.last is None:
            raise Error(
                "Please run the model at least once before asking for its cycle count",
                fix="call the model with a batch first",
            )
        with self._session.lock():
            return self._session.reports.cycles(self._session.now)

    def getPerfCounters(self) -> Stamps:
        """Return the time stamps of the last call in seconds, by kind and then by tensor.

        The kinds are ``input``, ``input_complete``, ``output`` and ``output_complete``.
        """
        return questions.counters(self._session)

    def getLatency(self) -> Latency:
        """Return (min, max, mean) seconds from the call to its results."""
        return questions.latency(self._session, "input", "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """Return (min, max, mean) seconds in which inputs reach the device."""
        return questions.latency(self._session, "input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return (min, max, mean) seconds from the last input to the outputs."""
        return questions.latency(self._session, "input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Return (min, max, mean) seconds in which outputs reach the host."""
        return questions.latency(self._session, "output", "output_complete")

    def getTensorNames(self) -> list[str]:
        """Return the names of the tensors of the program, first those that can be anchored.

        Raises:
            AssertionError: not compiled.
        """
        session, optimizer = self._session, self._session.optimizer
        if not self.isCompiled():
            raise AssertionFailure(
                "Tensor names are known once the model is compiled",
                fix="call the model, or its compile() method, with example inputs first",
            )
        return session.now.tensor_names() + (optimizer.names() if optimizer is not None else [])

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the value of an anchored tensor in the last call.

        Args:
            short_name: as in ``options.anchorTensor(short_name, long_name)``.

        Returns:
            A tensor. The output mode of the anchor decides how many values it contains.

        Raises:
            AssertionError: there is no such anchor, or the model was not called yet.
        """
        _, anchors = self._session.last or (None, {})
        if short_name not in anchors:
            raise AssertionFailure(
                f"No tensor with name {short_name}",
                got=f"anchored in the last call: {', '.join(anchors) or 'nothing'}",
                fix=(
                    "call options.anchorTensor(short_name, long_name) before you wrap the "
                    "model, and call the model once"
                ),
            )
        return anchors[short_name]

    @property
    def _executable(self) -> object | None:
        return self._session.now.compiled.executable if self.isCompiled() else None

    @property
    def _executable_inputs(self) -> SimpleNamespace | None:
        return SimpleNamespace(args=self._session.now.arguments()) if self.isCompiled() else None

    def _debugGetPopartIR(self) -> str:
        return self.plan().describe()

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        optimizer = self._session.optimizer
        return None if optimizer is None else optimizer.given

    def _adopt_strategy(self) -> None:
        """Keep a running mean in accumulators of half precision (PopTorch user guide,
        "Options").
        """
        optimizer = self._session.optimizer
        if not self.isCompiled() and optimizer is not None and optimizer.needs_running_mean:
            use_running_mean(self._options)

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(name)
        value: Any = getattr(self._user_model, name)
        if isinstance(value, (nn.Parameter, nn.Module)):
            make_groupable(value, self._session.model, self._session.programs)
        if isinstance(value, types.MethodType) and value.__self__ is self._user_model:
            value = self._returning_executor(value)
        return value  # type: ignore[no-any-return]

    def _returning_executor(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return this executor from methods that return the module itself, such as ``to`` and
        ``train``.
        """

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = method(*args, **kwargs)
            except (AssertionError, RuntimeError) as error:
                if device := _missing_device(method.__name__, args, kwargs):
                    raise Error(
                        f"This machine has no device {device!r} that torch can use",
                        got=f"{method.__name__}(...) of a wrapped model; torch says: {error}",
                        fix="remove this call: a wrapped model and its inputs need not be moved",
                    ) from error
                raise
            if result is not self._user_model:
                return result
            self._session.model.observe_mode()  # a later train() is of the model or of a layer
            return self

        return call

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __str__(self) -> str:
        """Say what is compiled, for which inputs, and where the newest weights are."""
        session = self._session
        name = type(session.model.module).__name__.removeprefix("Poptorch")
        kind = "inference" if session.optimizer is None else "training"
        state = "\n  ".join(questions.describe(session))
        return f"{type(self).__name__}: {name}, {kind}, {state}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # used by notebooks

    def __copy__(self) -> PoplarExecutor:
        return self  # there is only one executor per model

    def __reduce__(self) -> Any:
        """Pickle or copy the executor as a wrapper around a copy of the model that is not
        compiled.
        """
        self._session.weights.fetch()
        return PoplarExecutor, (self._user_model, self._options, self._optimizer, self._loss)


def _missing_device(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the device type to which a call moves the model, if it is not "cpu"."""
    if method in ("cuda", "ipu", "xpu"):
        return method
    places = [*args[:1], kwargs.get("device")] if method in ("to", "to_empty") else []
    named = [str(place) for place in places if isinstance(place, str | torch.device)]
    kinds = [name.partition(":")[0] for name in named]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "")


def _settings(options: Options, training: bool) -> Spec:
    log_options(options)
    return freeze(options, training=training)


@contextlib.contextmanager
def _progress(options: Options, channel: Channel) -> Iterator[Callable[[float], None]]:
    bar, shown = options._progress_bar, options._show_compilation_progress_bar
    bar.reset(visible=options.Distributed.processId == 0)  # one progress bar per job is enough
    try:
        with channel.tracepoint("modelCompilation"):
            yield lambda share: bar(round(100 * share)) if shown else None
    finally:
        bar.close()


def _with_loss(model: nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model that also returns a loss, as in PopTorch 1.0 (user guide, "Options")."""

    def forward(args: Any, loss_inputs: Any = None) -> tuple[Any, Any]:
        if isinstance(args, dict):
            output = model(**args)
        elif isinstance(args, (list, tuple)):
            output = model(*args)
        else:
            output = model(args)
        return output, loss(output) if loss_inputs is None else loss(output, loss_inputs)

    return forward
