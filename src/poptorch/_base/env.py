"""Define the table of environment variables, from which a page is generated. Only this file reads
``os.environ``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import InvalidValue


@dataclass(frozen=True)
class Variable:
    name: str
    parse: Callable[[str], Any]
    default: Any
    effect: str


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _flag(text: str) -> bool:
    word = text.strip().lower()
    return _WORDS[word] if word in _WORDS else int(text) != 0


REACTIONS = ("warn", "error", "off")  # to results that differ from those of eager PyTorch


def _reaction(text: str) -> str:
    if text not in REACTIONS:
        raise ValueError(text)
    return text


_ROWS = (
    Variable("POPTORCH_LOG_LEVEL", str, "WARN", ("verbosity of the log; read when poptorch is "
                                                 "imported")),
    Variable("POPTORCH_LOG_DEST", str, "stderr", ("where the log of the engine is written: "
                                                  "stderr, stdout or a file")),
    Variable("POPTORCH_FULL_TRACEBACK", _flag, False,
        "keep the frames of this library and of torch in the tracebacks of errors"),
    Variable("POPTORCH_BACKEND", str, None,
        ("backend that runs the programs, unless an option selects one: auto, optimise, "
         "reference, ...")),
    Variable("POPTORCH_IPU_MODEL", _flag, None, "use the simulated device"),
    Variable("POPTORCH_SMALL_IPU_MODEL", _flag, None, "use the simulated device with 4 tiles"),
    Variable("POPTORCH_IPU_MODEL_VERSION", str, "ipu2", "generation of the simulated device"),
    Variable("POPTORCH_POD", str, "mk2:64",
        ("the chips that exist: kind:number, with one of the kinds mk1, mk2, bow and c600, or "
         "only a number; 0 for none")),
    Variable("POPTORCH_POD_DIR", str, "",
        ("folder in which processes record which devices they hold, so that they share one "
         "system. A process that finds no free device there gets an error. Without this "
         "variable, such a process gets additional devices, with a warning")),
    Variable("POPTORCH_WAIT_FOR_IPU", _flag, False,
        ("wait for devices that are in use, instead of raising an error or using additional "
         "devices")),
    Variable("OMPI_COMM_WORLD_SIZE", int, 1, "number of processes, in every new Options"),
    Variable("OMPI_COMM_WORLD_RANK", int, 0, "index of this process, in every new Options"),
    Variable("WORLD_SIZE", int, 1, ("number of processes, set by torchrun; ignored if "
                                    "OMPI_COMM_WORLD_SIZE is set")),
    Variable("RANK", int, 0, ("index of this process, set by torchrun; ignored if "
                              "OMPI_COMM_WORLD_RANK is set")),
    Variable("OMPI_COMM_WORLD_LOCAL_RANK", int, 0, ("index of this process among those on "
                                                    "this machine")),
    Variable("LOCAL_RANK", int, 0, ("index of this process among those on this machine, set by "
                                    "torchrun")),
    Variable("LOCAL_WORLD_SIZE", int, 0, "number of processes of torchrun on this machine"),
    Variable("TORCHELASTIC_RUN_ID", str, "", "name of the job, set by torchrun"),
    Variable("POPDIST_NUM_TOTAL_REPLICAS", int, 0, ("number of replicas of the job, set by "
                                                    "poprun")),
    Variable("POPDIST_NUM_LOCAL_REPLICAS", int, 1, ("number of replicas of each process, set "
                                                    "by poprun")),
    Variable("POPDIST_NUM_IPUS_PER_REPLICA", int, 1, ("number of chips of each replica, set "
                                                      "by poprun")),
    Variable("POPDIST_STAGE_PROCESSES", int, 1, ("number of processes that share a model, set "
                                                 "by poprun")),
    Variable("POPDIST_PROCESSES_EACH", int, 1,
        "number of processes of the original job whose work each process does, set by poprun"),
    Variable("OMPI_COMM_WORLD_LOCAL_SIZE", int, 0, ("number of processes of OpenMPI on this "
                                                    "machine")),
    Variable("PMIX_NAMESPACE", str, "", ("name of the job, set by OpenMPI; it determines the "
                                         "port at which the processes meet")),
    Variable("OMPI_MCA_ess_base_jobid", str, "",
        "name of the job, set by older releases of OpenMPI"),
    Variable("MASTER_ADDR", str, "", ("address of the machine at which the processes of a job "
                                      "meet")),
    Variable("MASTER_PORT", int, 0, "port at which the processes of a job meet"),
    Variable("POPTORCH_JOB_DIR", str, "",
        ("folder that belongs to you, in which the processes of a job on one machine meet. "
         "The default is a folder in the temporary directory; set by poprun")),
    Variable("POPTORCH_JOB_KEY", str, "",
        ("secret with which the processes of a job on several machines sign their messages; "
         "set by poprun")),
    Variable("TORCHELASTIC_USE_AGENT_STORE", _flag, False,
        ("the store in which the processes meet is kept by the agent of the launcher and not "
         "by process 0; set by torchrun")),
    Variable("POPTORCH_CACHE_DIR", str, "", "folder of cached executables"),
    Variable("POPART_CACHE_DIR", str, "",
        "folder of cached executables, if no option selects one"),
    Variable("POPTORCH_DEFAULT_OPTIONS", str, "{}", "JSON applied to every new Options"),
    Variable("POPTORCH_POISON_BUFFERS", _flag, False,
        ("overwrite the buffers of the loader when they are released, which shows tensors "
         "that are used after the next batch")),
    Variable("POPTORCH_CHECK_AGAINST_EAGER", _reaction, None,
        ("what happens if a program disagrees with eager PyTorch, unless an option sets "
         "it: warn, error, or off, which disables the comparison")),
    Variable("POPTORCH_EXPORT_PROTO_FILE", str, "",
        "file to which every compiled program is written"),
    Variable("POPTORCH_EXPORT_PROTO_AS_BINARY", _flag, False,
        "write the file of POPTORCH_EXPORT_PROTO_FILE as binary data instead of text"),
    Variable("POPLAR_ENGINE_OPTIONS", str, "",
        ("engine options as JSON: those that begin with autoReport request profile reports, "
         "the others have no effect")),
    Variable("PVTI_OPTIONS", str, "",
        ('JSON, read when poptorch is imported: {"enable":"true","directory":"DIR"} writes '
         "trace channels to this folder")),
    Variable("TORCHINDUCTOR_CACHE_DIR", str, "",
        "folder of the cache of torch's compiler, and of the compiled code of this library"),
    Variable("POPTORCH_KEY_FILE", str, "",
        ("file with the key that signs the compiled code of this user; created when it is "
         "first needed")),
    Variable("POPTORCH_KEEP_FREED_MEMORY", _flag, True,
        ("compiled programs let glibc keep freed memory until `destroy()`, in the whole "
         "process")),
    Variable("POPTORCH_REMOTE_SHELL", str, "ssh -oServerAliveInterval=5 -oConnectTimeout=20 --",
             "command with which poprun reaches other hosts"),
    Variable("CXX", str, "", "the C++ compiler of the inductor backend"),
)  # fmt: skip
TABLE = {row.name: row for row in _ROWS}


def get(name: str) -> Any:
    row = TABLE[name]
    text = os.environ.get(name, "")
    if not text:
        return row.default
    try:
        return row.parse(text)
    except ValueError:
        raise InvalidValue(
            f"The environment variable {name} has an invalid value",
            got=repr(text),
            fix="use 0 or 1" if row.parse is _flag else "use a number",
        ) from None


def unknown() -> list[str]:
    return sorted(name for name in os.environ if name.startswith("POPTORCH_") and name not in TABLE)


def set_if_absent(name: str, value: str) -> None:
    os.environ.setdefault(name, value)


def put(name: str, value: str) -> None:
    os.environ[name] = value


@contextlib.contextmanager
def put_within(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


_OF_ONE_HOST = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "POPTORCH_POD_DIR",
    "POPTORCH_JOB_DIR",
    "POPTORCH_JOB_KEY",  # everybody can read the command line of a remote shell
}


def shared() -> dict[str, str]:
    """Return the variables that processes on other hosts also need: those of the table,
    and Python's.
    """
    names = {"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", *TABLE} - _OF_ONE_HOST
    return {name: value for name, value in os.environ.items() if name in names}


def is_set(name: str) -> bool:
    return bool(os.environ.get(TABLE[name].name))


def inherited() -> frozenset[tuple[str, str]]:
    """Return all variables that a process started now would inherit, except for addresses in this
    process.
    """
    return frozenset((k, v) for k, v in os.environ.items() if not k.startswith("_TORCHINDUCTOR"))


def raw(name: str, default: str) -> str:
    """Return the text of a variable whose *name* the user chose (``setEnvVarNames``)."""
    return os.environ.get(name, default)
