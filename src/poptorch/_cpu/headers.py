"""Compile torch's C++ code with fewer headers, without parts that loops over numbers never use.

Of the 3.5 s that g++ takes for a perceptron, 2.6 s are spent reading headers: printing, schemas,
half precision, complex and random numbers, special functions, rare instructions. A folder that g++
searches first contains short replacements. Vector classes and reductions are torch's, line by line,
so results are bit-identical.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._base import log
from .._base.folders import OTHERS_WRITE, is_own, of_the_user
from .compiled_code import generator
from .toolchain import has_vectors

HERE = Path(torch.__file__).parent / "include"
OWN = Path(__file__).with_name("include")  # files that replace torch's files with the same names
# the newer standard library has longer headers; line numbers are not needed
OPTIONS = "-std=c++17 -g0 "

# A source that contains one of these names needs torch's own headers.
_BEYOND = re.compile(
    r"bfloat16|BFloat16|float16|\b[Hh]alf\b|[Ff]loat8|complex|int8|u?int16|signed char|q[u]?int|"
    r"_cpu\(\w*seed|rand\w*_cpu|Philox|erfinv|erfcx|gamma|\bi[01]e?\b|bessel|zeta|angle|ndtri|"
    r"polynomial|calc_|mm_get_|amx|AMX|micro_gemm|py::(?!gil_scoped_release_simple)|RAIIPyObject|"
    r"torch_python_|THP|scalar_to_tensor|[Rr]ecord_?[Ff]unction|[Pp]roxy|IValue|torch::stable|"
    r"Dispatcher|\b_mm\d*_|"
    r"std::(?:c(?:out|err)|\w*stream|(?:unordered_)?(?:map|set)|function|shared_ptr)"
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)', re.MULTILINE)
_INCLUDED = {
    "torch/csrc/inductor/cpp_wrapper/cpu.h", "torch/csrc/inductor/aoti_torch/c/shim_cpu.h",
    "torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/inductor/cpp_prefix.h",
    "Python.h", "sstream", "cstdlib", "cerrno", "utility",
}  # fmt: skip

_SMALL = ("BFloat16", "Float8_e4m3fn", "Float8_e4m3fnuz", "Float8_e5m2", "Float8_e5m2fnuz", "Half")
_AS_NUMBERS = (
    *(f"torch/headeronly/util/{kind}.h" for kind in (*_SMALL, "complex")),
    *(f"c10/util/{kind}.h" for kind in (*_SMALL, "complex", "BFloat16-math", "TypeCast")),
    *("c10/util/copysign.h", "c10/util/Exception.h", "torch/headeronly/util/Exception.h"),
    *("c10/util/MathConstants.h", "torch/headeronly/util/MathConstants.h"),
    *("ATen/NumericUtils.h", "ATen/native/Math.h", "ATen/native/cpu/zmath.h"),
)
_VECTORS = "ATen/cpu/vec/"
_FORMS = ("vec256", "vec512")
_EMPTY = (
    *("sstream", "iostream", f"{_VECTORS}functional_bfloat16.h", f"{_VECTORS}vec_half.h"),
    *(
        f"{_VECTORS}{form}/{form}_{kind}.h"
        for form in _FORMS
        for kind in ("bfloat16", "half", "float8", "qint", "complex_float", "complex_double")
    ),
)


def _without(text: str, *headers: str) -> str:
    names = "|".join(map(re.escape, headers))
    return re.sub(rf"^#include <(?:{names})>.*$", "", text, flags=re.MULTILINE)


def _cut(text: str, start: str, end: str) -> str:
    """Remove everything between the lines that match two patterns."""
    found = re.search(rf"^{start}.*?(?=^{end})", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"no {start!r} before {end!r}")
    return text[: found.start()] + text[found.end() :]


_PRINTING = re.compile(
    r"(?:^template <[^\n]*>\n)?^(?:inline )?std::ostream& operator<<\([^{]*\{\n(?: .*\n|\n)*\}\n",
    re.MULTILINE,
)


def _vectors(text: str) -> str:
    text = _PRINTING.sub("", _without(text, "functional", "ostream"))
    return text.replace("std::arg(x)", "x.arg()").replace("std::conj(x)", "x.conj()")


_OTHER_NUMBERS = re.compile(
    r"BFloat16|Half|Float8|reduced_floating|bf16|fp16|float8|float_to_u?int8|int8_to_float"
)


def _conversions(text: str) -> str:
    """Remove specialisations for number types that are only declared."""
    structs = re.compile(r"^template <[^{}]*?^struct .*?^\};\n", re.MULTILINE | re.DOTALL)
    text = structs.sub(lambda s: "" if _OTHER_NUMBERS.search(s[0]) else s[0], text)
    return _without(text, *(f"{_VECTORS}{form}/{form}_bfloat16.h" for form in _FORMS))


def _prefix(text: str) -> str:
    unused = "c10/util/hash.h", "c10/util/ArrayRef.h", "ATen/core/PhiloxRNGEngine.h"
    text = _without(text, "map", "unordered_map", "memory", *unused)
    text = _cut(
        text, "constexpr float uint32_to_uniform_float", r"template <typename T>\nstruct As"
    )
    text = _cut(text, r"inline [^\n]*\b_get_factors\(", "struct amx_tile")
    # A loop may own memory, and code that Python calls has no other header with pointers.
    added = "<tuple>", "<vector>", "<poptorch/pointers.h>"
    return text.replace("<atomic>", "\n#include ".join(["<atomic>", *added]))


def _elementary_functions(text: str) -> str:
    kinds = ("float", "double")
    users = (HERE / _VECTORS / form / f"{form}_{kind}.h" for form in _FORMS for kind in kinds)
    called = {name for path in users for name in re.findall(r"\bSleef_\w+", path.read_text())}
    declared = re.compile(r"^SLEEF_IMPORT .*?(Sleef_\w+)\(.*\n", re.MULTILINE)
    text = declared.sub(lambda line: line[0] if line[1] in called else "", text)
    return text.replace("<x86intrin.h>", "<immintrin.h>")


def _errors(text: str) -> str:
    text = _without(text, "memory").replace("std::stringstream", "poptorch::Text")
    check = "inline void assert_size_stride("  # mostly what makes the text of an error
    text = text.replace(check, f'__attribute__((optimize("O1"))) {check}')
    return text.replace("#pragma once", "#pragma once\n#include <poptorch/texts.h>", 1)


_CHANGED: Mapping[str, Callable[[str], str]] = {
    "sleef.h": _elementary_functions,
    "torch/csrc/inductor/cpp_prefix.h": _prefix,
    "torch/csrc/inductor/aoti_runtime/utils.h": _errors,
    "torch/headeronly/util/shim_utils.h": _errors,
    f"{_VECTORS}vec_base.h": _vectors,
    f"{_VECTORS}vec_n.h": _vectors,
    **{f"{_VECTORS}{form}/{form}_convert.h": _conversions for form in _FORMS},
}


_OF_INSTRUCTIONS = (
    *(f"{kind}mmintrin.h" for kind in ("", "x", "e", "p", "t", "s")),
    *(f"avx512{kind}intrin.h" for kind in ("f", "cd", "vl", "bw", "dq", "vlbw", "vldq")),
    *("avxintrin.h", "avx2intrin.h", "fmaintrin.h", "f16cintrin.h"),
)
_INTRINSIC = re.compile(
    r"^extern __inline\b(?:.*\n)+?(_(?!_attribute__)\w+)\s*\((?:.*\n)+?\}\n", re.MULTILINE
)
# the definitions that are used without -O
_MACRO = re.compile(r"^#define (_\w+)\((?:.*\\\n)*.*\n", re.MULTILINE)
# names that reductions assemble from parts
_PASTED = re.compile(r"_mm\d*_(?:add|mul|and|or|min|max)_\w+")
# a pattern that begins with a letter is found much faster than one that begins with ``\b``
_NAMES = re.compile(r"_(?<!\w_)[a-z]\w+")


def _intrinsics(compilers: Path, others: Iterable[str]) -> dict[str, str]:
    """Return g++'s headers of vector instructions with only those instructions that other headers
    use.

    These are a tenth of 4,900. Reading the others takes 0.2 of the 1.8 s for a perceptron.
    """
    paths = map(compilers.joinpath, _OF_INSTRUCTIONS)
    parts = {path.name: [*_parts(path.read_text())] for path in paths if path.is_file()}
    bodies: dict[str, str] = {}
    for name, body, _ in itertools.chain.from_iterable(parts.values()):
        bodies[name] = bodies.get(name, "") + body
    del bodies[""]

    def rest_of(between: str) -> str:
        return _MACRO.sub(lambda macro: "" if macro[1] in bodies else macro[0], between)

    parts = {
        file: [(name, body, rest_of(between)) for name, body, between in each]
        for file, each in parts.items()
    }
    rests = ("".join(rest for _, _, rest in each) for each in parts.values())
    called, calling = set[str](), [*others, *rests]
    new = set(filter(_PASTED.fullmatch, bodies))
    while calling:
        new |= {name for text in calling for name in _NAMES.findall(text)} & bodies.keys() - called
        called |= new
        calling, new = [bodies[name] for name in new], set()
    return {
        file: "".join((body if name in called else "") + rest for name, body, rest in each)
        for file, each in parts.items()
    }


def _parts(text: str) -> Iterator[tuple[str, str, str]]:
    """Cut a header before each instruction: its name, its definition, and the text behind it. The
    first part has only text.
    """
    name = body = ""
    end = 0
    for found in _INTRINSIC.finditer(text):
        yield name, body, text[end : found.start()]
        (name, body), end = (found[1], found[0]), found.end()
    yield name, body, text[end:]


def texts(compilers: Path) -> dict[str, str]:
    """Return the files of the folder by name, made from torch's and the compiler's headers."""
    own = filter(Path.is_file, OWN.rglob("*"))
    ours = {
        **dict.fromkeys(_EMPTY, "#pragma once\n"),
        **dict.fromkeys(_AS_NUMBERS, "#pragma once\n#include <poptorch/numbers.h>\n"),
        **{str(path.relative_to(OWN)): path.read_text() for path in own},
        **{name: change((HERE / name).read_text()) for name, change in _CHANGED.items()},
    }
    vectors = (
        path.read_text() for form in ("", *_FORMS) for path in (HERE / _VECTORS / form).glob("*.h")
    )
    return ours | _intrinsics(compilers, (*ours.values(), *vectors))


@functools.cache
def _of(compiler: str) -> Path:
    """Return the folder of a compiler's own headers."""
    command = [*shlex.split(compiler), "-print-file-name=include"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


@functools.cache
def _digest(compilers: Path) -> str:
    age = compilers.stat().st_mtime_ns
    made = (generator(), torch.__version__, str(HERE), str(compilers), str(age))
    return hashlib.sha256("\n".join(made).encode()).hexdigest()[:16]


def folder(compiler: str) -> Path | None:
    """Return the folder, and write it if necessary; None if torch has other headers."""
    if not has_vectors():
        return None
    try:
        compilers = _of(compiler)
        place = of_the_user() / f"headers-{_digest(compilers)}"
        if not _exists(place):
            _write(place, texts(compilers))
    except (LookupError, OSError, subprocess.CalledProcessError) as error:
        log.engine.debug("The C++ compiler reads all of torch's headers: %s", error)
        return None
    return place


def _write(place: Path, files: Mapping[str, str]) -> None:
    """Write the folder. It is complete when it appears, and nobody else can write to it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as new:
        for name, text in files.items():
            path = Path(new, "of", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for path in Path(new, "of").rglob("*"):
            path.chmod(path.stat().st_mode & ~OTHERS_WRITE)
        Path(new, "of").chmod(0o700)
        try:
            os.rename(Path(new, "of"), place)
        except OSError:
            if not _exists(place):  # another process may have been faster
                raise


def _exists(place: Path) -> bool:
    """Return whether the folder exists. Refuse one in which somebody else wrote a file.

    These headers are compiled and run, and the folder above may have been open to others when it
    was written.
    """
    if not os.path.lexists(place):
        return False
    foreign = next((path for path in (place, *place.rglob("*")) if not is_own(path)), None)
    if foreign is not None:
        raise LookupError(f"other users can access {foreign}; delete {place}")
    return True


def suffice(source: str) -> bool:
    """Return whether the folder has everything that a source needs, by the names in the source."""
    return _INCLUDED.issuperset(_INCLUDE.findall(source)) and not _BEYOND.search(source)


_CHANGING = ("_cflags_args", "_include_dirs_args", "_libraries_args")
_TORCHS = re.compile(r"(?:-l(?:torch\w*|c10) )+")
# sources for which the folder was not sufficient, although it should have been
_refused: list[str] = []


def _library(place: Path, compiler: str) -> Path:
    """Return an empty library with the name of torch's library, which the process already loaded.

    Reading torch's library takes 0.3 of the 2.0 s for a perceptron.
    """
    path = place / "libtorch_python.so"
    if not path.exists():
        options = f"-shared -nostdlib -Wl,-soname,{path.name} -x c++ {os.devnull} -o {path.name}"
        with tempfile.TemporaryDirectory(dir=place) as new:
            command = shlex.split(f"{compiler} {options}")
            subprocess.run(command, cwd=new, check=True, capture_output=True)
            os.replace(Path(new, path.name), path)
    return path


def build(builder: Any, given_up: Callable[[], bool] = lambda: False) -> None:
    """Build as torch does, but first with the folder if it is sufficient for the source.

    ``given_up`` returns True if the C++ compiler was ended on purpose, so that another attempt is
    useless.
    """
    # a single source; several paths or object files do not match
    path = Path(builder._sources_args)
    place = None if _refused else folder(builder._compiler)
    if place is None:
        builder.build()
        return
    usual = {name: getattr(builder, name) for name in _CHANGING}
    try:
        if path.suffix == ".cpp" and path.is_file() and suffice(path.read_text()):
            builder._include_dirs_args = f"-I{place} {builder._include_dirs_args}"
            builder._cflags_args += OPTIONS
        library = f"-Wl,--no-as-needed {_library(place, builder._compiler)} "
        builder._libraries_args = _TORCHS.sub(library, builder._libraries_args, 1)
        builder.build()
    except Exception as error:  # torch's headers have changed, or the compiler has failed
        if given_up():
            raise
        log.engine.debug("Compiling with all of torch's headers: %s", error)
        _refused.append(str(path))
        vars(builder).update(usual)
        builder.build()
