"""What goes wrong between ranks is an error that names rank and cause, on every rank, and never a hang."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights
from thinwire.errors import SessionLostError

ROOT = Path(__file__).parents[2]
MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}


# ---- NaN


def run_skip(rank: int, parameter: str) -> dict[str, Any]:
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(wrapped, rank, 3, optimizer=optimizer)
    before = state.state_dict()["ranks"][str(rank)]
    handle = poison(model, parameter) if rank == 1 else None
    x, y = batch(rank, 3)
    optimizer.zero_grad()
    nn.functional.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
    gradient = dict(model.named_parameters())[parameter].grad
    after = state.state_dict()["ranks"][str(rank)]
    if handle is not None:
        handle.remove()
    skipped = state.steps_skipped
    train(wrapped, rank, 2, first=4, optimizer=optimizer)
    return {
        "untouched": all(
            torch.equal(after[kind][name], before[kind][name]) for kind in before for name in before[kind]
        ),
        "something": any(bool(residual.any()) for residual in before["residuals"].values()),
        "nan": gradient is not None and bool(gradient.isnan().all()),
        "skipped": skipped,
        "weights": weights(model),
    }


def poison(model: nn.Module, name: str) -> Any:
    """Makes the gradient of one parameter NaN, until the handle is removed."""
    return dict(model.named_parameters())[name].register_hook(lambda grad: grad * torch.nan)  # type: ignore[no-untyped-call]


def run_scaler(rank: int) -> dict[str, Any]:
    """A loop with a GradScaler whose first scales overflow float16 gradients on rank 0 alone."""
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", scaler=scaler, gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales, norms = [], []
    for step in range(7):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x), y)
        if step == 3 and rank == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        saved = state.state_dict()
        flat = torch.cat(list(saved["ranks"][str(rank)]["residuals"].values()))
        norms.append(float(flat.norm()) / saved["loss_scale"])
    return {"scales": scales, "norms": norms, "weights": weights(model), "skipped": state.steps_skipped}


def run_nan(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = ["0.weight", "2.weight", "3.bias", "5.weight"]
    return {parameter: run_skip(rank, parameter) for parameter in parameters}, run_scaler(rank)


def test_nan_on_one_rank_makes_all_ranks_skip_together() -> None:
    """First bucket or last, compressed or not: earlier buckets of the step are undone."""
    results = run_ranks(3, run_nan)
    first, scaled_first = results[0]
    for skipping, scaled in results:
        for parameter, result in skipping.items():
            assert result["untouched"] and result["something"] and result["nan"], parameter
            assert result["skipped"] == 1, parameter
            for name, value in result["weights"].items():
                assert value.isfinite().all() and torch.equal(value, first[parameter]["weights"][name]), parameter
        # A GradScaler skips on all ranks, and residuals follow its scale.
        assert scaled["skipped"] == 1 and scaled["scales"] == scaled_first["scales"]
        assert scaled["scales"][3] < scaled["scales"][2] and max(scaled["scales"]) > scaled["scales"][0]
        # In units of the gradient residuals stay what they are, although scales differ by factors.
        assert scaled["norms"][3] == pytest.approx(scaled["norms"][2], rel=1e-6)
        assert max(scaled["norms"]) < 4 * min(scaled["norms"])
        for name, value in scaled["weights"].items():
            assert value.isfinite().all() and torch.equal(value, scaled_first["weights"][name])


def run_raise(rank: int) -> list[list[Exception]]:
    """Two trainings that end with a NaN on rank 1, and what the next step of each is."""
    found: list[list[Exception]] = []
    for parameter in ("0.weight", "5.bias"):
        model = mlp()
        wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
        ddp.compress(wrapped, "3lc", gather_mb=0, measure_link=False)
        train(wrapped, rank, 2)
        if rank == 1:
            poison(model, parameter)
        found.append([])
        for step in (2, 3):
            try:
                train(wrapped, rank, 1, first=step)
            except (tw.ThinwireError, RuntimeError) as error:
                found[-1].append(error)
    return found


def test_nan_ends_the_training_on_all_ranks_by_default() -> None:
    for rank, trainings in enumerate(run_ranks(3, run_raise)):
        for errors in trainings:
            assert len(errors) == 2, "after a failure no further step succeeds"
            assert isinstance(errors[0], tw.NonFiniteError) and "NaN or Inf" in str(errors[0])
            assert ("rank 1 gave up" in str(errors[0])) == (rank != 1)


def run_alone(rank: int) -> tuple[list[list[Exception]], int, bool]:
    """What `run_raise` is on one rank, and a step that one rank skips."""
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", measure_link=False)
    x, y = batch(rank, 0)
    (nn.functional.cross_entropy(wrapped(x), y) * torch.inf).backward()  # type: ignore[no-untyped-call]
    nan = all(parameter.grad is not None and bool(parameter.grad.isnan().all()) for parameter in model.parameters())
    poisoned: list[list[Exception]] = []
    for parameter in ("0.weight", "5.bias"):
        model = mlp()
        wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
        ddp.compress(wrapped, "3lc", measure_link=False)
        poison(model, parameter)
        poisoned.append([])
        for step in range(2):
            try:
                train(wrapped, rank, 1, first=step)
            except (tw.ThinwireError, RuntimeError) as error:
                poisoned[-1].append(error)
    return poisoned, state.steps_skipped, nan


def test_nan_on_one_rank_alone_is_told_as_on_several() -> None:
    """Elastic jobs shrink to one rank."""
    [(trainings, skipped, nan)] = run_ranks(1, run_alone)
    assert skipped == 1 and nan
    for errors in trainings:
        assert len(errors) == 2 and isinstance(errors[0], tw.NonFiniteError), errors


# ---- ranks that are gone or different


def run_death(rank: int) -> str | None:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    ddp.compress(model, "3lc", gather_mb=0, measure_link=False)
    train(model, rank, 2)  # in the second, DDP itself broadcasts its new buckets
    if rank == 2:
        os._exit(1)
    try:
        train(model, rank, 3, first=2)
    except tw.TransportError as error:
        return str(error)
    return None


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    results = run_ranks(3, run_death)
    assert results[2] is None
    assert all("is gone" in text for text in results[:2])


def run_death_where_ddp_speaks_itself(rank: int, buffers: bool) -> tuple[str, str]:
    """Rank 2 dies where DDP broadcasts buffers before each forward pass, or all-reduces gradients uncompressed."""
    torch.manual_seed(0)
    inner = nn.Sequential(mlp(), nn.BatchNorm1d(4)) if buffers else mlp()
    model = DistributedDataParallel(inner, **MANY_BUCKETS)
    ddp.compress(model, "3lc", start_step=0 if buffers else 1000, measure_link=False)
    train(model, rank, 2)
    if rank == 2:
        os._exit(1)
    with pytest.raises((tw.TransportError, RuntimeError)) as lost:
        train(model, rank, 3, first=2)
    return lost.type.__name__, str(lost.value)


@pytest.mark.parametrize("buffers", [True, False])
def test_where_ddp_speaks_itself_a_death_may_be_gloos_error(buffers: bool) -> None:
    """As the table in docs/ddp.md says: who catches thinwire's errors alone to restart would miss it."""
    found = run_ranks(3, run_death_where_ddp_speaks_itself, buffers)[:2]
    for kind, text in found:
        assert "is gone" in text if kind == "TransportError" else kind == "RuntimeError" and "gloo" in text, text
    assert re.search(r"^\| a rank dies.*batch norm.*`RuntimeError`", (ROOT / "docs" / "ddp.md").read_text(), re.M)


