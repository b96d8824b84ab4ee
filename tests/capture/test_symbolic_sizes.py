"""Whose code sees numbers for symbolic sizes while a model is captured."""

import sys

from torch import nn

from poptorch._capture import symbolic_sizes


class Users(nn.Module):
    """A class of the user, with a layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_the_users_module_has_an_isinstance_that_takes_sizes_for_numbers() -> None:
    with symbolic_sizes.as_numbers(Users()):
        names = set(globals())

    assert "isinstance" in names


def test_modules_of_torch_with_classes_of_the_model_keep_python_s_isinstance() -> None:
    with symbolic_sizes.as_numbers(Users()):
        names = set(vars(sys.modules[nn.Linear.__module__]))

    assert "isinstance" not in names
