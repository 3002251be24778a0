"""Importing starts nothing: no torch, no threads, no look at the environment, no compilation, no cache folder."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "thinwire"
LAB = Path(__file__).parents[1] / "lab" / "src" / "thinwire_lab"
MODULES = {
    ".".join(("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def run(code: str, **environment: str) -> str:
    """Returns the output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_thinwire_is_light_and_starts_no_thread() -> None:
    """Under an audit hook: no thread, socket, subprocess or file opened for writing; and no look at the environment."""
    code = """
import os, sys, threading

seen = []

def audit(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.fork", "os.exec", "_thread.start", "os.mkdir", "os.putenv")):
        seen.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        seen.append((event, arguments[0]))

class Watched:
    def __init__(self, inner): self._inner = inner
    def __getattr__(self, name): seen.append(("environ", name)); return getattr(self._inner, name)
    def __getitem__(self, key): seen.append(("environ", key)); return self._inner[key]
    def __contains__(self, key): seen.append(("environ", key)); return key in self._inner

sys.dont_write_bytecode = True
import importlib.metadata, typing, dataclasses  # what the standard library reads is its own business
os.environ = Watched(os.environ)
sys.addaudithook(audit)
import thinwire
heavy = {"torch", "numpy", "numba", "grpc", "zstandard", "xxhash", "ray", "triton"} & sys.modules.keys()
print(seen, threading.active_count(), heavy)
"""
    assert run(code) == "[] 1 set()"


def test_frames_packets_and_transports_need_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["numba"] = None
import thinwire as tw
import thinwire.schema, thinwire.telemetry, thinwire.errors, thinwire.packets, thinwire.transports
frame = tw.frames.Frame("3lc", "fp32", (5,), (1.0,), 0, b"y")
assert tw.frames.parse(tw.frames.pack(frame)) == frame
"""
    assert run(code) == ""


def test_hooks_without_fsdp2_do_not_import_it() -> None:
    """It brings sympy and DTensor, and doubles the time that the hooks take to import."""
    code = """
import sys
import thinwire.hooks.ddp, thinwire.hooks.named, thinwire.hooks.distribute, thinwire.hooks.auto_optimizer
print(*sorted({"sympy", "torch.distributed.fsdp", "torch.distributed.tensor"} & sys.modules.keys()))
"""
    assert run(code) == ""


def test_codecs_is_a_package_and_the_list_of_ids_and_importing_every_module_starts_no_thread() -> None:
    """Without circles (`test_no_circle_among_files`) the order does not matter, so one process imports them all."""
    names = [name for name in MODULES if not name.endswith("__main__")]
    code = f"""
import importlib, threading, types
import thinwire as tw
assert isinstance(tw.codecs, types.ModuleType)
assert tw.codecs.codec is tw.codec and tw.codecs.decode is tw.decode
print(*tw.codecs()[:5])
for name in {names}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert (error.name or "").split(".")[0] in ("lightning", "ray", "transformers", "triton"), name
    assert threading.active_count() == 1, name
"""
    assert run(code) == "fp32 fp16 bf16 int8 3lc"


def test_unwritable_caches_do_not_fail_imports(tmp_path: Path) -> None:
    """Files in place of the cache folders also stop root. (`tests/kernels` tests compilation there.)"""
    shutil.copytree(SOURCE, tmp_path / "thinwire", ignore=shutil.ignore_patterns("__pycache__"))
    blocked = [
        tmp_path / "home",
        *(folder / "__pycache__" for folder in (tmp_path / "thinwire" / "kernels").rglob("numba")),
    ]
    for path in blocked:
        path.write_text("a file, not a folder")
    code = "import thinwire as tw; print(tw.__file__, 'int8' in tw.codecs())"
    home = str(tmp_path / "home")
    out = run(code, PYTHONPATH=str(tmp_path), HOME=home, XDG_CACHE_HOME=home, PYTHONDONTWRITEBYTECODE="1")
    assert out == f"{tmp_path}/thinwire/__init__.py True"
    assert all(path.is_file() for path in blocked)


LAZY = ("thinwire", "thinwire.cli.lazy", "thinwire.extras")
"""Files that import by name what a caller asks for."""


@cache
def sources() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def parents(name: str) -> set[str]:
    return {name.rsplit(".", level)[0] for level in range(1, name.count(".") + 1)}


def imports(name: str, tree: ast.Module, known: Set[str]) -> set[str]:
    """The thinwire modules that a file imports: at its top, in a function, for type checkers, or by their names.

    A module of another package is imported after that package's `__init__`, which therefore counts too.
    """
    found: set[str] = set()
    by_name = name not in LAZY
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names):
                inside = {f"{module}.{alias.name}" for alias in names} & known
                found |= inside if len(inside) == len(names) else {*inside, module or ""}
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(other)), *_],
            ) if by_name:
                found.add(other)
    packages = {parent for other in found for parent in parents(other)} - parents(name) - {name}
    return found | packages


def test_no_circle_among_files() -> None:
    """Checks the product and the lab together."""
    theirs = {
        ".".join(("thinwire_lab", *path.relative_to(LAB).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in LAB.rglob("*.py")
    }
    trees = {**sources(), **{name: ast.parse(path.read_text()) for name, path in theirs.items()}}
    graph = {name: imports(name, tree, trees.keys()) & trees.keys() for name, tree in trees.items()}
    assert "thinwire.frames.layout" in graph["thinwire.frames.packing"], "the walk sees imports"
    assert "thinwire.kernels.triton.ternary" in graph["thinwire.codecs.ternary_device"], "by name too"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("files import each other in a circle: " + " → ".join(reversed(error.args[1])))


def test_wire_and_checkpoints_hold_no_pickles() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for name, tree in sources().items():
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    found = {alias.name for alias in names}
                case ast.ImportFrom(module=module):
                    found = {module or ""}
                case _:
                    continue
            assert not forbidden & {each.partition(".")[0] for each in found}, name


def test_only_the_command_line_prints_or_reads_the_environment() -> None:
    for name, tree in sources().items():
        if name.startswith("thinwire.cli") or name.endswith("__main__"):
            continue
        # A file that is also a program of its own may read its arguments, at its very end.
        program = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
        for node in itertools.chain.from_iterable(ast.walk(each) for each in tree.body if each not in program):
            match node:
                case ast.Call(func=ast.Name(id="print")):
                    pytest.fail(f"{name}:{node.lineno} prints")
                case ast.Attribute(
                    value=ast.Name(id="os" | "sys" as module), attr="getenv" | "environ" | "argv" as read
                ):
                    pytest.fail(f"{name}: {module}.{read}")
