"""A quick part of the tests on several versions of torch, each in an environment of its own, and a table of them.

    python -m tests.versions                     # the versions below
    python -m tests.versions 2.11.0 2.13.0 --index-url https://download.pytorch.org/whl/cpu

Strategy: pip says first, without installing, what a version would bring. One that comes with CUDA's libraries, some
gigabytes, is left out and named as such unless `--cuda` asks for it. Environments stay in `--folder` for the next time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS = {
    "DDP and updates": (
        "hooks/ddp/test_training.py",
        "hooks/server/test_training.py",
        "hooks/local/test_training.py",
        "hooks/distribute/test_compile.py",
    ),
    "FSDP2": ("hooks/fsdp/test_training.py", "hooks/fsdp/test_misuse.py"),
    "codecs": ("codecs/test_vectors.py", "codecs/test_golden.py"),
}
"""Files below `tests`, by what passes or fails."""
NEEDS = {"FSDP2": "thinwire.hooks.fsdp"}
"""What a group imports that refuses a version of torch by itself, in one sentence."""
FAILS = "fails: "


def verdict(report: str) -> str:
    """Returns what pytest's last line comes to.

    Example:
        >>> verdict("80 passed, 2 skipped in 60.1s (0:01:00)")
        'passes'
        >>> verdict("1 failed, 80 passed in 60.1s")
        'fails: 1 failed, 80 passed in 60.1s'
    """
    passes = " passed" in report and " failed" not in report and " error" not in report
    return "passes" if passes else FAILS + report


def cuda_packages(report: str) -> list[str]:
    """Returns the libraries of CUDA in what `pip install --dry-run --report` wrote.

    Example:
        >>> cuda_packages('{"install": [{"metadata": {"name": "nvidia-nccl-cu12"}}, {"metadata": {"name": "sympy"}}]}')
        ['nvidia-nccl-cu12']
    """
    names = sorted(each["metadata"]["name"] for each in json.loads(report)["install"])
    return [name for name in names if name.startswith(("nvidia-", "cuda-"))]


def try_version(version: str, folder: Path, pip_options: Sequence[str], *, cuda: bool) -> list[str]:
    """Makes an environment with one version of torch, and runs the tests there; returns a cell for each group of them,
    or one that says why the version was left out."""
    place = folder / f"torch-{version}"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(python), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    # Like the Makefile's environments, but for torch and what belongs to its version: 2.6 asks for sympy 1.13.1.
    own = ("sympy", "torch", "triton")
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(own)]
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join([*pins, f"torch=={version}"]))
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_options, "-c", str(constraints))
    if not cuda:
        asked = run(*pip, "--dry-run", "--report", "-", f"torch=={version}")
        if asked.returncode:
            return [f"left out: {_last(asked.stderr)}"]
        if brought := cuda_packages(asked.stdout):
            return [f"left out: a CUDA build with {len(brought)} packages of libraries; --cuda takes it"]
    installed = run(*pip, "-e", ".[all]", "hypothesis", "psutil", "pytest", "pytest-timeout", "safetensors")
    if installed.returncode:
        return [f"left out: {_last(installed.stderr)}"]
    # pyproject.toml says -q: a second one leaves out the line that the verdict is read from.
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "long or not long")
    cells = []
    for group, names in TESTS.items():
        needed = NEEDS.get(group)
        refused = needed is not None and "ConfigError" in run("-c", f"import {needed}").stderr
        tested = "" if refused else run(*pytest, *(f"tests/{name}" for name in names)).stdout
        cells.append("refused: says which torch it takes" if refused else verdict(_last(tested)))
        failed = [line for line in tested.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        sys.stderr.write("".join(f"{line}\n" for line in failed))
    return cells


def _last(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "nothing was said")


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 where a version fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "versions")
    parser.add_argument("--index-url", help="as for pip; torch's own index has CPU builds")
    parser.add_argument("--cuda", action="store_true", help="install CUDA's libraries, some gigabytes a version")
    given = parser.parse_args(arguments)
    extra = ["--extra-index-url", given.index_url] if given.index_url else []
    failed = False
    for cells in (["torch", *TESTS], ["---"] * (1 + len(TESTS))):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    for version in given.versions:
        cells = try_version(version, given.folder, extra, cuda=given.cuda)
        failed = failed or any(cell.startswith(FAILS) for cell in cells)
        sys.stdout.write(f"| {' | '.join([version, *cells])} |\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
