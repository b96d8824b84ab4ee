"""Starting the processes of a job with torchrun's agent, here and by ssh on other hosts."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from .._base import env
from . import numa, places

KILLED = 128
"""What a shell adds to the number of the signal that ended a program."""
_PATIENCE = 20  # seconds from asking processes to end to ending them


@dataclass(frozen=True)
class Job:
    """What is started.

    Attributes:
        program: the command line.
        instances: processes on all hosts.
        replicas: of all processes.
        ipus_per_replica: chips of each.
        stage_processes: processes that share the stages of each model.
        hosts: the first one is this one.
        port: of the first host, to meet at, where there are several hosts.
        rendezvous: on the other hosts: where to meet, how many hosts, the job's key, the own name
            and place among them.
        restarts: how often all are started again after a failure.
        cache: folder of executables that all share, or None.
        only: whose output is shown, or None for all.
        offline: compile without devices.
        numa: bind each process to a NUMA node.
        verbosity: 0 to 2.
    """

    program: tuple[str, ...]
    instances: int
    replicas: int
    ipus_per_replica: int
    stage_processes: int
    hosts: tuple[str, ...]
    port: int
    rendezvous: str | None
    restarts: int
    cache: str | None
    only: int | None
    offline: bool
    numa: bool
    verbosity: int

    @property
    def local_replicas(self) -> int:
        """How many replicas a process has, or has stages of."""
        return self.replicas * self.stage_processes // self.instances

    @property
    def here(self) -> int:
        """How many processes run on this host."""
        return self.instances // self.host_count

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return int(self.rendezvous.split("/")[1]) if self.rendezvous else len(self.hosts)

    @property
    def place(self) -> int:
        """Which of the hosts this one is, as they were named: the first has the first processes."""
        return int(self.rendezvous.rpartition("/")[2]) if self.rendezvous else 0


def launch(job: Job) -> int:
    """Run a job to its end; return 0, or the status of the process that failed first."""
    _set_environment(job)
    if job.rendezvous is None and len(job.hosts) > 1:
        meeting = f"{job.hosts[0]}:{job.port}/{len(job.hosts)}/{secrets.token_hex()}"
        others = [
            _start_at(host, job, f"{meeting}/{host}/{place}")
            for place, host in enumerate(job.hosts)
            if place
        ]
        try:
            status = _run(job, meeting)
        except BaseException:
            for other in others:
                other.terminate()
            raise
        return next((code for code in (status, *(o.wait() for o in others)) if code), 0)
    return _run(job, job.rendezvous)


def _set_environment(job: Job) -> None:
    cores = len(os.sched_getaffinity(0))
    env.set_if_absent("OMP_NUM_THREADS", str(max(1, cores // job.here)))
    env.set_if_absent("PYTHONUNBUFFERED", "1")  # what processes print is shown at once
    env.put("POPDIST_NUM_TOTAL_REPLICAS", str(job.replicas))
    env.put("POPDIST_NUM_LOCAL_REPLICAS", str(job.local_replicas))
    env.put("POPDIST_NUM_IPUS_PER_REPLICA", str(job.ipus_per_replica))
    env.put("POPDIST_STAGE_PROCESSES", str(job.stage_processes))
    env.put("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1")
    if job.cache:
        env.put("POPTORCH_CACHE_DIR", job.cache)
    if job.offline:
        env.set_if_absent("POPTORCH_DEFAULT_OPTIONS", '{"useOfflineIpuTarget": []}')
    if job.verbosity:
        env.set_if_absent("POPTORCH_LOG_LEVEL", "INFO" if job.verbosity == 1 else "DEBUG")


def _start_at(host: str, job: Job, meeting: str) -> subprocess.Popen[bytes]:
    """Let another host start its part; it needs the same folders and programs."""
    own = {
        "--num-instances": job.instances,
        "--num-replicas": job.replicas,
        "--ipus-per-replica": job.ipus_per_replica,
        "--stage-processes": job.stage_processes,
        "--max-restarts": job.restarts,
        "--executable-cache-path": job.cache,
        "--only-output-from-instance": job.only,
        "--numa-aware": "yes" if job.numa else None,
        "--rendezvous": meeting,
    }
    options = [f"{name}={value}" for name, value in own.items() if value is not None]
    command = [sys.executable, "-m", "poptorch._cli.poprun", *options, *job.program]
    variables = [f"{name}={value}" for name, value in env.shared().items()]
    text = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *command])}"
    return subprocess.Popen([*remote_shell(), host, text])


def remote_shell() -> list[str]:
    """Return the command that runs its second argument on the host that the first one names."""
    return shlex.split(env.get("POPTORCH_REMOTE_SHELL"))


def _run(job: Job, meeting: str | None) -> int:
    """Run the processes of this host."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    level = {0: logging.CRITICAL, 1: logging.WARNING}.get(job.verbosity, logging.INFO)
    logging.getLogger("torch.distributed.elastic").setLevel(level)
    folder = tempfile.mkdtemp(prefix="poprun-")
    # The agent substitutes its variables.
    program, *arguments = [text.replace("$", "$$") for text in job.program]
    if job.numa:
        binding = [numa.__file__, "${local_rank}", str(job.here)]
        program, arguments = sys.executable, ["-IS", *binding, program, *arguments]
    try:
        elastic_launch(_config(job, meeting, folder), program)(*arguments)
    except ChildFailedError as error:
        return _say_failed(job, error)
    except SignalException as error:
        print(f"poprun: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return KILLED + int(error.sigval)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _config(job: Job, meeting: str | None, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.launcher.api import LaunchConfig

    from .meeting import BACKEND, register

    more: dict[str, Any] = {}
    if meeting is None:
        # A file: the agent unpickles what it reads there, and torch's store listens on every
        # network of this machine, to whoever connects.
        backend, endpoint = "c10d", os.path.join(folder, "meeting")
        key = secrets.token_hex()
        more["rdzv_configs"] = {"store_type": "file"}
        more["local_addr"] = "localhost"
    else:
        register()
        backend = BACKEND
        endpoint, _, key, *own = meeting.split("/")
        # Told, because a host's idea of its own name need not be that of the others.
        more["rdzv_configs"] = {"is_host": not own, "key": key, "place": job.place}
        more["local_addr"] = _resolvable(own[0] if own else job.hosts[0])
    shown = None if job.only is None else {job.only - job.place * job.here}
    return LaunchConfig(
        min_nodes=job.host_count,
        max_nodes=job.host_count,
        nproc_per_node=job.here,
        run_id=hashlib.sha256(key.encode()).hexdigest(),  # everybody may know it
        role="",
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        max_restarts=job.restarts,
        monitor_interval=0.1,
        log_line_prefix_template="[${rank}] ",
        logs_specs=places.logs(
            job.local_replicas,
            job.stage_processes,
            log_dir=folder,
            redirects=Std.ALL,
            tee=Std.ALL,
            local_ranks_filter=shown,
        ),
        shutdown_timeout=_PATIENCE,
        **more,
    )


def _resolvable(host: str) -> str | None:
    """Return a host's name if it has an address; None for one that only the remote shell knows."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return None
    return host


def _say_failed(job: Job, error: Any) -> int:
    """Say which processes ended how, the first to end first; return its status."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    first, failure = error.get_first_failure()
    for rank, each in failures:
        code = each.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        mark = ", the first to end" if rank == first and len(failures) > 1 else ""
        print(f"poprun: instance {rank} of {job.instances} {how}{mark}", file=sys.stderr)
    again = f" after {job.restarts} restarts" if job.restarts else ""
    print(f"poprun: the job has failed{again}; all instances have ended", file=sys.stderr)
    code = int(failure.exitcode)
    return KILLED - code if code < 0 else code
