"""FSDP2 as scripts also use it: parts and wrappings in another order, passes that break off, hooks put on later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.hooks.ddp_ranks import run_ranks
from thinwire.errors import ConfigError
from thinwire.hooks import ddp, fsdp
from thinwire.hooks.fsdp.state import ShardedState

STEPS = 4
LOSSLESS: dict[str, Any] = {"codec": "fp32", "measure_link": False}


class _Break(torch.autograd.Function):
    """Raises in the backward pass while `on`."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Break.on:
            raise ValueError("broken off")
        return gradient


class _Net(nn.Module):
    """A body of two layers, with something between them that may break, and a head."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(12, 40), nn.Linear(40, 40)])
        self.head = nn.Linear(40, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = _Break.apply(self.body[0](x).relu())  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.head(self.body[1](hidden).relu())
        return out


def _layers(model: _Net) -> list[nn.Module]:
    return [*model.body, model.head]


def _sharded(mesh: DeviceMesh, outputs: int = 6, **options: Any) -> Any:
    model = _Net(outputs)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _norms(model: nn.Module, rank: int, step: int, *, to_none: bool) -> list[float | None]:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank))
    model.zero_grad(set_to_none=to_none)
    model(x).pow(2).mean().backward()
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [None if each is None else round(float(each.full_tensor().norm()), 5) for each in grads]


def _beside(rank: int, make: Callable[[bool], Any]) -> bool:
    """Whether every step's gradients are those of a model that is not compressed; what comes late shows in zeros."""
    plain, ours = make(False), make(True)
    taken = range(STEPS)
    return all(_norms(plain, rank, s, to_none=False) == _norms(ours, rank, s, to_none=False) for s in taken)


def _part(mesh: DeviceMesh) -> Callable[[bool], Any]:
    def make(compressed: bool) -> Any:
        model = _sharded(mesh)
        if compressed:
            fsdp.compress(model.body[1], **LOSSLESS)
        return model

    return make


def _before_the_root(mesh: DeviceMesh) -> Callable[[bool], Any]:
    def make(compressed: bool) -> Any:
        model = _Net()
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh)
        if compressed:
            fsdp.compress(model, **LOSSLESS)
        return fully_shard(model, mesh=mesh)

    return make


def _resharded(mesh: DeviceMesh) -> Callable[[bool], Any]:
    def make(compressed: bool) -> Any:
        model = _sharded(mesh, reshard_after_forward=2)
        if compressed:
            fsdp.compress(model, **LOSSLESS, gather="fp32")
        return model

    return make


def _broken_off(rank: int, mesh: DeviceMesh, *, compressed: bool) -> list[object]:
    model = _sharded(mesh)
    if compressed:
        fsdp.compress(model, **LOSSLESS)
    found: list[object] = []
    for step in range(STEPS):
        _Break.on = step == 1
        try:
            found.append(_norms(model, rank, step, to_none=False))
        except ValueError as error:
            found.append(str(error))
            model.reset_iter_state()
    return found


