"""A process that was forked: told apart, and never hanging."""

import pytest

from helpers import programs

PROGRAM = """
import os, sys, threading, torch, poptorch
from poptorch._residency import cells
torch.set_num_threads(2)
options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
model = torch.nn.Linear(512, 512)
wrapper = poptorch.inferenceModel(model, options)
x = torch.randn(512, 512)
expected = wrapper(x)
for _ in range(8):  # both numbers of threads are tried
    wrapper(x)
torch.mm(x, x)
held, ended = threading.Event(), threading.Event()

def hold():  # as a thread that wraps a model while it is in a call of this one
    with wrapper._session.lock(), cells._making.now:
        held.set()
        ended.wait()

threading.Thread(target=hold).start()
held.wait()
if os.fork() == 0:
    try:
        wrapper(x)
    except RuntimeError as error:
        print("refused", "before this process was forked" in str(error), flush=True)
    again = poptorch.inferenceModel(model, options.clone())
    rounded = 512**0.5 * torch.finfo(x.dtype).eps
    print("equal", torch.allclose(again(x), expected, atol=rounded), flush=True)
    print("threads", torch.get_num_threads(), flush=True)
    os._exit(0)
os.wait()
ended.set()
print("parent", torch.equal(wrapper(x), wrapper(x)))
"""


@pytest.mark.slow
def test_a_forked_process_says_so_and_runs_what_is_new() -> None:
    run = programs.run("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    expected = ["refused", "True", "equal", "True", "threads", "1", "parent", "True"]
    assert run.stdout.split() == expected
    assert "forked from one whose operators ran on several threads" in run.stderr
