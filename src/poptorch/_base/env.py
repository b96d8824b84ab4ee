"""The table of environment variables, also the guide's; only this file reads ``os.environ``."""

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


def _reaction(text: str) -> str:
    if text not in ("warn", "error", "off"):
        raise ValueError(text)
    return text


_ROWS = (
    Variable("POPTORCH_LOG_LEVEL", str, "WARN", "verbosity of the log, read at import"),
    Variable("POPTORCH_LOG_DEST", str, "stderr", "stderr, stdout or a file for the engine's log"),
    Variable("POPTORCH_FULL_TRACEBACK", _flag, False,
        "keep the frames of this library and of torch in tracebacks of errors"),
    Variable("POPTORCH_BACKEND", str, None,
        "backend that runs the programs, unless an option does: auto, optimise, reference, ..."),
    Variable("POPTORCH_IPU_MODEL", _flag, None, "use the simulated device"),
    Variable("POPTORCH_SMALL_IPU_MODEL", _flag, None, "simulated device with 4 tiles"),
    Variable("POPTORCH_IPU_MODEL_VERSION", str, "ipu2", "simulated generation"),
    Variable("POPTORCH_POD", str, "mk2:64",
        "the system: kind:number of chips (mk1, mk2, bow, c600), or a number; 0 for no IPUs"),
    Variable("POPTORCH_POD_DIR", str, "",
        "directory in which processes note which devices they hold, and share them: who finds no "
        "free one there gets an error. Without it such a process gets devices of its own, with a "
        "warning"),
    Variable("POPTORCH_WAIT_FOR_IPU", _flag, False,
        "wait for busy devices instead of failing, or of getting devices of its own"),
    Variable("OMPI_COMM_WORLD_SIZE", int, 1, "number of processes, in every new Options"),
    Variable("OMPI_COMM_WORLD_RANK", int, 0, "index of this process, in every new Options"),
    Variable("WORLD_SIZE", int, 1, "the same from torchrun, unless OpenMPI's is set"),
    Variable("RANK", int, 0, "the same from torchrun, unless OpenMPI's is set"),
    Variable("OMPI_COMM_WORLD_LOCAL_RANK", int, 0, "index among those on this machine"),
    Variable("LOCAL_RANK", int, 0, "the same from torchrun"),
    Variable("LOCAL_WORLD_SIZE", int, 0, "how many of torchrun's processes are on this machine"),
    Variable("TORCHELASTIC_RUN_ID", str, "", "torchrun's name of the job"),
    Variable("POPDIST_NUM_TOTAL_REPLICAS", int, 0, "replicas of a job, set by poprun"),
    Variable("POPDIST_NUM_LOCAL_REPLICAS", int, 1, "replicas of each process, set by poprun"),
    Variable("POPDIST_NUM_IPUS_PER_REPLICA", int, 1, "chips of each replica, set by poprun"),
    Variable("POPDIST_STAGE_PROCESSES", int, 1, "processes of each model, set by poprun"),
    Variable("POPDIST_PROCESSES_EACH", int, 1,
        "of how many processes of the whole job each does the work, set by poprun"),
    Variable("OMPI_COMM_WORLD_LOCAL_SIZE", int, 0, "how many of OpenMPI's are on this machine"),
    Variable("PMIX_NAMESPACE", str, "", "OpenMPI's name of the job: gives the port to meet at"),
    Variable("OMPI_MCA_ess_base_jobid", str, "", "the same from older releases"),
    Variable("MASTER_ADDR", str, "", "the machine at which the processes of a job meet"),
    Variable("MASTER_PORT", int, 0, "the port there"),
    Variable("POPTORCH_JOB_DIR", str, "",
        "directory of yours in which the processes of a job on one machine meet, if not in one of "
        "the temporary directory; set by poprun"),
    Variable("POPTORCH_JOB_KEY", str, "",
        "secret with which processes on several machines sign what they tell one another; set by "
        "poprun"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", _flag, False,
        "the launcher's agent keeps the store in which they meet, not process 0; set by torchrun"),
    Variable("POPTORCH_CACHE_DIR", str, "", "directory of cached executables"),
    Variable("POPART_CACHE_DIR", str, "",
        "directory of cached executables, if no option names one"),
    Variable("POPTORCH_DEFAULT_OPTIONS", str, "{}", "JSON applied to every new Options"),
    Variable("POPTORCH_POISON_BUFFERS", _flag, False,
        "overwrite the loader's buffers when they are released, to show use after the next batch"),
    Variable("POPTORCH_CHECK_AGAINST_EAGER", _reaction, None,
        "what follows if a program disagrees with eager PyTorch, unless an option says so: warn, "
        "error, or off, which compares nothing"),
    Variable("POPTORCH_EXPORT_PROTO_FILE", str, "",
        "file that every compiled program is written to"),
    Variable("POPTORCH_EXPORT_PROTO_AS_BINARY", _flag, False,
        "write it for programs, not for people"),
    Variable("POPLAR_ENGINE_OPTIONS", str, "",
        "engine options as JSON: those of autoReport ask for profile reports, others do nothing"),
    Variable("PVTI_OPTIONS", str, "",
        'JSON, read at import: {"enable":"true","directory":"DIR"} writes trace channels there'),
    Variable("TORCHINDUCTOR_CACHE_DIR", str, "",
        "directory of torch's compiler cache, and of our code"),
    Variable("POPTORCH_KEY_FILE", str, "",
        "file of the key that marks compiled code as this user's; made when it is first needed"),
    Variable("POPTORCH_KEEP_FREED_MEMORY", _flag, True,
        "compiled programs let glibc keep freed memory until `destroy()`, in the whole process"),
    Variable("POPTORCH_REMOTE_SHELL", str, "ssh -oServerAliveInterval=5 -oConnectTimeout=20 --",
             "command by which poprun reaches other hosts"),
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
    """Return the variables of the table, and Python's, that processes on other hosts need too."""
    names = {"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", *TABLE} - _OF_ONE_HOST
    return {name: value for name, value in os.environ.items() if name in names}


def is_set(name: str) -> bool:
    return bool(os.environ.get(TABLE[name].name))


def inherited() -> frozenset[tuple[str, str]]:
    """Return all variables that a process started now would have, but for addresses in this one."""
    return frozenset((k, v) for k, v in os.environ.items() if not k.startswith("_TORCHINDUCTOR"))


def raw(name: str, default: str) -> str:
    """Return the text of a variable whose *name* the user chose (``setEnvVarNames``)."""
    return os.environ.get(name, default)
