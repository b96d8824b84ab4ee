"""A process that has imported torch and starts programs as forks of itself; ``programs`` asks it.

It has torch's compiler, too, most of which is imported with the first call of a wrapped model.
Run as ``python program_server.py DESCRIPTOR``, of a socket. What follows the loop at the end of
this file runs in each program: so Python itself handles what nobody catches there, threads that
are still running and the end, as of any program.
"""

import contextlib
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import types
import warnings

OWN = sys.path[1:]  # without this file's folder


def request(sock: socket.socket) -> tuple[dict, list[int]]:
    """Return the next program to start and its descriptors; end when no client is left."""
    message, files, *_ = socket.recv_fds(sock, 1 << 20, 4)
    if not message:
        os._exit(0)
    return json.loads(message), files


def reap(*_: object) -> None:
    """Let no process that has ended stay."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def attend(files: list[int]) -> bool:
    """Fork a program; return whether this is the new process. Another fork reports its id and
    status.
    """
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status, program = files.pop(), os.fork()
    if not program:
        os.close(status)
        return True
    os.write(status, b"%d\n" % program)
    for file in files:
        os.close(file)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
    os._exit(0)


def settle(settings: dict, files: list[int]) -> None:
    """Take a program's place: its files, folder, environment, session."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(settings["folder"])
    os.environ.clear()
    os.environ.update(settings["environment"])
    if settings["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()


def without_this_file(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a traceback from the program's first line on."""
    while trace and trace.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def run(words: list[str]) -> None:
    """Be ``python WORDS``: after ``-W error``, ``-c CODE``, ``-m MODULE`` or a script."""
    if words[0] == "-W":
        warnings.simplefilter("error")
        words = words[2:]
    first, *rest = words
    folder = os.path.dirname(os.path.abspath(first)) if first[:1] != "-" else os.getcwd()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [folder, *paths, *OWN]
    sys.argv[:] = [first, *rest[first in ("-c", "-m") :]]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        source, name = rest[0], "<string>"
    else:
        with open(first) as file:
            source, name = file.read(), first
        main.__file__ = first
    exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    import torch
    import torch._dynamo

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    # When a program ends, Python looks for garbage: in all of torch, that takes most of a second.
    gc.collect()
    gc.freeze()
    asking = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, reap)
    while True:
        settings, files = request(asking)
        if attend(files):
            break
        for file in files:
            os.close(file)
    asking.close()
    settle(settings, files)
    sys.excepthook = without_this_file
    run(settings["words"])
