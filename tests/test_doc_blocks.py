"""The Python of the README and the pages is run, in one process: one rank, one server on loopback.

Blocks of a page run in order and share their names. A line that is `…` alone stands for the reader's own code.
Addresses and numbers of workers are replaced by those of the test. `ELSEWHERE` has the pages that other tests run.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
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
    path.relative_to(ROOT).as_posix(): BLOCK.findall(path.read_text())
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
ELSEWHERE = {"docs/deploy.md", "docs/extending.md", "docs/frameworks.md"}
"""By the tests of Ray, of the examples and of the frameworks."""
RUN = [page for page, blocks in PAGES.items() if page not in ELSEWHERE and any(kind == "python" for kind, _ in blocks)]
REPLACED = {
    "workers=4": "workers=1",
    '"cuda"': '"cpu"',
    "(4, replicas=2)": "(1, replicas=1)",
    "in range(4)": "in range(1)",
    "opt.steps_done < 1000": "opt.steps_done < 60",
}
ADDRESS = "grpc://10.0.0.1:7070"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    layers.blocks = [layers[0]]  # type: ignore[assignment]  # not a module: it is one already
    return layers


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Enough(Exception):
    """Ends a loop that a page shows without an end."""


class Reader:
    """Runs the blocks of a page with the names that every page takes for granted."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack, self.folder, self.steps, self.endless = stack, folder, 0, False
        x = torch.randn(64, 8)
        data = TensorDataset(x, x.argmax(1) % 4)
        self.names: dict[str, Any] = {}
        self.names.update(torch=torch, tw=tw, dist=dist, ddp=ddp, fsdp=fsdp, DataLoader=DataLoader)
        self.names.update(DistributedDataParallel=DistributedDataParallel, fully_shard=fully_shard)
        self.names.update(init_device_mesh=init_device_mesh, sites=1, ranks_of_a_site=1, folder=folder / "saved")
        self.names.update(data=data, batches=[data[:8], data[8:16]], loss=nn.CrossEntropyLoss(), rank=0, workers=1)
        self.names.update(scaler=torch.amp.GradScaler("cpu"), step=2, tensor=torch.randn(100))
        self.names.update(generator=nn.Linear(4, 8), noise=torch.randn(4, 4), generator_loss=torch.mean)
        self.names.update(w=torch.randn(64, 8), b=torch.randn(64), weights=net().state_dict())
        self.names.update(gradient_of_w=torch.randn(64, 8), gradient_of_b=torch.randn(64))
        self.names.update(parameter=nn.Parameter(torch.zeros(100)), parameter_on_the_gpu=torch.zeros(100))
        self.names.update(gradients=[torch.randn(100)], parameters=[torch.zeros(100)])
        self.names["parameter"].grad = torch.randn(100)

    def close(self) -> None:
        """Ends what an earlier block has opened."""
        for name in ("opt", "optimizer", "state"):
            if callable(close := getattr(self.names.get(name), "close", None)):
                close()

    def learn(self) -> None:
        """One step's gradient; the endless loop over the data ends after three."""
        self.steps += 1
        if self.endless and self.steps > 3:
            raise Enough
        outputs = self.names["model"](torch.randn(4, 8))
        self.names["loss"](outputs, torch.zeros(4, dtype=torch.long)).backward()

    def server(self) -> Any:
        """The address of a new server; with certificates in the empty folder's `certs` it asks for them."""
        if (self.folder / "certs").exists():
            options = in_starter(self.folder / "certs").server()
            running = self.stack.enter_context(serve(serving(ServerCore()), "127.0.0.1:0", options=options))
            return f"grpc://{running.address}"
        server, address = start_server(ServerCore(), "grpc")
        self.stack.enter_context(server)
        return address()

    def prepare(self, block: str) -> None:
        """What stood before the block in a reader's script: a model, and what an earlier block has opened."""
        if "state_dict" not in block and "shared_weights" not in block:
            self.close()
        made, names = net(), self.names
        model: nn.Module = made
        if "ddp.compress(model" in block and "DistributedDataParallel(model)" not in block:
            model = DistributedDataParallel(made)
        elif "fsdp.compress(model" in block and "fully_shard(" not in block:
            fully_shard(made)
        resumes = "opt.sync()\nstate" in block
        if (re.search(r"\(\s*model, ?", block) and "resume=saved" not in block) or "ElasticSampler" in block:
            names["model"], names["optimizer"] = model, torch.optim.SGD(model.parameters(), lr=0.1)
        if resumes or "ElasticSampler" in block:
            names["opt"] = tw.distribute(made, names["optimizer"], server=self.server())
        if "shared_weights" in block:
            self.close()
            inner = torch.optim.AdamW(made.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
            opened = tw.distribute(made, inner, group=dist.group.WORLD, design="local-sgd[h=4]")
            scheduler = torch.optim.lr_scheduler.LambdaLR(opened, lambda step: 1 / (1 + step))
            names.update(model=made, optimizer=opened, scheduler=scheduler)
        if "discriminator" in block:
            names["discriminator"] = DistributedDataParallel(made)
            names["samples"] = torch.randn(4, 8)
        if "fsdp.merge" in block:  # what earlier ranks have saved
            self.learn()
            torch.save(names["state"].state_dict(), "rank0.pt")
            save({"fsdp": names["state"].state_dict()}, checkpoint_id=names["folder"])

    def run(self, page: str, block: str) -> None:
        self.prepare(block)
        self.steps, self.endless = 0, "without an end" in block
        loops = re.search(r"^(for|while) ", block, re.M)
        self.names["own"] = self.learn if loops else self.close if "resume=s" in block else lambda: None
        block = re.sub(r"^( *)….*$", r"\1own()", block, flags=re.M)
        for there, here in REPLACED.items():
            block = block.replace(there, here)
        if "server=server" in block:
            self.names["server"] = self.server()
        elif ADDRESS in block:
            block = block.replace(ADDRESS, str(self.server()))
        with suppress(Enough):
            exec(compile(block, page, "exec"), self.names)
        if "state = ddp.compress(" in block:
            self.learn()
            assert self.names["state"].step == 1, page
        if "context" in self.names:
            self.names["contexts"] = [self.names["context"]]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page(page: str, tmp_path: Path) -> None:
    if page == "docs/security.md":
        make_starter(tmp_path / "certs", Authority("test"), workers=1, hosts=["localhost", "127.0.0.1"])
        (tmp_path / "train.token").write_text("abcdefghijklmnopqrstuvwxyz\n")
    with ExitStack() as stack:
        reader = Reader(stack, tmp_path)
        stack.callback(reader.close)
        for kind, block in PAGES[page]:
            # The README's blocks are lists of calls.
            for part in re.split(r"\n\n(?=#|frame)", block) if page == "README.md" else [block]:
                if kind == "python":
                    reader.run(page, part)
    if page == "docs/recovery.md":
        assert reader.names["kept"].steps() == (50, 0)
    if page == "docs/observability.md":
        assert '"table":"0.weight"' in (tmp_path / "steps.jsonl").read_text()


def test_every_session_prints_what_its_page_says() -> None:
    sessions = [(page, block) for page, blocks in PAGES.items() for kind, block in blocks if kind == "pycon"]
    assert len(sessions) >= 2
    for page, block in sessions:
        example = doctest.DocTestParser().get_doctest(block, {}, page, None, None)
        assert doctest.DocTestRunner(verbose=False).run(example).failed == 0, page


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", ["docs/quick-start.md", "docs/parameter-server.md", "docs/observability.md"])
def test_the_first_commands_of_a_reader_run(page: str, tmp_path: Path) -> None:
    """Commands without a title run here; all others are looked up in the command line by `test_docs.py`."""
    for name in ("thinwire", "torchrun"):
        module = "thinwire" if name == "thinwire" else "torch.distributed.run"
        (tmp_path / name).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for block in re.findall(r"^```\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
        command = ["bash", "-ec", block]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, f"{page}: {block}{done.stderr[-3000:]}"
