"""``poprun``: starts the processes of a job together, ends them together, over torchrun's agent.

Source: PopDist and PopRun user guide; PyTorch documentation, "torchrun".
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .commands import quiet_when_closed, shown
from .launching import Job, launch

IDLE = {
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
"""What concerns MPI, partition servers or the fabric: accepted, without effect, and said so."""
_EXAMPLE = """
poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3
poprun --num-instances 2 --only-output-from-instance 0 --max-restarts 3 python train.py
poprun --host a,b --num-instances 4 python train.py
"""


def _flag(text: str) -> bool:
    words = {"yes": True, "y": True, "true": True, "1": True}
    words |= {"no": False, "n": False, "false": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"yes or no, not {text}")
    return words[text.lower()]


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number between two, these included."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a whole number, not {text}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"at least {least}, not {text}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"at most {most}, not {text}")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    """Return what reads poprun's arguments."""
    result = argparse.ArgumentParser(
        prog="poprun",
        usage="poprun [options] program [arguments]",
        description="Run a program in several processes that train together.",
        epilog=shown(_EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--num-instances", type=_number(1), metavar="N", help="processes, on all hosts (1)")
    add("--num-replicas", type=_number(1), metavar="N", help="replicas, of all processes (as many)")
    add("--ipus-per-replica", type=_number(1), metavar="N", help="chips of each replica (1)")
    add("--stage-processes", type=_number(1), metavar="N",
        help="processes that share the stages of each model (1)")  # fmt: skip
    add("-H", "--host", metavar="A,B", help="hosts, the first of them this one; the others by ssh")
    add("--hostfile", metavar="FILE", help="a file with a host in each line")
    add(
        "--port",
        type=_number(1, 65535),
        metavar="PORT",
        help="of the first host, to meet at (29400)",
    )
    add(
        "--max-restarts",
        type=_number(0),
        metavar="N",
        help="start all again after a failure (0 times)",
    )
    add("--executable-cache-path", metavar="DIR", help="executables that all processes share")
    add("--only-output-from-instance", type=_number(0), metavar="N", help="show no other's output")
    add("--offline-mode", type=_flag, nargs="?", const=True, metavar="yes/no",
        help="compile without devices")  # fmt: skip
    add("--numa-aware", type=_flag, metavar="yes/no", help="bind each process to a NUMA node")
    add("--print-topology", type=_flag, metavar="yes/no", help="print who has which replicas")
    add("--import-config", metavar="FILE", help="read options from a JSON file; others win")
    add("--export-config", metavar="FILE", help="write the options to a JSON file")
    add("-v", dest="verbosity", action="count", help="say more; -vv still more")
    for name, value in IDLE.items():
        add(name, metavar=value, nargs="?", const="yes", help="without effect here")
    add("--rendezvous", help=argparse.SUPPRESS)  # what poprun gives to itself on other hosts
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return result


@quiet_when_closed
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; return 0, or the status of the process that failed first."""
    reader = parser()
    chosen = reader.parse_args(arguments)
    if chosen.program[:1] == ["--"]:
        del chosen.program[0]
    if not chosen.program:
        reader.error("name the program to run: poprun --num-instances 2 python train.py")
    if shutil.which(chosen.program[0]) is None:
        name = chosen.program[0]
        script = f" that can be executed: poprun python {name}" if Path(name).is_file() else ""
        reader.error(f"there is no program {name}{script}")
    values = _with_config(reader, vars(chosen))
    idle = [name for name in IDLE if values[_destination(name)] is not None]
    if idle:
        print(f"poprun: without effect here: {', '.join(idle)}", file=sys.stderr)
    job = _job(reader, values)
    if values["print_topology"]:
        print(topology(job))
    return launch(job)


def _with_config(reader: argparse.ArgumentParser, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with those of an imported file, and export them if that is asked for."""
    values = dict(given)
    if values["import_config"]:
        try:
            stored = dict(json.loads(Path(values["import_config"]).read_text()))
            said = "v" * stored.pop("verbosity", 0)
        except (OSError, TypeError, ValueError) as error:
            reader.error(f"--import-config: {error}")
        unknown = sorted(stored.keys() - values.keys())
        if unknown:
            reader.error(f"--import-config: there is no option {', '.join(unknown)}")
        words = [f"--{name.replace('_', '-')}={value}" for name, value in stored.items()]
        read = vars(reader.parse_args([*words, *([f"-{said}"] if said else [])]))
        values |= {name: value for name, value in read.items() if given[name] in (None, [])}
    if values["export_config"]:
        left_out = ("program", "import_config", "export_config", "rendezvous")
        kept = {n: v for n, v in values.items() if v is not None and n not in left_out}
        Path(values["export_config"]).write_text(json.dumps(kept, indent=2) + "\n")
    return values


def _destination(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _job(reader: argparse.ArgumentParser, values: dict[str, Any]) -> Job:
    instances = values["num_instances"] or 1
    shared = values["stage_processes"] or 1
    if instances % shared:
        reader.error(
            f"--num-instances {instances} must be a multiple of --stage-processes {shared}"
        )
    models = instances // shared
    replicas = values["num_replicas"] or models
    hosts = _hosts(reader, values)
    if replicas % models:
        of_each = f", {shared} for each model" if shared > 1 else ""
        reader.error(
            f"--num-replicas {replicas} must be a multiple of --num-instances {instances}{of_each}"
        )
    if instances % len(hosts):
        reader.error(f"--num-instances {instances} must be a multiple of the {len(hosts)} hosts")
    only = values["only_output_from_instance"]
    if only is not None and only >= instances:
        reader.error(f"--only-output-from-instance {only}: there are {instances} instances")
    return Job(
        program=tuple(values["program"]),
        instances=instances,
        replicas=replicas,
        ipus_per_replica=values["ipus_per_replica"] or 1,
        stage_processes=shared,
        hosts=hosts,
        port=values["port"] or 29400,
        rendezvous=values["rendezvous"],
        restarts=values["max_restarts"] or 0,
        cache=values["executable_cache_path"],
        only=only,
        offline=bool(values["offline_mode"]),
        numa=bool(values["numa_aware"]),
        verbosity=values["verbosity"] or 0,
    )


def _hosts(reader: argparse.ArgumentParser, values: dict[str, Any]) -> tuple[str, ...]:
    if values["hostfile"]:
        try:
            lines = Path(values["hostfile"]).read_text().splitlines()
        except OSError as error:
            reader.error(f"--hostfile: {error}")
        named = [line.split("#")[0].split()[:1] for line in lines]
        hosts = [name[0] for name in named if name]
    else:
        hosts = [name for name in (values["host"] or "").split(",") if name]
    return tuple(hosts) or ("localhost",)


def topology(job: Job) -> str:
    """Return the table of instances and their replicas."""
    lines = ["instance  host  replicas"]
    for index in range(job.instances):
        host = job.hosts[index * len(job.hosts) // job.instances]
        first = index // job.stage_processes * job.local_replicas
        lines.append(f"{index:>8}  {host}  {first} to {first + job.local_replicas - 1}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
