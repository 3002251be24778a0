"""The Slurm scripts, with stand-ins for Slurm's commands that start every task as a process of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRUN = """# Starts --ntasks tasks (one a node, where none is given), each a process, and waits for all of them.
tasks=$SLURM_JOB_NUM_NODES
while [[ $1 == --* ]]; do
    [[ $1 != --ntasks=* ]] || tasks=${1#--ntasks=}
    shift
done
for ((id = 0; id < tasks; id++)); do SLURM_PROCID=$id "$@" & started+=($!); done
failed=0
for task in "${started[@]}"; do wait "$task" || failed=1; done
exit $failed"""
REAL = {
    "python": f'exec {sys.executable} "$@"',
    "thinwire": f'exec {sys.executable} -m thinwire "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": '[ "$1 $2" = "show hostnames" ] && echo localhost',
    "srun": SRUN,
}


def sbatch(script: str, *arguments: str, folder: Path, nodes: int, commands: dict[str, str], **job: str) -> str:
    """Returns what a job's script printed on as many nodes, all of which are this machine."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        job |= {"RANKS_PER_NODE": "1", "PORT": str(free.getsockname()[1]), "EVERY": "10", "OMP_NUM_THREADS": "1"}
    for name, value in (("NODELIST", "localhost"), ("NUM_NODES", str(nodes)), ("ID", "17"), ("NAME", "test")):
        job[f"SLURM_JOB_{name}"] = value
    environment = {**os.environ, **job, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "examples" / "clusters" / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("script", ["slurm_ddp.sh", "slurm_server.sh"])
def test_every_task_gets_the_processors_of_the_job(script: str, tmp_path: Path) -> None:
    """Since Slurm 22.05 `srun` does not look at SLURM_CPUS_PER_TASK, which is what `sbatch` sets."""
    commands = {"srun": 'echo "srun: $SRUN_CPUS_PER_TASK"', "scontrol": "echo node0", "thinwire": ""}
    for job, expected in (({"SLURM_CPUS_PER_TASK": "4"}, "4"), ({}, "1")):
        text = sbatch(script, folder=tmp_path, nodes=3, commands=commands, **job)
        assert {*text.splitlines()} == {f"srun: {expected}"}


@pytest.mark.long
def test_a_ddp_script_on_two_nodes(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "ddp.py")
    text = sbatch("slurm_ddp.sh", script, "--steps", "60", folder=tmp_path, nodes=2, commands=REAL)
    assert text.count("60 compressed steps") == 1


@pytest.mark.long
def test_a_server_and_two_workers_which_resume_when_submitted_again(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "server_mode.py")
    for _ in range(2):
        text = sbatch("slurm_server.sh", script, "--steps", "20", folder=tmp_path, nodes=3, commands=REAL)
        assert text.count("20 steps, test accuracy") == 2
        assert "listening on grpc://" in text
        checkpoint = tmp_path / "thinwire-test" / "server.ckpt"
        checkpoint.unlink()  # the server died between the two renames of its next one
        assert checkpoint.with_name("server.ckpt.previous").exists()
