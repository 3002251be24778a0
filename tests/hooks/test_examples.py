"""The examples with ranks. The first runs as its docstring says, by torchrun; others as torchrun would start them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.hooks.ddp_ranks import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    """Returns the script's output. Fails with its error output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def figure(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def accuracy(text: str) -> float:
    return figure(r"accuracy ([0-9.]+)%", text)


def test_ddp_example_prints_quick_start_output() -> None:
    text = torchrun(2, EXAMPLES / "ddp.py")
    assert "200 compressed steps" in text and "× less" in text
    assert accuracy(text) > 92
    page = (EXAMPLES.parent / "docs" / "quick-start.md").read_text()
    shown = re.findall(r"^    (.*)", page.partition("## A thin link")[0], re.M)
    *printed, verdict = text.splitlines()
    shapes, printed = ([re.sub("[0-9.]+", "…", line) for line in lines] for lines in (shown, printed))
    assert shapes == printed, "the page shows what a reader sees, what the first steps compile too"
    assert verdict.startswith("  verdict ")


def test_accumulation_example_exchanges_once_a_step() -> None:
    text = run_script(2, EXAMPLES / "ddp_accumulate.py", "--steps", "60", "--accumulate", "3")
    assert "60 exchanges for 180 backward passes" in text
    assert accuracy(text) > 80


def test_resume_example_resumes_bit_identical_and_with_more_ranks(tmp_path: Path) -> None:
    script, arguments = EXAMPLES / "ddp_resume.py", ("--folder", str(tmp_path), "--steps")
    run_script(2, script, *arguments, "30")
    resumed = run_script(2, script, *arguments, "60")
    assert "resumed at step 30" in resumed and "bit for bit" in resumed
    larger = run_script(3, script, *arguments, "90")
    assert "from 2 ranks on 3" in larger and "step 90 on 3 ranks" in larger
    assert accuracy(larger) > 60


def test_elastic_example_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    script, arguments = EXAMPLES / "elastic_ddp.py", ("--folder", str(tmp_path), "--every", "10", "--steps")
    assert "2 ranks: begins" in run_script(2, script, *arguments, "15")
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-15"], "the one before is removed"
    text = run_script(3, script, *arguments, "30")
    assert "3 ranks: resumed at step 15 from 2 ranks on 3" in text and "step 30: accuracy" in text


def test_fsdp2_example_trains_two_sites_of_two_ranks() -> None:
    text = run_script(4, EXAMPLES / "fsdp2.py", "--steps", "60")
    assert "60 compressed steps" in text and "mesh of (2, 2)" in text and accuracy(text) > 80


def test_transformer_example_trains_with_adamw() -> None:
    text = run_script(2, EXAMPLES / "local_updates.py", "--steps", "20", "--design", "local-sgd[h=4]")
    assert figure(r"held-out loss ([0-9.]+) nats", text) < 4, "4.85 before training"
    assert figure(r"([0-9]+)x less than float32", text) > 15, "the first weights, which travel once, are in it"


def test_adapter_example_sends_only_adapters() -> None:
    arguments = ("--width", "64", "--blocks", "2", "--rank", "4", "--steps", "16")
    text = run_script(2, EXAMPLES / "lora.py", *arguments)
    adapters, whole = figure(r"adapters: ([0-9,]+) of", text), figure(r"of ([0-9,]+) parameters", text)
    assert (adapters, whole - adapters) == (8192, 120_064)
    before, after = figure(r"loss ([0-9.]+) before", text), figure(r"before, ([0-9.]+) after", text)
    assert after < before - 0.05
    sent = 1000 * figure(r"([0-9.]+) kB a step", text)
    assert sent < 8 * adapters / 4, "both ways, in bytes; the frozen parameters went nowhere"


def test_learners_of_different_speeds_end_with_the_same_parameters() -> None:
    command = [sys.executable, str(EXAMPLES / "decoupled.py"), "--tokens", "30000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    found = re.findall(r"learner (\d): (\d+) steps; held out ([0-9.]+) nats", done.stdout)
    assert sorted(rank for rank, _, _ in found) == ["0", "1", "2"], done.stdout
    assert len({loss for _, _, loss in found}) == 1 and float(found[0][2]) < 4.5, "4.85 before training"
    steps = {rank: int(count) for rank, count, _ in found}
    assert steps["2"] < min(steps["0"], steps["1"]), "the slow one held no other up"