def _refused(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigError as error:
        return str(error)
    return "taken"


def _hooked_later(rank: int, mesh: DeviceMesh, kind: str) -> str:
    model = _sharded(mesh)
    fsdp.compress(model, **LOSSLESS)
    _norms(model, rank, 0, to_none=True)
    if kind == "HSDP":
        model.head.set_all_reduce_hook(lambda _: None)
    else:
        model.head.set_custom_reduce_scatter(model.body[0]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm)
    return _refused(lambda: _norms(model, rank, 1, to_none=True))


def _unfrozen(rank: int, mesh: DeviceMesh) -> str:
    model = _sharded(mesh)
    model.head.bias.requires_grad_(False)
    fsdp.compress(model, **LOSSLESS)
    model.head.bias.requires_grad_(True)
    return _refused(lambda: _norms(model, rank, 0, to_none=True))


def _automatic(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
    """A head of one output, whose shard is padding alone on some ranks; compressed from the first step on."""
    model = _sharded(mesh, outputs=1)
    state = fsdp.compress(model, "auto", measure_link=False)
    assert state.auto is not None
    state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]
    state.auto.pilot.memory.level = 3
    for step in range(STEPS):
        _norms(model, rank, step, to_none=True)
    kept = state.state_dict()
    restored = fsdp.compress(_sharded(mesh, outputs=1), "auto", measure_link=False)
    assert restored.auto is not None and "auto" not in kept, "others decide otherwise"
    restored.load_state_dict(kept)
    return int(state.counters()["steps"]), restored.auto.pilot.memory.level


def _counted(rank: int, mesh: DeviceMesh) -> tuple[float, float]:
    """Bytes that a step's gathers take, by the report: without evaluations, and with some in between."""
    found = []
    for evaluations in (0, 5):
        model = _sharded(mesh)
        state: ShardedState = fsdp.compress(model, **LOSSLESS, gather="int8")
        for step in range(8):
            _norms(model, rank, step, to_none=True)
            with torch.no_grad():
                for _ in range(evaluations):
                    model(torch.zeros(2, 12))
        found.append(fsdp.report(state).sent_nbytes)
    return found[0], found[1]


def run_all(rank: int) -> dict[str, Any]:
    flat = DeviceMesh("cpu", [0, 1, 2, 3])
    sites = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"resharded": _beside(rank, _resharded(flat))}
    for kind, mesh in (("FSDP", flat), ("HSDP", sites)):
        found[f"{kind}, part"] = _beside(rank, _part(mesh))
        found[f"{kind}, before the root"] = _beside(rank, _before_the_root(mesh))
        if hasattr(FSDPModule, "reset_iter_state"):
            found[f"{kind}, broken off"] = [_broken_off(rank, mesh, compressed=each) for each in (False, True)]
        found[f"{kind}, hooked later"] = _hooked_later(rank, mesh, kind)
        found[f"{kind}, unfrozen"] = _unfrozen(rank, mesh)
    found["FSDP, all-reduce hooked later"] = _hooked_later(rank, flat, "HSDP")
    found["automatic"] = _automatic(rank, sites)
    found["counted"] = _counted(rank, flat)
    plain = _sharded(flat)
    state = fsdp.compress(plain, **LOSSLESS)
    for step in range(3):
        _norms(plain, rank, step, to_none=True)
    found["report"] = str(fsdp.report(state))
    both = fsdp.compress(_sharded(sites), **LOSSLESS)
    found["all ranks"] = list(ddp.AllRanks(both).state_dict()["ranks"])
    of_ddp = {key: value for key, value in both.state_dict().items() if key != "replicas"}
    found["of DDP"] = _refused(lambda: both.load_state_dict(of_ddp))
    found["damaged"] = _refused(lambda: both.load_state_dict({**both.state_dict(), "ranks": {}, "step": 3}))
    moved = _sharded(flat)
    fsdp.compress(moved, **LOSSLESS)
    found["moved"] = str(next(moved.double().parameters()).dtype)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of every case, by rank."""
    return run_ranks(4, run_all, group_timeout_s=60.0, timeout_s=120.0)


def test_gradients_are_those_of_this_step_however_the_model_was_wrapped(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["resharded"] is True
        for kind in ("FSDP", "HSDP"):
            for how in ("part", "before the root"):
                assert found[f"{kind}, {how}"], (kind, how)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on after such a pass")
def test_gradients_of_a_pass_that_broke_off_are_discarded(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for kind in ("FSDP", "HSDP"):
            plain, ours = found[f"{kind}, broken off"]
            assert plain == ours and plain[1] == "broken off", kind


def test_what_would_take_the_place_of_the_exchange_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "set_all_reduce_hook was called after fsdp.compress" in found["HSDP, hooked later"]
        assert "set_all_reduce_hook was called after fsdp.compress" in found["FSDP, all-reduce hooked later"]
        assert "set_custom_reduce_scatter was called after fsdp.compress" in found["FSDP, hooked later"]
        for kind in ("FSDP", "HSDP"):
            assert (
                "head.bias was frozen when fsdp.compress was called, and is trained now" in found[f"{kind}, unfrozen"]
            )


def test_a_rank_that_holds_padding_of_the_first_group_decides_all_the_same(ranks: list[dict[str, Any]]) -> None:
    assert [found["automatic"] for found in ranks] == [(STEPS, 3)] * 4


def test_what_evaluations_gather_is_no_steps_and_what_fsdp_gathers_is_said(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "beside it FSDP gathers parameters uncompressed" in found["report"]
        without, with_some = found["counted"]
        assert 0.9 * without < with_some < 1.1 * without


def test_states_of_other_meshes_and_kinds_are_told_apart(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["all ranks"] == ([str(rank)] if rank else ["0", "1", "2", "3"]), "rank 0 has them of all replicas"
        assert "the state is of a model under DDP, and this one is under FSDP" in found["of DDP"]
        assert "every rank has residuals of its own" in found["damaged"]
        assert found["moved"] == "torch.float64"
