"""Implement ``poprun``: start, restart and end the processes of a job together, with torchrun's
agent.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import json
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base import env, resources, safe_files
from . import agents, reaper
from .commands import command, page

KILLED = 128  # a shell adds this to the number of the signal that ended a program
NODES = Path("/sys/devices/system/node")
_LOST = signal.SIGUSR1  # sent to this host's agent when another host is lost
# ssh's status if the host cannot be reached or the connection breaks; the shell on that host can
# return it, too
_UNREACHED = 255
_MEETING = 120  # seconds to wait, at a start or restart, until all hosts have joined
_PATIENCE = 20  # seconds between asking processes to end and killing them
# Open MPI's variables, which scripts read, and torchrun's variables with the same values
_OPENMPIS = {
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
}
# Bind a process to the cores of its rank. Torch's binding is for processes with one GPU each.
_BIND = """import json, os, sys
cores, rank, *program = sys.argv[1:]
os.sched_setaffinity(0, json.loads(cores)[int(rank)])
os.execvp(program[0], program)"""
IDLE = {  # for MPI, partition servers or the fabric: accepted with a message, but without effect
    "--num-ilds": "N",
    "--vipu-server-host": "HOST",
    "--vipu-server-port": "PORT",
    "--vipu-server-timeout": "SECONDS",
    "--vipu-partition": "NAME",
    "--vipu-allocation": "NAME",
    "--vipu-cluster": "NAME",
    "--vipu-partition-attempts": "N",
    "--update-partition": "yes/no",
    "--reset-partition": "yes/no",
    "--remove-partition": "yes/no",
    "--mpi-global-args": "ARGS",
    "--mpi-local-args": "ARGS",
    "--sync-type": "TYPE",
}
_OWN = (  # options that another host's part of the job receives
    "num_instances", "num_replicas", "ipus_per_replica", "stage_processes", "max_restarts",
    "executable_cache_path", "only_output_from_instance", "numa_aware", "oversubscribe",
)  # fmt: skip
# These arguments are about the command itself. Option files neither contain nor set them.
_OF_THE_COMMAND = {"program", "import_config", "export_config", "rendezvous"}
Job = argparse.Namespace  # the options, and what ``complete`` adds
_EXAMPLE = """
poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3
poprun --num-instances 2 --only-output-from-instance 0 --max-restarts 3 python train.py
poprun --host a,b --num-instances 4 python train.py
"""


def _flag(text: str) -> bool:
    yes, no = ("yes", "y", "true", "1"), ("no", "n", "false", "0")
    if text.lower() not in yes + no:
        raise argparse.ArgumentTypeError(f"must be yes or no, not {text}")
    return text.lower() in yes


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {text}")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="poprun",
        usage="poprun [options] program [arguments]",
        description="Run a program in several processes that train together.",
        **page(_EXAMPLE),
        allow_abbrev=False,
    )
    add = result.add_argument
    add("-n", "--num-instances", type=_number(1), default=1, metavar="N",
        help="number of processes on all hosts together (default: 1)")  # fmt: skip
    add(
        "--num-replicas",
        type=_number(1),
        metavar="N",
        help=("number of replicas of all processes together (default: 1 per process)"),
    )
    add("--ipus-per-replica", type=_number(1), default=1, metavar="N",
        help="number of chips per replica (default: 1)")  # fmt: skip
    add("--stage-processes", type=_number(1), default=1, metavar="N",
        help="number of processes that share the stages of each model (default: 1)")  # fmt: skip
    add(
        "-H",
        "--host",
        metavar="A,B",
        help=("comma-separated hosts: first this one, then the others, which are reached by ssh"),
    )
    add("--hostfile", metavar="FILE", help="a file with one host per line")
    add("--port", type=_number(1, 65535), default=29400, metavar="PORT",
        help="port of the first host at which the hosts meet (default: 29400)")  # fmt: skip
    add(
        "--max-restarts",
        type=_number(0),
        default=0,
        metavar="N",
        help="after a failure, restart all processes, at most N times (default: 0)",
    )
    add(
        "--min-instances",
        type=_number(1),
        metavar="N",
        help=(
            "if a host is lost or all restarts are used, continue with fewer processes, but at "
            "least N (default: all are needed)"
        ),
    )
    add("--oversubscribe", action="store_const", const=True,
        help="start more instances than the machine has cores and memory for")  # fmt: skip
    add(
        "--executable-cache-path",
        metavar="DIR",
        help=("folder of compiled programs that all processes share"),
    )
    add(
        "--only-output-from-instance",
        type=_number(0),
        metavar="N",
        help=("show the output of only this instance"),
    )
    add("--offline-mode", type=_flag, nargs="?", const=True, metavar="yes/no",
        help="compile without acquiring devices")  # fmt: skip
    add("--numa-aware", type=_flag, metavar="yes/no", help="bind each process to a NUMA node")
    add(
        "--print-topology",
        type=_flag,
        metavar="yes/no",
        help=("print which process has which replicas"),
    )
    add(
        "--import-config",
        metavar="FILE",
        help=("read options from a JSON file; options on the command line override them"),
    )
    add("--export-config", metavar="FILE", help="write the options to a JSON file")
    add(
        "-v",
        dest="verbosity",
        action="count",
        default=0,
        help=("print more details; -vv prints even more"),
    )
    for name, value in IDLE.items():
        add(name, metavar=value, nargs="?", const="yes", help="accepted, but has no effect here")
    # The index of this host. Poprun passes it to itself on all hosts but the first.
    add("--rendezvous", type=int, default=0, help=argparse.SUPPRESS)
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return result


@command
def main(arguments: Sequence[str] | None = None) -> int:
    reader = parser()
    chosen = reader.parse_args(arguments)
    if chosen.import_config:
        # They precede those of the command line, because the last value of an option counts.
        words = _imported(reader, chosen)
        chosen = reader.parse_args([*words, *(sys.argv[1:] if arguments is None else arguments)])
    if chosen.program[:1] == ["--"]:
        del chosen.program[0]
    if not chosen.program:
        reader.error(
            "the program to run is missing, for example: poprun --num-instances 2 python train.py"
        )
    if shutil.which(chosen.program[0]) is None:
        name = chosen.program[0]
        script = f" that can be executed: poprun python {name}" if Path(name).is_file() else ""
        reader.error(f"there is no program {name}{script}")
    if chosen.export_config:
        given = {n: v for n, v in vars(chosen).items() if v != reader.get_default(n)}
        kept = {name: value for name, value in given.items() if name not in _OF_THE_COMMAND}
        text = json.dumps(kept, indent=2) + "\n"
        safe_files.write_text_for_user(Path(chosen.export_config), text)
    idle = [name for name in IDLE if getattr(chosen, name[2:].replace("-", "_")) is not None]
    if idle:
        print(f"poprun: these options have no effect here: {', '.join(idle)}", file=sys.stderr)
    job = complete(reader, chosen)
    lack = None if job.oversubscribe else lacking(job)
    if lack is not None:
        reader.error(f"{lack}: start fewer instances, or pass --oversubscribe")
    if job.print_topology:
        print(topology(job))
    return launch(job)


def _imported(reader: argparse.ArgumentParser, chosen: Job) -> list[str]:
    try:
        stored = dict(json.loads(Path(chosen.import_config).read_text()))
        v_flags = "v" * stored.pop("verbosity", 0)
    except (OSError, TypeError, ValueError) as error:
        reader.error(f"--import-config: {error}")
    refused = sorted(stored.keys() & _OF_THE_COMMAND)
    if refused:
        reader.error(f"--import-config: a file may not set {', '.join(refused)}")
    unknown = sorted(stored.keys() - vars(chosen).keys())
    if unknown:
        reader.error(f"--import-config: there is no option {', '.join(unknown)}")
    return [*_words(stored), *([f"-{v_flags}"] if v_flags and not chosen.verbosity else ())]


def _words(options: Mapping[str, Any]) -> list[str]:
    given = {name.replace("_", "-"): value for name, value in options.items()}
    return [f"--{name}" if name == "oversubscribe" else f"--{name}={value}"
            for name, value in given.items() if value is not None]  # fmt: skip


def complete(reader: argparse.ArgumentParser, job: Job) -> Job:
    instances, shared = job.num_instances, job.stage_processes
    if instances % shared:
        reader.error(
            f"--num-instances {instances} must be a multiple of --stage-processes {shared}"
        )
    models = instances // shared
    job.num_replicas = job.num_replicas or models
    job.hosts = _hosts(reader, job)
    if job.num_replicas % models:
        of_each = f", {shared} for each model" if shared > 1 else ""
        reader.error(
            f"--num-replicas {job.num_replicas} must be a multiple of --num-instances "
            f"{instances}{of_each}"
        )
    if instances % len(job.hosts):
        of_hosts = f"a multiple of the {len(job.hosts)} hosts"
        reader.error(f"--num-instances {instances} must be {of_hosts}")
    only = job.only_output_from_instance
    if only is not None and only >= instances:
        reader.error(f"--only-output-from-instance {only}: there are {instances} instances")
    # replicas that a process runs, or runs stages of
    job.local_replicas = job.num_replicas // models
    job.here = instances // len(job.hosts)
    job.whole = instances
    least = job.min_instances
    if least and least > instances:
        reader.error(f"--min-instances {least}: there are {instances} instances")
    if least and least < instances and fewer(job, {}) is None:
        able = [n for n in range(1, instances) if not instances % n and not n % shared]
        reader.error(
            f"--min-instances {least}: the work of {instances} instances can be divided "
            f"evenly only among {', '.join(map(str, able)) or 'all of them'}"
        )
    given = env.shared().get("OMP_NUM_THREADS", "").partition(",")[0]
    fair = max(1, len(os.sched_getaffinity(0)) // job.here)
    job.threads = int(given) if given.isdigit() else fair
    # The key protects the meeting of hosts. Other hosts read it from their standard input, which
    # nobody else can see.
    job.key = sys.stdin.readline().strip() if job.rendezvous else secrets.token_hex()
    # is in the environment of all processes that are started here
    job.launcher = secrets.token_hex()
    return job


def _hosts(reader: argparse.ArgumentParser, job: Job) -> list[str]:
    if job.hostfile:
        try:
            lines = Path(job.hostfile).read_text().splitlines()
        except OSError as error:
            reader.error(f"--hostfile: {error}")
        named = [line.split("#")[0].split()[:1] for line in lines]
        hosts = [name[0] for name in named if name]
    else:
        hosts = [name for name in (job.host or "").split(",") if name]
    odd = next((host for host in hosts if host.startswith("-")), None)
    if odd is not None:  # the remote shell would read it as one of its own options
        reader.error(f"--host: {odd} is not the name of a host, because it begins with a dash")
    return hosts or ["localhost"]


def lacking(job: Job) -> str | None:
    """Return what this host lacks for the number of instances that start here, or None."""
    from torch.distributed.launcher import api  # noqa: F401 (each instance needs as much memory)

    cores, each = len(os.sched_getaffinity(0)), resources.own_memory()
    free, threads = resources.available_memory(), job.here * job.threads
    if threads > cores:
        requested = f"{job.here} instances x {job.threads} threads (OMP_NUM_THREADS)"
        return f"{requested}, but only {cores} cores"
    if job.here * each > free:
        mib = f"at least {each >> 20} MiB of memory each, but only {free >> 20} MiB are free"
        return f"{job.here} instances that need {mib}"
    return None


def fewer(job: Job, lost: Mapping[int, str]) -> Job | None:
    """Return the largest smaller job that can do all the work without the lost hosts."""
    hosts = [host for place, host in enumerate(job.hosts) if place not in lost]
    most = min(job.here * len(hosts), job.num_instances - 1)
    for count in range(most, (job.min_instances or job.whole) - 1, -1):
        used = [n for n in range(len(hosts), 0, -1) if not count % n and count <= n * job.here]
        if used and not (job.whole % count or count % job.stage_processes):
            only = job.only_output_from_instance
            changes: dict[str, Any] = {"num_instances": count, "here": count // used[0]}
            changes["hosts"] = hosts[: used[0]]
            changes["only_output_from_instance"] = only and min(only, count - 1)
            return Job(**{**vars(job), **changes})
    return None


def topology(job: Job) -> str:
    lines = ["instance  host  replicas"]
    for index in range(job.num_instances):
        host = job.hosts[index * len(job.hosts) // job.num_instances]
        first = index // job.stage_processes * job.local_replicas
        lines.append(f"{index:>8}  {host}  {first} to {first + job.local_replicas - 1}")
    return "\n".join(lines)


def launch(job: Job) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        return _run_with_restarts(job)
    except SignalException as error:
        print(f"poprun: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return KILLED + int(error.sigval)


def _run_with_restarts(job: Job) -> int:
    """Start the job. Start it again when a host is lost, with fewer instances if that is
    allowed.
    """
    restarts = job.max_restarts
    while True:
        status, lost = _start(job)
        if not status or job.rendezvous:
            return status
        for place, how in lost.items():
            print(f"poprun: host {job.hosts[place]} is lost: {how}", file=sys.stderr)
        smaller = fewer(job, lost)
        if smaller is not None:
            job, restarts = smaller, job.max_restarts
            of_each = f"each does the work of {job.whole // job.num_instances}"
            text = f"{job.num_instances} of {job.whole} instances; {of_each}"
            print(f"poprun: continuing with {text}", file=sys.stderr)
        elif lost and restarts:
            restarts -= 1
        else:
            return status
        job.local_replicas = job.num_replicas * job.stage_processes // job.num_instances
        job.key = secrets.token_hex()  # processes of the last start must not join


def _start(job: Job) -> tuple[int, dict[int, str]]:
    """Start the job, and return its status and which hosts are lost, with the reasons."""
    _set_environment(job)
    places = [] if job.rendezvous else range(1, len(job.hosts))
    others = {place: _start_at(job.hosts[place], job, place) for place in places}
    try:
        status = _run_while(job, others)
        until = time.monotonic() + _PATIENCE * bool(status)
        for other in others.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(max(until - time.monotonic(), 0) if status else None)
        codes = {place: other.poll() for place, other in others.items()}
    finally:
        for other in others.values():
            other.terminate()  # has no effect on processes that have already ended
    status = next((code for code in (status, *codes.values()) if code), 0)
    lost = {place: _how(code) for place, code in codes.items() if code is None or _is_loss(code)}
    return status, lost


def _is_loss(code: int) -> bool:
    """Return whether a status comes from the shell that connects to a host, and not from poprun."""
    return code < 0 or code == _UNREACHED


def _how(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    return f"its shell ended with {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _run_while(job: Job, others: Mapping[int, subprocess.Popen[str]]) -> int:
    """Run this host's part of the job, and stop when another host is lost, because the agent would
    wait.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    lock, is_over = threading.Lock(), False

    def watch(other: subprocess.Popen[str]) -> None:
        loses = _is_loss(other.wait())
        with lock:
            if loses and not is_over:
                os.kill(os.getpid(), _LOST)

    def end(number: int, frame: object) -> None:
        raise SignalException("a host is lost", _LOST)

    try:
        if others:
            signal.signal(_LOST, end)
        for other in others.values():
            threading.Thread(target=watch, args=[other], daemon=True).start()
        try:
            return _run(job)
        finally:
            with lock:
                is_over = True
    except SignalException as error:
        if error.sigval != _LOST:
            raise
        return 1


