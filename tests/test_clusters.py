"""The Slurm scripts, with stand-ins for Slurm's commands that start every task as a process of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "clusters"

SRUN = """#!/bin/bash
# Starts --ntasks tasks (one a node, where none is given), each a process, and waits for all of them.
tasks=$SLURM_JOB_NUM_NODES
while [[ $1 == --* ]]; do
    [[ $1 != --ntasks=* ]] || tasks=${1#--ntasks=}
    shift
done
for ((id = 0; id < tasks; id++)); do SLURM_PROCID=$id "$@" & tasks_started+=($!); done
failed=0
for task in "${tasks_started[@]}"; do wait "$task" || failed=1; done
exit $failed
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && echo localhost
"""


def sbatch(script: str, *arguments: str, nodes: int, folder: Path) -> str:
    """Returns what a job's script printed on as many nodes, all of which are this machine."""
    commands = folder / "bin"
    if not commands.exists():
        commands.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        for name in ("thinwire", "torchrun"):
            module = "thinwire" if name == "thinwire" else "torch.distributed.run"
            (commands / name).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
            (commands / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    slurm = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "test",
        "RANKS_PER_NODE": "1",
        "PORT": str(port),
        "EVERY": "10",
    }
    environment = {**os.environ, **slurm, "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("script", ["slurm_ddp.sh", "slurm_server.sh"])
def test_every_task_gets_the_processors_of_the_job(script: str, tmp_path: Path) -> None:
    """Since Slurm 22.05 `srun` does not look at SLURM_CPUS_PER_TASK, which is what `sbatch` sets."""
    for name, text in {"srun": 'echo "srun: $SRUN_CPUS_PER_TASK"', "scontrol": "echo node0", "thinwire": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-2]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "a"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for given, expected in (({"SLURM_CPUS_PER_TASK": "4"}, "4"), ({}, "1")):
        command = ["bash", str(SCRIPTS / script)]
        done = subprocess.run(
            command, cwd=tmp_path, env={**environment, **given}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert {*done.stdout.splitlines()} == {f"srun: {expected}"}


@pytest.mark.long
def test_a_ddp_script_on_two_nodes(tmp_path: Path) -> None:
    text = sbatch("slurm_ddp.sh", str(ROOT / "examples" / "ddp.py"), "--steps", "60", nodes=2, folder=tmp_path)
    assert text.count("60 compressed steps") == 1


@pytest.mark.long
def test_a_server_and_two_workers_which_go_on_when_submitted_again(tmp_path: Path) -> None:
    options = ["--model", "mlp", "--data", "digits", "--design", "3lc[s=1.0]"]
    text = sbatch("slurm_server.sh", *options, "--steps", "20", nodes=3, folder=tmp_path)
    assert text.count("20 steps in") == 2
    assert "listening on grpc://" in text
    folder = tmp_path / "thinwire-test"
    assert (folder / "certs-localhost").is_dir()
    (folder / "worker-0.ckpt.previous").rename(folder / "worker-0.ckpt")  # it died after step 10
    for name in ("server.ckpt", "worker-1.ckpt"):  # these between the two renames of their next one
        (folder / name).unlink()
        assert (folder / f"{name}.previous").exists()
    text = sbatch("slurm_server.sh", *options, "--steps", "20", nodes=3, folder=tmp_path)
    assert text.count("20 steps in") == 2
