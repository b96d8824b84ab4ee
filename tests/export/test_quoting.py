"""Names that users choose become no code in exported files, and their numbers are the program's."""

import ast
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import exported
from helpers.cases import few
from helpers.wrapping import options
from poptorch._export import layout, quoting

PWNED = "open('pwned','w')"
HOSTILE = [
    f'"];{PWNED};["', f'"]+[{PWNED}]+["', f"'];{PWNED};['", f'"""\n{PWNED}\n"""', f'\\";{PWNED}#',
    f"a\n    {PWNED}\n", f"a\r{PWNED}", f'"); {PWNED} #', f"{{{PWNED}}}", f"{{{{{PWNED}}}}}",
    f"(x): {PWNED}\ndef f", f"§{PWNED}", '§"', "~1", "\\", "\\N{DIGIT ONE}", "%22", "\0", "\x1b[2J",
    "\ud800", "²", "ﬁ", "fi", "class", "None", "int", "float", "range", "torch", "aten", "F",
    "forward_backward", "lstm_layer", "step", "3", "", " ", "a b", "-", "\t", "\N{LINE SEPARATOR}",
]  # fmt: skip
NAMES = [name for name in HOSTILE if name]  # torch takes no empty ones
OF_CLASSES = [name for name in NAMES if not {*name} & {"\0", "\ud800"}]  # Python takes no others
KEPT = HOSTILE[:4:3]


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(f"linear {name}", nn.Linear(3, 3))
        self.register_parameter(f"{name}~", nn.Parameter(torch.ones(3)))
        self.register_buffer(f"{name} buffer", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.get_submodule(f"linear {self.name}")(x))
        return out * self._parameters[f"{self.name}~"] + self._buffers[f"{self.name} buffer"]


class Model(nn.Module):
    """Equal layers below a name, so that they become one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        layers = nn.Sequential(*(Layer(name) for _ in range(4)))
        self.add_module(f"{name} ", layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.get_submodule(f"{self.name} ")(x), "sum")


def trained(model: nn.Module) -> poptorch.PoplarExecutor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return poptorch.trainingModel(model, options(accumulation=2), optimizer)


def executed(source: str) -> str:
    """Return what Python would run of a file: no comments and no texts."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def check_export(model: nn.Module, folder: Path) -> None:
    """Export a program, run it, and compare its results and its weights with ours."""
    executor, x = trained(model), torch.randn(4, 3)
    file = folder / "step.py"
    executor.compile(x)
    executor.export(file)
    step = exported.loaded(file)
    state, _ = step.load(file.with_suffix(".safetensors"))
    got = step.step(*state, x)
    torch.testing.assert_close(got, executor(x), rtol=0, atol=0)
    assert PWNED not in executed(file.read_text())
    weights = {quoting.key(n): t for n, t in executor.state_dict().items()}
    ours = exported.of_model(step, state)
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)
    executor.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("name", few(NAMES, *KEPT), ids=ascii)
def test_names_of_modules_and_weights_are_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    check_export(Model(name), tmp_path)
    assert not Path("pwned").exists()


@pytest.mark.larger("test_names_of_modules_and_weights_are_data")
def test_all_names_together_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model("plain")
    model.get_submodule("plain ").extend([Layer(name) for name in NAMES])
    check_export(model, tmp_path)
    assert not Path("pwned").exists()


def renamed(name: str) -> type[nn.Module]:
    """A model whose class has a name that no class statement can give."""
    return type(name, (Model,), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", few(OF_CLASSES, *KEPT), ids=ascii)
def test_names_of_classes_are_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_export(renamed(name)("plain"), tmp_path)
    assert not Path("pwned").exists()


CODE = """
def forward(self, x):
    return identity_loss(self.layers(x), "sum")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ['"""', "a\n{}\n", "a\r{}", "\\"])
def test_names_of_source_files_are_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {"identity_loss": poptorch.identity_loss}
    exec(compile(CODE, f"{tmp_path}/{name.format(PWNED)}.py", "exec"), made)
    model = type("Model", (nn.Module,), {"forward": made["forward"]})()
    model.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    check_export(model, tmp_path)
    assert not Path("pwned").exists()


@pytest.mark.slow
def test_names_of_inputs_hide_nothing_that_the_loops_call(tmp_path: Path) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, range: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(self.layer(range), "sum")

    check_export(Taking(), tmp_path)


@pytest.mark.slow
def test_names_on_a_page_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)<&script>"
    executor = trained(renamed(name)(name))
    executor.compile(torch.randn(4, 3))
    executor.export(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    executor.destroy()


def test_a_long_key_is_a_key_and_no_tuple() -> None:
    key = "layer." * 30
    lines = layout.laid_out(f'g["{key}"] = total(first_of_the_values, second)', 4)
    (statement,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    assert isinstance(statement, ast.Assign)
    assert ast.unparse(statement.targets[0]) == f"g['{key}']"


def test_a_long_name_in_a_list_is_left_whole() -> None:
    names = [f"{letter * 120}" for letter in "ab"]
    lines = layout.laid_out(f'WEIGHTS = ("{names[0]}", "{names[1]}")', 0)
    found: dict[str, object] = {}
    exec("\n".join(lines), found)
    assert found["WEIGHTS"] == (*names,)


def texts() -> Iterator[str]:
    """All short texts of characters that matter to Python, and some longer ones."""
    letters = "\"'\\\n\r{}§%a~\0."
    for length in (1, 2, 3):
        yield from map("".join, itertools.product(letters, repeat=length))
    yield from HOSTILE


def test_a_key_is_one_text_between_quotes() -> None:
    for text in texts():
        written = quoting.key(text)
        assert ast.literal_eval(f'"{written}"') == written, text
        assert not {*'"\\{}§\n\r'} & {*written}, text


def test_different_names_have_different_keys() -> None:
    names = [*dict.fromkeys(texts())]
    assert len({quoting.key(name) for name in names}) == len(names)


def test_usual_names_are_their_own_keys() -> None:
    for name in ("layers.3.self_attn.q_proj.weight", "poids.é", "a-b", "small.0"):
        assert quoting.key(name) == name


def test_a_text_in_a_docstring_stays_there() -> None:
    for text in texts():
        source = f'"""{quoting.in_docstring(text)}\n"""\n'
        (statement,) = ast.parse(source).body
        assert isinstance(statement, ast.Expr), text


def test_a_comment_is_one_line() -> None:
    for text in texts():
        source = f"1  # {quoting.comment(text)}\n"
        assert len(ast.parse(source).body) == 1, text
        assert len(source.splitlines()) == 1, text


def test_an_identifier_is_a_part_of_a_name() -> None:
    for text in texts():
        assert f"a{quoting.identifier(text)}".isidentifier(), text


def test_an_argument_that_would_end_its_quotes_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="An argument of an operator cannot be exported"):
        quoting.checked('"')
