"""The base install: the hooks work without the extras, and errors name each extra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from thinwire.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PACKED = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
"""Beside the sources, what packages are made of."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WITHOUT = """
import contextlib, io, runpy, sys

class Refused:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refused())
import torch
import thinwire as tw
from thinwire.hooks import ddp, fsdp
from thinwire.runtime.metrics import Prometheus
from thinwire.security import Credentials
from thinwire.transports.grpc.server import serve

assert torch.equal(tw.decode(tw.codec("fp32").encode(torch.arange(5.0))), torch.arange(5.0))

def told(call):
    try:
        call()
    except tw.ConfigError as error:
        return str(error)
    raise AssertionError("nothing was refused")

def command(*words):
    sys.argv = ["thinwire", *words]
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            runpy.run_module("thinwire", run_name="__main__")
        except SystemExit as end:
            assert end.code == 2, (words, end.code)
    return " ".join(said.getvalue().split())

model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
print(told(lambda: tw.distribute(model, sgd, server="grpc://127.0.0.1:9")))
print(told(lambda: serve(None, "127.0.0.1:0")))
print(told(lambda: Prometheus(0)))
print(command("--help"))
Refused.names -= {{"typer", "rich"}}
print(command("train", "--steps", "2"))
print(command("demo", "--link", "none"))
print(command("demo", "--link", "none", "--png", "demo.png"))
print(command("compare"))
print(command("reproduce", "3lc-table-1"))

from thinwire.presentation.charts import Chart, Panel, Series, to_matplotlib

panel = Panel(title="", x_label="", y_label="", series=[Series(label="a", x=[1.0], y=[1.0])])
print(told(lambda: to_matplotlib(Chart(name="one", caption="", panels=[panel]))))
"""


def test_without_extras_hooks_work_and_other_features_name_the_install() -> None:
    code = WITHOUT.format(names=set(EXTRAS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    expected = [
        *["a parameter server needs grpc, which is not installed: pip install 'thinwire[server]'"] * 2,
        "serving metrics needs prometheus_client, which is not installed: pip install 'thinwire[metrics]'",
        "error: the command thinwire needs typer and rich, which are not installed: pip install 'thinwire[cli]'",
        *["error: a parameter server needs grpc, which is not installed: pip install 'thinwire[server]'"] * 2,
        "error: the picture of --png needs matplotlib, which is not installed: pip install 'thinwire[plot]'",
        *["error: report.html needs matplotlib, which is not installed: pip install 'thinwire[plot]'"] * 2,
        "a picture needs matplotlib, which is not installed: pip install 'thinwire[plot]'",
    ]
    assert done.stdout.splitlines() == expected


def test_every_optional_library_is_in_the_extra_that_is_named_for_it() -> None:
    extras = {name: list(map(Requirement, needs)) for name, needs in PROJECT["optional-dependencies"].items()}
    known = packages_distributions()
    for module, extra in EXTRAS.items():
        needed = {canonicalize_name(each.name) for each in extras[extra]}
        assert needed.intersection(map(canonicalize_name, known.get(module, [module]))), module
    [everything] = extras["all"]
    assert everything.extras == {*EXTRAS.values()} - {"ray"}, "half a gigabyte, which few need"
    assert {Requirement(each).name for each in PROJECT["dependencies"]} == {
        *("torch", "numpy", "numba", "xxhash", "zstandard", "msgspec", "safetensors", "cryptography")
    }
    [typer] = [each for each in extras["cli"] if each.name == "typer"]
    assert not typer.specifier.contains("0.15.1"), "with click 8.5.1, `--help` is a traceback"
    assert typer.specifier.contains("0.15.4"), "works"


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """Returns the distributions that these need here, with all that those need."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        need = waiting.pop()
        applies = need.marker is None or any(need.marker.evaluate({"extra": each}) for each in ("", *need.extras))
        if applies and need.name.lower() not in found:
            here = found[need.name.lower()] = distribution(need.name)
            waiting += [Requirement(each) for each in here.requires or ()]
    return found


def link(distributions: dict[str, Distribution], folder: Path) -> None:
    """Makes installed distributions importable from another environment's folder, each file and folder by a link."""
    for each in distributions.values():
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            target, source = folder / top, Path(str(each.locate_file(top)))
            if source.exists() and not target.exists():
                target.symlink_to(source)


def names(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as wheel:
        return set(wheel.namelist())


SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_source_archive_has_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in (*PACKED, "src/thinwire/__init__.py", "src/thinwire/py.typed", "tests/test_install.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-c", SDIST, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    assert "src/thinwire/py.typed" in found
    assert not any(name.startswith("tests") for name in found)


@pytest.mark.long
def test_wheel_and_source_archive_install_into_a_fresh_environment(tmp_path: Path) -> None:
    """Nothing is downloaded: the fresh environment has links to the base requirements of this one, and to no other."""
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    for name in PACKED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))

    def run(*command: object, status: int = 0, cwd: Path = tmp_path) -> str:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        done = subprocess.run(
            [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def wheel(of: Path, to: Path) -> Path:
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", to, of)
        [made] = to.glob("*.whl")
        return made

    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(built)!r})", cwd=source)
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        assert any(name.endswith("workloads/digits.npz") for name in packed.getnames())
    direct, again = wheel(source, built), wheel(archive, tmp_path / "again")
    assert names(direct) == names(again)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert names(direct) >= sources | {"thinwire/py.typed", "thinwire/bench/codec_sample.json"}

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True, symlinks=True)
    python, command = fresh / "bin" / "python", fresh / "bin" / "thinwire"
    [folder] = fresh.glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", direct)
    base = closure(PROJECT["dependencies"])
    assert not base.keys() & {"grpcio", "typer", "rich", "matplotlib", "prometheus-client"}
    link(base, folder)
    code = """
import importlib.util as find, thinwire.hooks.ddp, thinwire.hooks.fsdp, thinwire.hooks.distribute, thinwire as tw
from thinwire.reports.codec_sample import recorded
from thinwire_lab.workloads.data import data
assert not any(map(find.find_spec, ("grpc", "typer", "matplotlib", "prometheus_client")))
print(tw.__file__, data("digits"), len(recorded()))
"""
    out = run(python, "-c", code)
    assert out == f"{folder}/thinwire/__init__.py <Dataset digits: 1,347 train, 450 test, (1, 8, 8)> 19\n"
    assert run(command, "--help", status=2) == (
        "error: the command thinwire needs typer and rich, which are not installed: pip install 'thinwire[cli]'\n"
    )
    link(closure(PROJECT["optional-dependencies"]["cli"]), folder)
    assert run(command, "--version") == f"thinwire {PROJECT['version']}\n"
    assert "pip install 'thinwire[server]'" in run(command, "train", "--steps", "2", status=2)
    link(closure(PROJECT["optional-dependencies"]["server"]), folder)
    assert "wrote" in run(command, "train", "--steps", "5", "--workers", "2", "--json", tmp_path / "out.json")
