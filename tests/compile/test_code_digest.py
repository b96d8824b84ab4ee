"""Models are recognized by their Python code."""

import os
import subprocess
import sys

import pytest
from torch import nn

from poptorch._compile.code_digest import code_digest

MODEL = """
from torch import nn

def helper(x):
    return x * 2

def make():
    def inner(x):
        return x - 5
    return lambda x: inner(x)

class Base(nn.Module):
    def part(self, x):
        return x + 3

    @property
    def scale(self):
        return 6

    @staticmethod
    def still(x):
        return x / 7

class Model(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = make()

    def forward(self, x):
        x = [each + 4 for each in x if str(each) not in {"a", "b", "c"}]
        return self.function(helper(self.part(x)))
"""


def digest_of(text: str) -> str:
    """Return the digest of the model that a source text defines."""
    names = {"__name__": "somewhere"}
    exec(text, names)
    return code_digest(names["Model"]())


def test_equal_code_elsewhere_in_a_file_has_the_same_digest() -> None:
    assert digest_of("\n# a comment\n" + MODEL) == digest_of(MODEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [("x * 2", "x * 9"), ("x + 3", "x + 9"), ("each + 4", "each + 9"), ("x - 5", "x - 9"),
     ("return 6", "return 9"), ("x / 7", "x / 9"), ("self.part(x)", "self.still(x)")],
    ids=["a function", "a base class", "a comprehension", "a closure", "a property",
         "a static method", "a name"],
)  # fmt: skip
def test_other_code_has_another_digest(old: str, new: str) -> None:
    assert digest_of(MODEL.replace(old, new)) != digest_of(MODEL)


def test_layers_of_torch_have_no_code_of_their_own() -> None:
    assert code_digest(nn.Linear(2, 2)) == code_digest(nn.Sequential(nn.ReLU()))


def test_functions_that_call_each_other_have_a_digest() -> None:
    recursive = MODEL.replace("x * 2", "helper(x) if x else x")

    assert digest_of(recursive) != digest_of(MODEL)


@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process() -> None:
    script = (
        "from poptorch._compile.code_digest import code_digest\n"
        f"exec({MODEL!r}, names := {{'__name__': 'somewhere'}})\n"
        "print(code_digest(names['Model']()))"
    )
    seeded = {**os.environ, "PYTHONHASHSEED": "7"}

    printed = subprocess.check_output([sys.executable, "-c", script], text=True, env=seeded)

    assert printed.strip() == digest_of(MODEL)