def _set_environment(job: Job) -> None:
    env.set_if_absent("OMP_NUM_THREADS", str(job.threads))
    env.set_if_absent("PYTHONUNBUFFERED", "1")  # show the output of processes immediately
    env.put("POPDIST_NUM_TOTAL_REPLICAS", str(job.num_replicas))
    env.put("POPDIST_NUM_LOCAL_REPLICAS", str(job.local_replicas))
    env.put("POPDIST_NUM_IPUS_PER_REPLICA", str(job.ipus_per_replica))
    env.put("POPDIST_STAGE_PROCESSES", str(job.stage_processes))
    if not job.rendezvous:  # the first host has already printed this for all hosts
        env.put("POPDIST_PROCESSES_EACH", str(job.whole // job.num_instances))
    env.put("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1")
    if job.executable_cache_path:
        env.put("POPTORCH_CACHE_DIR", job.executable_cache_path)
    if job.offline_mode:
        env.set_if_absent("POPTORCH_DEFAULT_OPTIONS", '{"useOfflineIpuTarget": []}')
    if job.verbosity:
        env.set_if_absent("POPTORCH_LOG_LEVEL", "INFO" if job.verbosity == 1 else "DEBUG")


def _start_at(host: str, job: Job, place: int) -> subprocess.Popen[str]:
    """Start another host's part of the job. That host needs the same folders and programs."""
    own = {name: getattr(job, name) for name in _OWN}
    where = {"host": ",".join(job.hosts), "port": job.port, "rendezvous": place}
    # Without -P, modules in the working directory would hide Python's own.
    python = [sys.executable, "-P", "-m", "poptorch._cli.poprun"]
    command = [*python, *_words(own | where), *job.program]
    variables = [f"{name}={value}" for name, value in env.shared().items()]
    shell = shlex.split(env.get("POPTORCH_REMOTE_SHELL"))
    text = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *command])}"
    other = subprocess.Popen([*shell, host, text], stdin=subprocess.PIPE, text=True)
    assert other.stdin is not None
    # if the process has ended, its status says so
    with contextlib.suppress(BrokenPipeError), other.stdin:
        other.stdin.write(f"{job.key}\n")
    return other


