"""The Python in the README and the pages is run, in one process: one rank, one server on loopback.

A line that is `…` alone stands for the reader's own code. Addresses, and numbers of workers, are replaced by those of
the test. Blocks that need more than a processor have a title that says so; `ELSEWHERE` names who runs the others.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from tests.hooks.cluster import start_server
from thinwire.hooks import ddp, fsdp
from thinwire.runtime.serving import serving
from thinwire.security.certificates import Authority
from thinwire.security.starter import in_starter, make_starter
from thinwire.server.core import ServerCore
from thinwire.transports.grpc.server import serve

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(py\w+)(?: [^\n]*)?\n(.*?)^```", re.M | re.S)
PAGES = {
    path.relative_to(ROOT).as_posix(): [(kind, text) for kind, text in BLOCK.findall(path.read_text())]
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
ELSEWHERE = {
    "docs/clusters.md": "tests/jobs/test_on_ray.py",
    "docs/extending.md": "tests/test_examples.py",
    "docs/frameworks.md": "tests/hooks/frameworks/test_frameworks.py",
}
HERE = {  # how many blocks of each page are run below
    "README.md": 2,
    "docs/api.md": 1,
    "docs/autopilot.md": 2,
    "docs/ddp.md": 5,
    "docs/fsdp.md": 2,
    "docs/gpu.md": 3,
    "docs/quick-start.md": 1,
    "docs/local-updates.md": 4,
    "docs/observability.md": 2,
    "docs/parameter-server.md": 1,
    "docs/recovery.md": 3,
    "docs/security.md": 2,
}
TAKEN_FOR = {  # what a page says, and what stands for it here
    "grpc://10.0.0.1:7070": "{server}",
    '"0.0.0.0:7070"': '"127.0.0.1:0"',
    "workers=4": "workers=1",
    '"cuda"': '"cpu"',
    "(4, replicas=2)": "(1, replicas=1)",
    "in range(4)": "in range(1)",
    "opt.steps_done < 1000": "opt.steps_done < 60",
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def run(page: str, number: int, names: dict[str, Any], server: str = "", part: int | None = None) -> dict[str, Any]:
    """Runs one block of a page, or one part of it, with these names; returns those that are there afterwards."""
    block = [text for kind, text in PAGES[page] if kind == "python"][number]
    block = block if part is None else block.split("\n\n")[part]
    block = re.sub(r"^( *)….*$", r"\1own()", block, flags=re.M)
    for told, here in TAKEN_FOR.items():
        block = block.replace(told, here.format(server=server))
    after = {"own": lambda: None, **names}
    exec(compile(block, f"{page}, block {number}", "exec"), after)
    return after


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every page takes for granted: imports, a model, data, a loss; in an empty folder."""
    monkeypatch.chdir(tmp_path)
    model = net()
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.argmax(1) % 4)
    return {
        "torch": torch,
        "tw": tw,
        "dist": dist,
        "ddp": ddp,
        "fsdp": fsdp,
        "DistributedDataParallel": DistributedDataParallel,
        "DataLoader": DataLoader,
        "data": data,
        "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.CrossEntropyLoss(),
        "batches": [data[:8], data[8:16]],
        "rank": 0,
        "workers": 1,
        "tensor": torch.randn(100),
    }


