"""Trainings with several optimizers, or with one that computes gradients anew, over one compressed model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import Weights, same
from thinwire.collective.snapshot import Snapshot
from thinwire.hooks import ddp, fsdp

CODED: dict[str, Any] = {"codec": "3lc", "sparsity": 1.75, "min_numel": 16, "measure_link": False}
HOOKS = ("ddp", "fsdp")


def whole(model: nn.Module) -> Weights:
    """Copies of the parameters, those of FSDP2 whole."""
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


def noise(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def hooked(kind: str, model: Any, parts: tuple[str, ...] = (), wrap: Any = None, **options: Any) -> Any:
    """A model as a script calls it, and the hook's state; FSDP2 reduces these parts by themselves."""
    given = {name: value for name, value in {**CODED, **options}.items() if value is not None}
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, **{"find_unused_parameters": bool(parts), **(wrap or {})})
        return wrapped, ddp.compress(wrapped, **given)
    mesh = init_device_mesh("cpu", (2,))
    for part in parts:
        fully_shard(getattr(model, part), mesh=mesh)
    return fully_shard(model, mesh=mesh), fsdp.compress(model, **given)


# ---- several optimizers over one wrapper


class Gan(nn.Module):
    """A generator, and a discriminator that judges generated or real data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, *, generates: bool) -> torch.Tensor:
        judged: torch.Tensor = self.discriminator(self.generator(x) if generates else x)
        return judged


def train_gan(rank: int, kind: str, *, discards: bool, zeros: bool = False) -> Weights:
    """Trains with two optimizers; the generator's pass leaves gradients in the discriminator, where it `discards`.

    FSDP2 cannot freeze what it reduces: there the residuals are put back by hand, in place of the hook.
    """
    gan = Gan()
    model, state = hooked(kind, gan, ("generator", "discriminator"))
    make, judge = (torch.optim.SGD(part.parameters(), lr=0.05) for part in (gan.generator, gan.discriminator))
    by_hand, before = kind == "fsdp" and not discards, Snapshot(state.core.residuals.contexts)
    if by_hand:
        state._guard.close()
    for step in range(6):
        judge.zero_grad(set_to_none=not zeros)
        torch.autograd.backward(nn.functional.softplus(-model(1 + noise(rank, step, 16, 8), generates=False)).mean())
        judge.step()
        make.zero_grad(set_to_none=not zeros)
        if by_hand:
            before.take()
        gan.discriminator.requires_grad_(discards or by_hand)
        torch.autograd.backward(nn.functional.softplus(-model(noise(rank, 100 + step, 16, 4), generates=True)).mean())
        gan.discriminator.requires_grad_(True)
        if by_hand:
            before.restore([name for name in state.core.residuals.tensors if name.startswith("discriminator")])
        make.step()
    state.close()
    return whole(gan)


def run_gan(rank: int, kind: str) -> tuple[Weights, bool, bool]:
    """Whether a discarded gradient leaves nothing behind, set to None or to zeros."""
    wanted = train_gan(rank, kind, discards=False)
    found, zeroed = (train_gan(rank, kind, discards=True, zeros=zeros) for zeros in (False, True))
    return found, same(found, wanted), same(zeroed, wanted)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the gradient that counts is computed anew, within the step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        held = [each for group in self.param_groups for each in group["params"]]
        ahead = [0.05 * each.grad.sign() for each in held]
        for each, more in zip(held, ahead, strict=True):
            each.add_(more)
            each.grad = None
        torch.enable_grad()(closure)()
        for each, more in zip(held, ahead, strict=True):
            each.sub_(more)
        self.base.step()


def train_sharply(rank: int, kind: str, *, by_hand: bool) -> Weights:
    """Trains; residuals of the first gradient of each step are put back by the hook, or by hand."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    model, state = hooked(kind, net)
    optimizer, before = Sharpness(net), Snapshot(state.core.residuals.contexts)
    if by_hand:
        state._guard.close()
    for step in range(6):
        x = noise(rank, step, 16, 8)

        def again(step: int = step, x: torch.Tensor = x) -> None:
            if by_hand and step:  # the hook makes its first copy in the first step, too late for it
                before.restore()
            torch.autograd.backward(nn.functional.mse_loss(model(x), x.flip(1)))

        optimizer.zero_grad()
        before.take()
        torch.autograd.backward(nn.functional.mse_loss(model(x), x.flip(1)))
        optimizer.step(again)
    state.close()
    return whole(net)


def run_sharply(rank: int, kind: str) -> tuple[Weights, bool]:
    found = train_sharply(rank, kind, by_hand=False)
    return found, same(found, train_sharply(rank, kind, by_hand=True))