def _run(job: Job) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    level = {0: logging.CRITICAL, 1: logging.WARNING}.get(job.verbosity, logging.INFO)
    logging.getLogger("torch.distributed.elastic").setLevel(level)
    folder = tempfile.mkdtemp(prefix="poprun-")
    # The agent replaces variables in these texts.
    command = [text.replace("$", "$$") for text in job.program]
    cores = numa_cores(NODES, os.sched_getaffinity(0), job.here) if job.numa_aware else []
    if cores:
        command = [sys.executable, "-ISc", _BIND, json.dumps(cores), "${local_rank}", *command]
    elif job.numa_aware:
        print(f"poprun: --numa-aware: there are no nodes at {NODES}", file=sys.stderr)

    watching = _reaper(job.launcher, folder)
    try:
        elastic_launch(_config(job, folder), command[0])(*command[1:])
    except ChildFailedError as error:
        return _report_failed(job, error)
    except RendezvousError as error:
        cut = isinstance(error, RendezvousConnectionError)
        first = f"{job.hosts[0]}:{job.port} cannot be reached from {job.hosts[job.rendezvous]}"
        why = first if cut else str(error) or f"not within {_MEETING} s"
        print(f"poprun: the hosts could not connect: {why}", file=sys.stderr)
        return _UNREACHED if cut else 1
    finally:
        watching.communicate()
    return 0