def run_death_between_two_pushes(rank: int) -> str | None:
    """Rank 2 dies after its push to rank 0: rank 1 finds out, while rank 0 waits for rank 1."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", measure_link=False)
    train(model, rank, 2)
    peers = state.driver.peers
    send = peers.send

    def send_to_rank_0_alone(peer: int, data: bytearray, tag: int) -> Any:
        if peer != 0:
            os._exit(1)
        transfer = send(peer, data, tag)
        peers.wait(transfer)
        return transfer

    if rank == 2:
        peers.send = send_to_rank_0_alone  # type: ignore[method-assign]
    with pytest.raises(tw.TransportError) as lost:
        train(model, rank, 1, first=2)
    return str(lost.value)


def test_a_lost_connection_is_passed_on_with_the_rank_that_is_gone() -> None:
    first, second, _ = run_ranks(3, run_death_between_two_pushes)
    assert first.startswith("rank 1 gave up: rank 2 is gone") and second.startswith("rank 2 is gone"), (first, second)


def run_death_of_a_shard(rank: int) -> tuple[str, float, float] | None:
    """Ranks that serve each other: what this one was told after rank 2 died, when, and when it could end."""
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    store = dist.distributed_c10d._get_default_store()
    try:
        with tw.distribute(model, inner, group=dist.group.WORLD, design="3lc") as opt:
            train(model, rank, 3, optimizer=opt)
            if rank == 2:
                store.set("died", str(time.time()))
                os._exit(1)
            try:
                train(model, rank, 1000, first=3, optimizer=opt)
            finally:
                heard = time.time()
    except SessionLostError as error:
        died = float(store.get("died"))
        return str(error), heard - died, time.time() - died
    return None


@pytest.mark.long
def test_ranks_that_serve_each_other_hear_who_died() -> None:
    for text, heard_s, ended_s in run_ranks(3, run_death_of_a_shard)[:2]:
        assert text.startswith("rank 2 is gone: its process has ended"), text
        assert heard_s < 2 and ended_s < 10, "and nobody stays for a rank that cannot come back"


def run_absent(rank: int) -> str | None:
    """Rank 1 does not call `compress` before rank 0 has given up."""
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(mlp())
    if rank == 0:
        with pytest.raises(tw.TransportError) as never:
            ddp.compress(model, "3lc", timeout=timedelta(seconds=1), measure_link=False)
        store.set("given up", "")
        return str(never.value)
    store.wait(["given up"])
    return None


def run_stall(rank: int) -> str | None:
    """Rank 1 does not take the third step before rank 0 has given up."""
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(mlp())
    ddp.compress(model, "3lc", timeout=timedelta(seconds=1), measure_link=False)
    train(model, rank, 2)
    if rank == 0:
        with pytest.raises(tw.DeadlineError) as late:
            train(model, rank, 1, first=2)
        store.set("given up", "")
        return str(late.value)
    store.wait(["given up"])
    return None


def test_a_rank_that_never_comes_or_stalls_is_an_error_within_the_timeout() -> None:
    never = run_ranks(2, run_absent)[0]
    assert re.search("every rank must call compress|all of them must call compress", never)
    assert "rank 1 kept rank 0 waiting for more than 1 s" in run_ranks(2, run_stall)[0]


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"codec": "3lc", "sparsity": 1.5}, r"rank 2 has codec of 0\.weight\.sparsity = 1\.5 and rank 0 has 1\.0; every"),
    ({"codec": "int8"}, r"rank 2 has codec\.id = 'int8' and rank 0 has '3lc'; every"),
    ({"codec": "3lc", "start_step": 4}, "rank 2 has start_step = 4 and rank 0 has 0"),
    ({"codec": "3lc", "gather_mb": 0}, "rank 2 has gather_mb = 0.0 and rank 0 has 4.0"),
    ({"codec": "3lc", "nonfinite": "skip"}, "rank 2 has nonfinite = 'skip' and rank 0 has 'raise'"),
    ({"names": "other"}, "rank 2 has "),
]


def run_different(rank: int) -> list[str]:
    texts = []
    for options, _ in DIFFERENT:
        given = {"codec": "3lc"} if rank != 2 else dict(options)
        inner = mlp()
        if given.pop("names", None):  # the same shapes under other names: DDP itself does not look at names
            inner = nn.Sequential()
            for index, layer in enumerate(mlp()):
                inner.add_module(f"layer{index}", layer)
        with pytest.raises(tw.ProtocolError) as refused:
            ddp.compress(DistributedDataParallel(inner), measure_link=False, **given)
        texts.append(str(refused.value))
    return texts


def test_another_model_or_other_settings_on_one_rank_are_refused_everywhere() -> None:
    for texts in run_ranks(3, run_different):
        for text, (_, pattern) in zip(texts, DIFFERENT, strict=True):
            assert re.search(pattern, text), text