@pytest.mark.usefixtures("group")
def test_the_ddp_hook(names: dict[str, Any], tmp_path: Path) -> None:
    for page in ("README.md", "docs/quick-start.md", "docs/api.md", "docs/autopilot.md", "docs/ddp.md"):
        after = run(page, 0, {**names, "model": net()})
        if page != "docs/api.md":
            after["loss"](after["model"](torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
            assert after["state"].step == 1, page
    gan = {"generator": net(), "noise": torch.randn(4, 8), "discriminator": after["model"]}
    gan["generator"].append(nn.Linear(4, 8))
    run("docs/ddp.md", 1, {**gan, "generator_loss": torch.mean})
    assert after["state"].step == 1, "the pass was kept out"
    run("docs/ddp.md", 3, after)  # saves and loads
    recorded = run("docs/observability.md", 1, {**names, "model": DistributedDataParallel(net())})
    recorded["model"](torch.randn(4, 8)).sum().backward()
    recorded["state"].close()
    assert '"table":"0.weight"' in (tmp_path / "steps.jsonl").read_text()
    tensors = {"w": torch.randn(64, 8), "b": torch.randn(64)}
    given = {f"gradient_of_{name}": torch.randn(tensor.shape) for name, tensor in tensors.items()}
    run("docs/ddp.md", 4, {**names, **tensors, **given})
    after["model"] = DistributedDataParallel(net())
    run("docs/ddp.md", 2, {**after, "scaler": torch.amp.GradScaler("cpu")})
    (tmp_path / "train.token").write_text("abcdefghijklmnopqrstuvwxyz\n")
    run("docs/security.md", 1, {**after, "model": DistributedDataParallel(net())})


@pytest.mark.usefixtures("group")
def test_fsdp(names: dict[str, Any], tmp_path: Path) -> None:
    def model() -> nn.Module:
        layers = net()
        layers.blocks = [layers[0]]  # type: ignore[assignment]  # not a module: it is one already
        return layers

    after = run("docs/fsdp.md", 0, {**names, "sites": 1, "ranks_of_a_site": 1, "model": model()})
    state = after["state"]
    after["loss"](after["model"](torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    torch.save(state.state_dict(), "rank0.pt")
    save({"fsdp": state.state_dict()}, checkpoint_id=tmp_path / "saved")
    run("docs/fsdp.md", 1, {**after, "folder": tmp_path / "saved"})
    sharded = fully_shard(net())
    assert run("README.md", 1, {**names, "model": sharded}, part=0)["state"].world_size == 1


@pytest.mark.usefixtures("group")
def test_local_updates(names: dict[str, Any], tmp_path: Path) -> None:
    run("docs/local-updates.md", 0, names)
    several = run("docs/local-updates.md", 1, {**names, "model": net(), "dist": dist})["optimizer"]
    several.close()
    assert len(several.param_groups) == 2
    model = net()
    given = {**names, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with run("README.md", 1, given, part=1)["optimizer"] as optimizer:
        run("docs/local-updates.md", 2, {**names, "optimizer": optimizer})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        saving = {**names, "model": model, "optimizer": optimizer, "step": 2, "rank": 0, "dist": dist}
        saving["scheduler"] = scheduler
        # What the page leaves out is the end of that process, and the next one's beginning.
        run("docs/local-updates.md", 3, {**saving, "own": optimizer.close})["optimizer"].close()
    with run("docs/autopilot.md", 1, {**names, "model": net()})["optimizer"] as optimizer:
        assert "auto" in str(optimizer.state_dict()["position"])
    assert (tmp_path / "shared.pt").exists()


def test_a_server(names: dict[str, Any], tmp_path: Path) -> None:
    for page, number, part in (
        ("docs/parameter-server.md", 0, None),
        ("docs/observability.md", 0, None),
        ("README.md", 1, 2),
    ):
        server, address = start_server(ServerCore(), "grpc")
        model = net()
        given = {**names, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        with server:
            after = run(page, number, {**given, "server": address()}, str(address()), part)
            after.get("opt", after["optimizer"]).close()
    assert (tmp_path / "steps.jsonl").exists()
    assert tw.decode(run("README.md", 1, names, part=3)["frame"]).shape == (100,)


class Enough(Exception):
    """Ends a loop that a page shows without an end."""


def test_recovery(names: dict[str, Any]) -> None:
    def learn(steps: int = 100) -> None:
        if after["steps"] == steps:
            raise Enough
        after["steps"] += 1
        names["loss"](names["model"](torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()

    after = {**names, "steps": 0}
    server, address = start_server(ServerCore(), "grpc")
    with server, tw.distribute(names["model"], names["optimizer"], server=address()) as opt, pytest.raises(Enough):
        run("docs/recovery.md", 0, {**names, "opt": opt, "own": lambda: learn(3)})
    server, address = start_server(ServerCore(), "grpc")
    with server:
        ended = run("docs/recovery.md", 1, {**names, "server": address(), "own": learn})
    server, address = start_server(ServerCore(), "grpc")
    again, fresh = start_server(ServerCore(), "grpc")
    with server, again, tw.distribute(names["model"], names["optimizer"], server=address()) as opt:
        given = {**names, "weights": names["model"].state_dict(), "opt": opt, "server": fresh(), "own": opt.close}
        run("docs/recovery.md", 2, given)["opt"].close()
    assert ended["kept"].steps() == (50, 0)


def test_tensors_on_a_gpu_and_on_none(names: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.zeros(100))
    parameter.grad = torch.randn(100)
    after = run("docs/gpu.md", 0, {**names, "parameter": parameter, "parameter_on_the_gpu": torch.zeros(100)})
    after = run("docs/gpu.md", 1, {**after, "contexts": [after["context"]], "gradients": [torch.randn(100)]})
    run("docs/gpu.md", 2, {**after, "parameters": [torch.zeros(100)]})


def test_certificates(names: dict[str, Any], tmp_path: Path) -> None:
    make_starter(tmp_path / "certs", Authority("test"), workers=1, hosts=["localhost", "127.0.0.1"])
    server = in_starter(tmp_path / "certs")
    with serve(serving(ServerCore()), "127.0.0.1:0", options=server.server()) as running:
        given = {**names, "server_credentials": server}
        after = run("docs/security.md", 0, given, f"grpc://{running.address}")
        after["opt"].close()


def test_every_block_is_run_by_a_test() -> None:
    told = {page: sum(kind == "python" for kind, _ in blocks) for page, blocks in PAGES.items()}
    told = {page: number for page, number in told.items() if number and page not in ELSEWHERE}
    assert told == HERE, "a page has other blocks than before: run them above"
    for page, test in ELSEWHERE.items():
        assert PAGES[page] and (ROOT / test).is_file(), page


def test_every_session_prints_what_its_page_says() -> None:
    ran = 0
    for page, blocks in PAGES.items():
        for _, block in (each for each in blocks if each[0] == "pycon"):
            example = doctest.DocTestParser().get_doctest(block, {}, page, None, None)
            assert doctest.DocTestRunner(verbose=False).run(example).failed == 0, page
            ran += 1
    assert ran >= 20


# ---- commands

FIRST_STEPS = ("docs/quick-start.md", "docs/parameter-server.md", "docs/fine-tuning.md", "docs/observability.md")


ELSEWHERE_RUN = {
    "README.md": "installs, and what docs/quick-start.md has",
    "docs/commands.md": "a list, whose commands and options tests/test_docs.py looks up",
    "docs/designs.md": "tests/policies/test_docs.py makes comparisons of them",
    "docs/extending.md": "tests/test_examples.py makes the same design",
    "docs/install.md": "installs",
}


def test_every_command_is_run_or_its_title_says_what_it_takes() -> None:
    for page in PAGES:
        for kind, block in re.findall(r"^```([^\n]*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
            if re.match(r"thinwire|torchrun|pip|make|python|docker|sbatch", block) and not kind:
                assert page in FIRST_STEPS or page in ELSEWHERE_RUN, f"{page}: run it, or give it a title:\n{block}"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_first_commands_of_a_reader_run(tmp_path: Path) -> None:
    """Those of the pages on first steps; all others are looked up in the command line by `test_docs.py`."""
    for name in ("thinwire", "torchrun"):
        module = "thinwire" if name == "thinwire" else "torch.distributed.run"
        (tmp_path / name).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ran = 0
    for page in FIRST_STEPS:
        for kind, block in re.findall(r"^```([^\n]*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
            if kind:
                continue
            command = ["bash", "-ec", block]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580)
            assert done.returncode == 0, f"{page}: {block}{done.stderr[-3000:]}"
            ran += 1
    assert ran == 5
