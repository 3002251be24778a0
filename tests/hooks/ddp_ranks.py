"""Real ranks for tests: processes that meet over gloo on loopback, forked from a server that has torch loaded."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.hooks import ddp as ddp  # loaded here, in the server, once

Weights = dict[str, torch.Tensor]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.hooks.ddp_preload"])

TIMEOUT_S = 120.0


class RankError(AssertionError):
    """A rank raised what the test did not expect."""


def run_ranks(
    world: int, work: Callable[..., Any], *args: Any, group_timeout_s: float = 20.0, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Runs `work(rank, *args)` on every rank and returns the results in rank order.

    An exception of thinwire's is a result too: tests ask for its type and text. A rank that dies gives None.
    """
    return _run(world, timeout_s, _meet, work, group_timeout_s, args)


def run_cases(world: int, cases: Mapping[str, tuple[Any, ...]], **options: Any) -> dict[str, list[Any]]:
    """Runs cases one after the other on the same ranks: to start ranks takes longer than most cases.

    Args:
        world: how many ranks.
        cases: by name, a function and its arguments after the rank.
        options: of `run_ranks`.

    Returns:
        Every case's results in rank order.
    """
    by_rank = run_ranks(world, _run_each, dict(cases), **options)
    return {name: [results[name] for results in by_rank] for name in cases}


def _run_each(rank: int, cases: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    results = {}
    for name, (work, *args) in cases.items():
        try:
            results[name] = work(rank, *args)
        except Exception as error:
            raise RuntimeError(f"in the case {name!r}") from error  # an error of thinwire's would count as a result
    return results


def run_script(world: int, script: Path, *arguments: str) -> str:
    """Runs a script on every rank, in the environment that torchrun gives it; returns what rank 0 printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    texts = _run(world, TIMEOUT_S, _impersonate_torchrun, script, port, arguments)
    return str(texts[0])


def _run(world: int, timeout_s: float, main: Callable[..., Any], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank, args=(theirs, main, rank, world, folder, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_result(rank, pipe, timeout_s, processes[rank], folder) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _result(rank: int, pipe: Connection, timeout_s: float, process: BaseProcess, folder: str) -> Any:
    if not wait([pipe], timeout_s):
        if process.pid is not None and process.is_alive():  # prints its stack, for the failure's report
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        stands = "".join(each.read_text() for each in Path(folder).glob(f"stacks-{rank}"))
        raise RankError(f"rank {rank} said nothing for {timeout_s:g} s; it stands in\n{stands}")
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None
    if kind == "crash":
        raise RankError(f"rank {rank}: {value}")
    return value


def _rank(pipe: Connection, main: Callable[..., Any], rank: int, world: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, open(f"{folder}/stacks-{rank}", "w"))  # noqa: SIM115  # open for good
    try:
        outcome: tuple[str, Any] = ("value", main(rank, world, folder, *args))
    except tw.ThinwireError as error:
        outcome = ("value", error)
    except BaseException as error:
        outcome = ("crash", "".join(traceback.format_exception(error)))
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    # As after a crash: peers see this rank go, and nothing waits for a group that a test broke on purpose.
    os._exit(0)


def _meet(rank: int, world: int, folder: str, work: Callable[..., Any], timeout_s: float, args: Any) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return work(rank, *args)


def _impersonate_torchrun(rank: int, world: int, _folder: str, script: Path, port: int, arguments: Any) -> str:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four layers with one parameter that is large enough to be cut, and ten uncompressed tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 120), nn.LayerNorm(120), nn.ReLU(), nn.Linear(120, 4)
        ).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight examples of a task that a small net learns; another batch for every rank and step."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x.to(dtype), (x[:, :4] + x[:, 4:8]).argmax(1)


def backward(model: Any, rank: int, step: int, factor: float = 1.0) -> None:
    """One backward pass of a (wrapped) model; its loss is multiplied by the factor."""
    x, y = batch(rank, step)
    (nn.functional.cross_entropy(model(x), y) * factor).backward()  # type: ignore[no-untyped-call]


def train(model: nn.Module, rank: int, steps: int, *, first: int = 0, optimizer: Any = None) -> None:
    """Trains a (wrapped) model for some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x, y = batch(rank, step, dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def weights(model: nn.Module) -> Weights:
    """Copies of the parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def residuals_of(state: Any) -> Weights:
    """Copies of a hook's residuals on this rank, by name."""
    found: Weights = state.core.residuals.state_dict()["residuals"]
    return found


def force(state: Any, level: int) -> None:
    """Makes the controller of `auto` keep this setting, whatever the link."""
    state.auto.controller._decide = lambda: None
    state.auto.controller.memory.level = level


def refusal(call: Callable[[], object]) -> str:
    """Type and text of the thinwire error that a call raises; "nothing" where it raises none."""
    try:
        call()
    except tw.ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
