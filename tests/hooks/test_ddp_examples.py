"""The examples. The first runs as its docstring says, by torchrun; the others as torchrun would start them, faster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.hooks.ddp_ranks import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    """Returns what the script printed. Fails with what it complained of."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def accuracy(text: str) -> float:
    found = re.search(r"accuracy ([0-9.]+)%", text)
    assert found, text
    return float(found[1])


def test_the_script_with_the_one_line() -> None:
    text = torchrun(2, EXAMPLES / "ddp_fashion_mnist.py", "--data", "digits", "--steps", "200")
    assert "200 compressed steps" in text and "× less" in text
    assert accuracy(text) > 92


def test_the_script_without_it_is_plain_pytorch(tmp_path: Path) -> None:
    lines = (EXAMPLES / "ddp_fashion_mnist.py").read_text().splitlines()
    plain = [line for line in lines if "ddp.compress(" not in line and "(state)" not in line]
    assert len(plain) == len(lines) - 2
    script = tmp_path / "plain.py"
    script.write_text("\n".join(plain))
    text = run_script(2, script, "--data", "digits", "--steps", "200")
    assert "thinwire" not in text
    assert accuracy(text) > 92


def test_gradient_accumulation() -> None:
    text = run_script(2, EXAMPLES / "ddp_accumulate.py", "--steps", "60", "--accumulate", "3")
    assert "60 exchanges for 180 backward passes" in text
    assert accuracy(text) > 80


def test_resume_on_as_many_ranks_and_on_more(tmp_path: Path) -> None:
    script = EXAMPLES / "ddp_resume.py"
    through = run_script(2, script, "--folder", str(tmp_path / "through"), "--steps", "60")
    run_script(2, script, "--folder", str(tmp_path / "parts"), "--steps", "30")
    resumed = run_script(2, script, "--folder", str(tmp_path / "parts"), "--steps", "60")
    assert "resumed at step 30" in resumed and "bit for bit" in resumed
    assert through.splitlines()[-1] == resumed.splitlines()[-1]
    larger = run_script(3, script, "--folder", str(tmp_path / "parts"), "--steps", "90")
    assert "from 2 ranks on 3" in larger and "step 90 on 3 ranks" in larger
    assert accuracy(larger) > 60
