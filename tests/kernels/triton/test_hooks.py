"""Training with tensors on a GPU: encoded and decoded there, to the bits that the host would have made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from tests.collective import ranks
from tests.collective.ranks import bucket_of, collectives, play
from thinwire.codecs import device as dispatch
from thinwire.codecs import tensors
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* has no GPU kernels")]

SIZES = {"w": 700, "bias": 7, "small": 150}
WORLD = 2
HOST = torch.device("cpu")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Any:
    """Inside it, tensors on the CPU lie on the host again, as they do beside a real GPU."""

    def context() -> Any:
        scope = monkeypatch.context()
        patch = scope.__enter__()
        patch.setattr(tensors, "HOST_DEVICES", frozenset({"cpu"}))
        patch.setattr(dispatch, "KERNEL_DEVICES", frozenset())
        return scope

    return context


DDP_CODECS = [tw.codec("3lc", sparsity=1.5), tw.codec("topk", fraction=0.1)]


@pytest.mark.parametrize("codec", DDP_CODECS, ids=repr)
def test_ddp_exchanges_the_same_frames_on_both_sides(codec: tw.Codec, device: torch.device, on_host: Any) -> None:
    ours = collectives(ranks.tensors(codec, SIZES, device), WORLD, drop_zeros=True)
    scope = on_host()
    theirs = collectives(ranks.tensors(codec, SIZES), WORLD, drop_zeros=True)
    scope.__exit__(None, None, None)
    on_host_here = {context.on_host for one in ours for context in one.residuals.contexts.values()}
    assert on_host_here == {codec.id == "topk"}  # which has no kernels there, and sends the same
    assert all(context.on_host for one in theirs for context in one.residuals.contexts.values())
    bucket = bucket_of(SIZES)
    random = np.random.default_rng(1)
    for step in range(3):
        given = [random.standard_normal(sum(SIZES.values())).astype(np.float32) for _ in range(WORLD)]
        if step == 1:
            for gradient in given:
                gradient[-SIZES["small"] :] = 0  # no rank has a gradient for it
        on_gpu = [torch.from_numpy(gradient.copy()).to(device) for gradient in given]
        packets = []
        for cores, values in ((ours, on_gpu), (theirs, given)):
            exchanges = [core.bucket_ready(bucket, step, 0, last=True)[0][0] for core in cores]
            packets.append([send.packet for send in play(exchanges, values)])
        assert packets[0] == packets[1]
        for one, other in zip(on_gpu, given, strict=True):
            assert one.cpu().numpy().tobytes() == other.tobytes()
    for mine, their in zip(ours, theirs, strict=True):
        for name, residual in mine.residuals.state_dict()["residuals"].items():
            assert torch.equal(residual, their.residuals.state_dict()["residuals"][name])


def gradients(model: nn.Module, step: int) -> torch.Tensor:
    """A loss with its factors as gradients: the same bits on every device."""
    generator = torch.Generator().manual_seed(step)
    terms = [(each * torch.randn(each.shape, generator=generator).to(each.device)).sum() for each in model.parameters()]
    return torch.stack(terms).sum()


def train(where: torch.device, design: str) -> tuple[list[Any], list[bool]]:
    """A few steps of one worker: the weights, and for each table whether it was encoded on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.Linear(12, 4)).to(where)
    with MemoryServer(serving(ServerCore())) as server:
        opt = tw.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            server=server.connect(),
            min_numel=1,
            design=design,
        )
        with opt:
            for step in range(3):
                opt.zero_grad()
                opt.sync()  # what reads parameters outside of their modules
                gradients(model, step).backward()  # type: ignore[no-untyped-call]
                opt.step()
            opt.sync()
            sides = [
                context.on_host for slot in opt._worker.model.trained_tables() if (context := slot.context) is not None
            ]
    return [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()], sides


HAVE_NO_KERNELS = ("terngrad", "diloco[codec=blocktopk,h=1,outer_momentum=0.6]")


@pytest.mark.parametrize("design", ["3lc", "update[h=1]", "local-sgd[codec=int8,h=1]", *HAVE_NO_KERNELS])
def test_distribute_trains_to_the_same_bits(design: str, device: torch.device, on_host: Any) -> None:
    ours, our_sides = train(device, design)
    scope = on_host()
    theirs, their_sides = train(HOST, design)
    scope.__exit__(None, None, None)
    assert ours == theirs
    assert all(their_sides) and (design in HAVE_NO_KERNELS or not all(our_sides))
