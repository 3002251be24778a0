"""Extensions as a user's package has them: declared by the entry points of docs/extending.md, then trained with.

A folder with a package's metadata is put on the path, so that names are found as they would be installed.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import start_server
from thinwire.codecs import registry
from thinwire.errors import ProtocolError
from thinwire.plugins import load_or_warn
from thinwire.policies.assignment import Sized
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import design
from thinwire.policies.naming import plugins
from thinwire.policies.placement import placement
from thinwire.server.core import ServerCore

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXTENSIONS = sorted((ROOT / "examples").glob("extending_*.py"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples as one installed package, with the page's own entry points."""
    [block] = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    groups: dict[str, dict[str, str]] = tomllib.loads(block)["project"]["entry-points"]
    metadata = tmp_path / "extensions-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extensions\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.cache_clear()
    load_or_warn.cache_clear()
    monkeypatch.setattr(registry._ours, "_schemes", dict(registry._ours._schemes))
    monkeypatch.setattr(registry._ours, "_loaded", False)
    yield
    plugins.cache_clear()
    for name in [name for name in sys.modules if name.startswith("extending_")]:
        del sys.modules[name]


def train(steps: int, *, workers: int = 2, shards: int = 2, **options: Any) -> tuple[list[torch.Tensor], Any, Any]:
    """Trains a small classifier; returns every worker's weights, worker 0's optimizer and its first and last loss."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 20)
    targets = (inputs @ torch.randn(20, 4)).argmax(1)
    weights: list[Any] = [None] * workers
    kept: dict[str, Any] = {}
    failures: list[BaseException] = []

    def work(rank: int, model: nn.Module, addresses: list[Callable[[], Any]], choices: dict[str, Any]) -> None:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            servers = [address() for address in addresses]
            with tw.distribute(
                model, optimizer, server=servers, rank=rank, workers=workers, timeout=30, **choices
            ) as opt:
                losses = []
                for step in range(steps):
                    batch = slice((step * workers + rank) * 16 % 256, (step * workers + rank) * 16 % 256 + 16)
                    opt.zero_grad()
                    loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
                    loss.backward()  # type: ignore[no-untyped-call]
                    opt.step()
                    losses.append(float(loss.detach()))
                opt.flush()
                weights[rank] = torch.cat([p.detach().flatten() for p in model.parameters()])
                if rank == 0:
                    kept.update(opt=opt, clock=opt.clock, traffic=opt.traffic(), losses=losses)
        except BaseException as error:
            failures.append(error)

    models = []
    for _ in range(workers):  # torch has one generator a process
        torch.manual_seed(1)
        models.append(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)))
    with ExitStack() as stack:
        addresses = []
        for _ in range(shards):
            server, address = start_server(ServerCore(), "memory")
            stack.enter_context(server)
            addresses.append(address)
        threads = [
            threading.Thread(target=work, args=(rank, models[rank], addresses, options)) for rank in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return weights, kept["opt"], kept


def test_every_extension_is_short_and_documented() -> None:
    for path in EXTENSIONS:
        assert len(path.read_text().splitlines()) < 45, path
        assert f"(../examples/{path.name})" in PAGE, path


@pytest.mark.usefixtures("installed")
def test_every_entry_point_is_ours_to_find() -> None:
    groups = {
        "designs": "use-case",
        "consistency": "post-local",
        "placement": "together",
        "compression": "large",
        "codecs": "nibble",
    }
    for group, name in groups.items():
        assert name in {point.name for point in plugins(f"thinwire.{group}")}, group


# ---- the use case of Wu 2018, §4.2


@pytest.mark.usefixtures("installed")
def test_the_use_case_trains() -> None:
    made = design("use-case[staleness=2,fraction=0.05]")
    assert made.up.config()["fraction"] == 0.05 and made.consistency == "ssp[staleness=2,mode=passive]"
    weights, opt, kept = train(60, design="use-case[staleness=2,fraction=0.05]")
    assert torch.equal(*weights), "with a flush at the end all have everything"
    assert kept["clock"] == 60 // 3, "an exchange in every third step"
    assert [parts[0].server for parts in opt.assignment.partitions] == [0, 1, 0, 1, 0, 1]
    assert 8 * kept["traffic"]["payload_bytes_push"] / kept["traffic"]["values_push"] < 6
    assert sum(kept["losses"][-10:]) < 0.9 * sum(kept["losses"][:10])


# ---- a consistency policy


@pytest.mark.usefixtures("installed")
def test_new_policy_exchanges_at_its_steps() -> None:
    policy = consistency("post-local[warm=3,steps=4]")
    assert [policy.exchanges(i) for i in range(11)] == [True] * 3 + [False, False, False, True] * 2
    with pytest.raises(tw.ConfigError, match="post-local: warm=-1"):
        consistency("post-local[warm=-1]")
    weights, _, kept = train(22, design="fp32", consistency="post-local[warm=10,steps=4]")
    assert torch.equal(*weights)
    assert kept["clock"] == 10 + 3 and sum(kept["losses"][-5:]) < sum(kept["losses"][:5])
    plain, _, _ = train(22, design="fp32", consistency="bsp")
    only_warm, _, _ = train(22, design="fp32", consistency="post-local[warm=22]")
    assert torch.equal(plain[0], only_warm[0]), "while it exchanges in every step it is bulk-synchronous, bit for bit"


def test_server_without_a_policy_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is enough for the worker; without the entry point the server cannot know what it means."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    policy = importlib.import_module("extending_consistency").PostLocal()
    with pytest.raises(
        ProtocolError, match=r"unknown consistency 'post-local' \(did you mean 'local'\?\); there are bsp, asp"
    ):
        train(2, workers=1, design="fp32", consistency=policy)


# ---- a placement, a compression policy


@pytest.mark.usefixtures("installed")
def test_the_new_placement_keeps_layers_whole() -> None:
    tables = [
        Sized(f"{layer}.{part}", n, 4.0 * n) for layer, n in (("a", 9), ("b", 5), ("c", 3)) for part in ("w", "b")
    ]
    placed = placement("together").place(tables, 2)
    assert [parts[0].server for parts in placed.partitions] == [0, 0, 1, 1, 1, 1]
    assert placed.loads() == (72.0, 64.0)
    weights, opt, kept = train(60, design="3lc", placement="together")
    assert torch.equal(*weights) and sum(kept["losses"][-10:]) < 0.9 * sum(kept["losses"][:10])
    assert [parts[0].server for parts in opt.assignment.partitions] == [1, 1, 0, 0, 1, 1]
    by_object, _, _ = train(60, design="3lc", placement=placement("together"))
    assert torch.equal(weights[0], by_object[0]), "a name and an object are the same"


@pytest.mark.usefixtures("installed")
def test_the_new_compression_is_used() -> None:
    policy = design("3lc", compression="large[least=2000]").compress()
    chosen = [policy.choose("w", shape).up.id for shape in ((64, 20), (64,), (32, 64), (4, 32))]
    assert chosen == ["fp16", "fp32", "3lc", "fp16"]
    weights, _, kept = train(60, design="3lc", compression="large[least=2000]")
    assert torch.equal(*weights) and sum(kept["losses"][-10:]) < 0.9 * sum(kept["losses"][:10])
    halves, small = 16 * (20 * 64 + 32 * 4), 32 * (64 + 32 + 4)
    pushed = 8 * kept["traffic"]["payload_bytes_push"] / 60
    assert halves + small < pushed < halves + small + 1.6 * 64 * 32 + 64
    by_object, _, _ = train(60, design="3lc", compression=policy)
    assert torch.equal(weights[0], by_object[0]), "a name and an object are the same"


# ---- a codec


@pytest.mark.usefixtures("installed")
def test_the_new_codec_trains() -> None:
    weights, _, kept = train(60, codec="nibble", codec_down="nibble")
    assert torch.equal(*weights) and sum(kept["losses"][-10:]) < 0.9 * sum(kept["losses"][:10])
    assert 4 < 8 * kept["traffic"]["payload_bytes_push"] / kept["traffic"]["values_push"] < 6


@pytest.mark.usefixtures("installed")
def test_new_codec_passes_the_contract_as_documented(tmp_path: Path) -> None:
    [enrolled] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "my_module.py").write_text(enrolled)
    files = re.findall(r"tests/codecs/test_\w+\.py", PAGE)
    assert len(files) == 3
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "examples")))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "THINWIRE_ENROLLED": "my_module", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 30