def _reaper(launcher: str, folder: str) -> subprocess.Popen[bytes]:
    """Start a process that kills the rest of the job when this process ends or closes its input."""
    command = [sys.executable, "-IS", reaper.__file__, launcher, folder]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, start_new_session=True
    )


def numa_cores(folder: Path, usable: set[int], processes: int) -> list[list[int]]:
    """Return each process's cores, which are neighbours on one NUMA node, or nothing if there are
    no nodes.
    """
    paths = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    nodes = [sorted(own) for path in paths if (own := _cores(path.read_text()) & usable)]
    return [nodes[index * len(nodes) // processes] for index in range(processes if nodes else 0)]


def _cores(text: str) -> set[int]:
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}


def _config(job: Job, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.launcher.api import LaunchConfig

    place, hosts, only = job.rendezvous, len(job.hosts), job.only_output_from_instance
    agents.register()
    settings: dict[str, Any] = {}
    address: str | None = agents.LOCAL
    if hosts > 1:
        settings = {"key": job.key, "place": place, "join_timeout": _MEETING}
        # Pass the address explicitly, because other hosts may not know this host by its own name.
        address = None
        with contextlib.suppress(OSError):  # perhaps only the remote shell knows the name
            socket.getaddrinfo(job.hosts[place], None)
            address = job.hosts[place]
    shown = None if only is None else {only - place * job.here}
    return LaunchConfig(
        min_nodes=hosts,
        max_nodes=hosts,
        nproc_per_node=job.here,
        run_id=hashlib.sha256(job.key.encode()).hexdigest(),  # the hash is not a secret
        role="",
        rdzv_backend=agents.BACKEND,
        rdzv_endpoint=f"{job.hosts[0]}:{job.port}" if hosts > 1 else "",
        rdzv_configs=settings,
        local_addr=address,
        max_restarts=job.max_restarts,
        monitor_interval=0.1,
        log_line_prefix_template="[${rank}] ",
        logs_specs=_logs(
            job,
            folder,
            log_dir=folder,
            redirects=Std.ALL,
            tee=Std.ALL,
            local_ranks_filter=shown,
        ),
        shutdown_timeout=_PATIENCE,
    )


def _logs(job: Job, folder: str, **settings: Any) -> Any:
    """Return torch's log specs. They also set the variables of each start, which torch sets in the
    same place.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            for own in envs.values():
                own |= variables(own, job.local_replicas, job.stage_processes)
                own |= secrets_of(job, folder)
                own[reaper.VARIABLE] = job.launcher
            return super().reify(envs)

    return Logs(**settings)


def secrets_of(job: Job, folder: str) -> dict[str, str]:
    """Return the secrets of this job for its processes. Nobody else can read their environment."""
    if len(job.hosts) == 1:
        return {"POPTORCH_JOB_DIR": os.path.join(folder, "job")}
    key = hmac.digest(job.key.encode(), b"processes", hashlib.sha256)
    return {"POPTORCH_JOB_KEY": key.hex()}


def variables(
    torchruns: Mapping[str, str], local_replicas: int, stage_processes: int
) -> dict[str, str]:
    first = int(torchruns["RANK"]) // stage_processes * local_replicas
    return {
        "POPDIST_REPLICA_INDEX_OFFSET": str(first),
        "POPDIST_LOCAL_INSTANCE_INDEX": torchruns["LOCAL_RANK"],
        **{name: torchruns[theirs] for name, theirs in _OPENMPIS.items()},
    }


def _report_failed(job: Job, error: Any) -> int:
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    first, failure = error.get_first_failure()
    for rank, each in failures:
        code = each.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        mark = ", the first to end" if rank == first and len(failures) > 1 else ""
        print(f"poprun: instance {rank} of {job.num_instances} {how}{mark}", file=sys.stderr)
    after_restarts = f" after {job.max_restarts} restarts" if job.max_restarts else ""
    print(f"poprun: the job failed{after_restarts}; all instances have ended", file=sys.stderr)
    code = int(failure.exitcode)
    return KILLED - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
