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
from thinwire.version import VERSION

ROOT = Path(__file__).parents[1]
PACKED = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
"""Beside the sources, what packages are made of."""
DATA = {
    "thinwire": {"thinwire/py.typed", "thinwire/reports/codec_sample.json"},
    "thinwire_lab": {"thinwire_lab/py.typed", "thinwire_lab/workloads/digits.npz"},
}
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


def copy_sources(folder: Path) -> dict[str, Path]:
    """Copies what both packages are made of; returns the folder of each."""
    for name in PACKED:
        for package in (".", "lab"):
            (folder / package).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / package / name, folder / package / name, follow_symlinks=False)
    for sources in ("src", "lab/src"):
        shutil.copytree(ROOT / sources, folder / sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return {"thinwire": folder, "thinwire_lab": folder / "lab"}


def test_version_is_the_same_in_all_files() -> None:
    lab = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]
    assert lab["version"] == VERSION
    assert f"thinwire[all]=={VERSION}" in lab["dependencies"]
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION} (" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\n{VERSION}, " in (ROOT / "README.md").read_text().partition("## Status")[2]


def test_source_archives_have_data_and_license_but_no_tests(tmp_path: Path) -> None:
    for package, source in copy_sources(tmp_path / "source").items():
        (source / "tests").mkdir()
        shutil.copy(ROOT / "tests/test_install.py", source / "tests")
        built = tmp_path / package
        command = [sys.executable, "-c", SDIST, str(built)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        [archive] = built.glob("*.tar.gz")
        assert archive.name == f"{package}-{VERSION}.tar.gz"
        with tarfile.open(archive) as packed:
            members = {member.name.partition("/")[2]: member for member in packed.getmembers()}
        assert members.keys() >= {f"src/{name}" for name in DATA[package]}
        assert members["LICENSE"].isfile(), "not a link, which would lead nowhere"
        assert not any(name.startswith("tests") for name in members)


@pytest.mark.long
def test_wheels_and_source_archives_install_into_a_fresh_environment(tmp_path: Path) -> None:
    """Nothing is downloaded: the fresh environment has links to the base requirements of this one, and to no other."""

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

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True, symlinks=True)
    python, command = fresh / "bin" / "python", fresh / "bin" / "thinwire"
    [folder] = fresh.glob("lib/python*/site-packages")
    for package, source in copy_sources(tmp_path / "source").items():
        built = tmp_path / package
        direct = wheel(source, built)
        run(sys.executable, "-c", SDIST, built, cwd=source)
        [archive] = built.glob("*.tar.gz")
        assert names(direct) == names(wheel(archive, built / "again"))
        modules = {str(path.relative_to(source / "src")) for path in (source / "src").rglob("*.py")}
        assert {name for name in names(direct) if ".dist-info/" not in name} == modules | DATA[package]
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names(direct))
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
    assert run(command, "--version") == f"thinwire {VERSION}\n"
    assert "pip install 'thinwire[server]'" in run(command, "train", "--steps", "2", status=2)
    link(closure(PROJECT["optional-dependencies"]["server"]), folder)
    assert "wrote" in run(command, "train", "--steps", "5", "--workers", "2", "--json", tmp_path / "out.json")
