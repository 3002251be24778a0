"""The scripts of `examples/doors`, each a way into thinwire: replicas are equal, and residuals survive a checkpoint.

Two epochs in one run, and one epoch, an end and one more epoch must give the same weights, bit for bit, on every rank.
That needs every rank's residual.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "doors"
MARK = "# thinwire"
"""Ends each line that a script has for thinwire."""
SAID = re.compile(r"rank (\d+): (\d+) epochs, loss ([\d.]+), weights ([0-9a-f]{12})")
COMPILED = ("--backend", "aot_eager")  # needs no C++ compiler
SITES = ("--sites", "2")


@dataclass(frozen=True)
class Door:
    """A script and how its users start it.

    Args:
        script: in the folder of examples.
        ranks: how many processes train.
        arguments: of the script.
        torchrun: whether torchrun starts the ranks; a framework does otherwise.
        elastic: whether a rank dies after the first epoch and torchrun starts all again, in place of two runs.
    """

    script: str
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    torchrun: bool = True
    elastic: bool = False


DOORS = {
    "DDP": Door("with_ddp.py"),
    "torchrun elastic": Door("with_ddp.py", elastic=True),
    "FSDP2": Door("with_fsdp2.py", ranks=4),
    "HSDP": Door("with_fsdp2.py", ranks=4, arguments=SITES),
    "torch.compile of DDP": Door("with_compile.py", arguments=COMPILED),
    "DDP of torch.compile": Door("with_compile.py", arguments=(*COMPILED, "--inside")),
    "Accelerate": Door("with_accelerate.py"),
    "HF Trainer": Door("with_trainer.py"),
    "PEFT": Door("with_peft.py"),
    "Lightning": Door("with_lightning.py"),
    "Lightning with FSDP2": Door("with_lightning_fsdp2.py", ranks=4),
    "Lightning with HSDP": Door("with_lightning_fsdp2.py", ranks=4, arguments=SITES),
    "Ray Train": Door("with_ray.py", torchrun=False),
    "Ray engine": Door("with_ray_engine.py", torchrun=False),
}


def train(door: Door, scripts: Path, folder: Path, epochs: int, *, dies: bool = False) -> tuple[float, list[str]]:
    """Runs a script up to an epoch; returns the loss and the hash of each rank's weights."""
    command, environment = [sys.executable], dict(os.environ)
    if door.torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(door.ranks)]
    if dies:
        command += ["--max-restarts", "1"]
        # Else ranks that torchrun starts again may read addresses of dead ranks in the store that they share.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command += [str(scripts / door.script), "--folder", str(folder), "--epochs", str(epochs), *door.arguments]
    command += ["--die-after", "1"] if dies else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    said = {int(rank): (loss, found) for rank, count, loss, found in SAID.findall(text) if int(count) == epochs}
    assert set(said) == set(range(door.ranks)), text[-6000:]
    return float(said[0][0]), [said[rank][1] for rank in range(door.ranks)]


def unmarked(script: str, into: Path) -> int:
    """Writes a script without its lines for thinwire, next to its imports; returns how many lines it left out."""
    into.mkdir(parents=True)
    (into / "task.py").write_text((EXAMPLES / "task.py").read_text())
    lines = (EXAMPLES / script).read_text().splitlines()
    left = [line for line in lines if not line.endswith(MARK)]
    (into / script).write_text("\n".join(left) + "\n")
    return len(lines) - len(left)


def test_scripts_mark_at_most_three_lines_for_thinwire(tmp_path: Path) -> None:
    scripts = {door.script for door in DOORS.values()}
    assert scripts == {path.name for path in EXAMPLES.glob("with_*.py")}
    for script in scripts:
        assert 2 <= unmarked(script, tmp_path / script) <= 3, script
        text = (tmp_path / script / script).read_text()
        assert "thinwire" not in text and compile(text, script, "exec"), script


@pytest.mark.frameworks
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", DOORS)
def test_scripts_keep_replicas_equal_and_resume_bit_identical(name: str, tmp_path: Path) -> None:
    door = DOORS[name]
    unmarked(door.script, tmp_path / "plain")
    plain, _ = train(door, tmp_path / "plain", tmp_path / "a", 2)
    loss, through = train(door, EXAMPLES, tmp_path / "b", 2)
    if not door.elastic:
        _, half = train(door, EXAMPLES, tmp_path / "c", 1)
        assert len(set(half)) == 1
    _, again = train(door, EXAMPLES, tmp_path / "c", 2, dies=door.elastic)
    assert len(set(through)) == 1 and again == through
    assert loss < 1.36 and plain < 1.36, "1.39 is a guess among four classes"
