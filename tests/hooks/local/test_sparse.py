"""SparseLoCo and DeMo through the whole stack: against their steps in plain torch, and equal replicas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from thinwire.hooks.distribute import DistributedOptimizer

torch.set_num_threads(1)
WORKERS = 3
LR = 2.0**-6
Tensors = list[torch.Tensor]
Trained = tuple[Tensors, Tensors]
"""Parameters, and the residual of each matrix."""


def mlp(_rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16, bias=False))


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :16].argmax(1)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def given_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """A step with gradients that do not depend on the parameters: two trainings do not drift apart by a rounding."""
    dice = torch.Generator().manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    loss = 0 * model(torch.zeros(1, 64)).sum()
    for parameter in model.parameters():
        loss = loss + (parameter * torch.randn(parameter.shape, generator=dice)).sum()
    loss.backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def train(
    steps: int, inner_step: Callable[[nn.Module, torch.optim.Optimizer, int, int], None] = inner_step
) -> Callable[[int, nn.Module, DistributedOptimizer], Trained]:
    def run(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Trained:
        for step in range(steps):
            inner_step(model, opt, rank, step)
        opt.flush()
        contexts = [t.tables[0].context for t in opt._worker.model.tensors]
        left = [context.residual.clone() for context in contexts if context and context.residual is not None]
        return [each.detach().clone() for each in model.parameters()], left

    return run


def tiles(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix as its tiles of up to 64 × 64, each flat."""
    rows, columns = matrix.shape
    high, wide = min(rows, 64), min(columns, 64)
    return matrix.reshape(rows // high, high, columns // wide, wide).transpose(1, 2).reshape(-1, high * wide)


def whole(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The matrix of such tiles."""
    rows, columns = shape
    high, wide = min(rows, 64), min(columns, 64)
    return flat.reshape(rows // high, columns // wide, high, wide).transpose(1, 2).reshape(shape)


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The decoded values of one tensor."""
    mean, bins = values.mean(), 1 << bits
    width = 6 * values.std() / bins
    code = ((values - mean) / width + bins / 2).round().clamp(0, bins - 1)
    decoded = values.clone()
    for each in range(bins):
        if (code == each).any():
            decoded[code == each] = values[code == each].mean()
    return decoded


def by_hand(steps: int, h: int, k: int, decay: float, outer_lr: float) -> tuple[Tensors, list[Tensors]]:
    """SparseLoCo in one process. Biases, which travel whole, are averaged."""
    shared = mlp(0)
    models = [copy.deepcopy(shared) for _ in range(WORKERS)]
    inner = [adamw(model) for model in models]
    left = [[torch.zeros_like(p) for p in shared.parameters()] for _ in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            inner_step(model, optimizer, rank, step)
        if (step + 1) % h:
            continue
        with torch.no_grad():
            for index, parameter in enumerate(shared.parameters()):
                theta = parameter.detach()
                updates = [theta - list(model.parameters())[index] for model in models]
                if theta.ndim == 1:
                    theta -= outer_lr * torch.stack(updates).mean(0)
                    continue
                messages, marks = [], []
                for rank, update in enumerate(updates):
                    error = decay * left[rank][index] + update
                    cut = tiles(error)
                    chosen = cut.abs().topk(k * cut.shape[1] // 4096, dim=1).indices
                    mark = torch.zeros_like(cut, dtype=torch.bool).scatter_(1, chosen, True)
                    sent = torch.zeros_like(cut)
                    sent[mark] = rounded(cut[mark], bits=2)
                    left[rank][index] = error - whole(sent, theta.shape)
                    messages.append(sent)
                    marks.append(mark)
                norms = torch.stack([message.norm() for message in messages])
                factors = (norms.median() / norms).clamp(max=1)
                total = torch.einsum("r,rtv->tv", factors, torch.stack(messages))
                mean = total / torch.stack(marks).sum(0).clamp(min=1)
                theta -= outer_lr * whole(mean, theta.shape)
            for model in models:
                for mine, theirs in zip(model.parameters(), shared.parameters(), strict=True):
                    mine.copy_(theirs)
    matrices = [index for index, theta in enumerate(shared.parameters()) if theta.ndim > 1]
    return list(shared.parameters()), [[errors[index] for index in matrices] for errors in left]


def test_sparseloco_equals_its_steps_by_hand() -> None:
    design = "sparseloco[h=3,outer_lr=0.4,codec_down=fp32,small=fp32]"
    found, _ = run_cluster(mlp, train(12), workers=WORKERS, optimizer=adamw, design=design)
    wanted, left = by_hand(12, h=3, k=64, decay=0.95, outer_lr=0.4)
    for rank, (parameters, residuals) in enumerate(found):
        for mine, theirs in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=2e-6)
        for mine, theirs in zip(residuals, left[rank], strict=True):  # 1/64 of them were sent at every exchange
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-6)
            assert (mine.abs() < 1e-7).sum() == (theirs.abs() < 1e-7).sum()


def cosines(size: int) -> torch.Tensor:
    """The orthonormal DCT-II."""
    i, r = torch.arange(size).double()[:, None], torch.arange(size).double()
    rows: torch.Tensor = torch.cos(torch.pi * (2 * r + 1) * i / (2 * size)) * math.sqrt(2 / size)
    rows[0] = math.sqrt(1 / size)
    return rows.to(torch.float32)


def demo_by_hand(steps: int, lr: float, k: int, decay: float) -> tuple[Tensors, list[Tensors]]:
    """DeMo in one process. Biases, which travel whole, step by the signs of their mean gradients."""
    shared = mlp(0)
    left = [[torch.zeros_like(p) for p in shared.parameters()] for _ in range(WORKERS)]
    for step in range(steps):
        models = [copy.deepcopy(shared) for _ in range(WORKERS)]
        for rank, model in enumerate(models):
            given_step(model, sgd(model), rank, step)
        for index, parameter in enumerate(shared.parameters()):
            theta = parameter.detach()
            grads = [list(model.parameters())[index].grad for model in models]
            if theta.ndim == 1:
                theta -= lr * torch.stack([grad for grad in grads if grad is not None]).mean(0).sign()
                continue
            total, senders = torch.zeros(()), torch.zeros(())
            for rank, grad in enumerate(grads):
                assert grad is not None
                momentum = decay * left[rank][index] + lr * grad
                rows, columns = (cosines(min(side, 64)) for side in theta.shape)
                cut = tiles(momentum).reshape(-1, len(rows), len(columns))
                coefficients = (rows @ cut @ columns.T).flatten(1)
                chosen = coefficients.abs().topk(k * coefficients.shape[1] // 4096, dim=1).indices
                mark = torch.zeros_like(coefficients, dtype=torch.bool).scatter_(1, chosen, True)
                sent = torch.zeros_like(coefficients)
                sent[mark] = rounded(coefficients[mark], bits=8)
                left[rank][index] = momentum - whole((rows.T @ sent.view_as(cut) @ columns).flatten(1), theta.shape)
                total, senders = total + sent, senders + mark
            mean = (total / senders.clamp(min=1)).view_as(cut)
            theta -= lr * whole((rows.T @ mean @ columns).flatten(1), theta.shape).sign()
    matrices = [index for index, theta in enumerate(shared.parameters()) if theta.ndim > 1]
    return list(shared.parameters()), [[errors[index] for index in matrices] for errors in left]


def test_demo_equals_its_steps_by_hand() -> None:
    found, _ = run_cluster(mlp, train(4, given_step), workers=WORKERS, optimizer=sgd, design="demo[small=fp32]")
    wanted, left = demo_by_hand(4, lr=LR, k=32, decay=0.999)
    for rank, (parameters, residuals) in enumerate(found):
        for mine, theirs in zip(parameters, wanted, strict=True):
            # Where a mean is all but 0, rounding decides its sign.
            assert ((mine - theirs.detach()).abs() > 1e-5).float().mean() < 0.01
        for mine, theirs in zip(residuals, left[rank], strict=True):
            assert (mine - theirs).norm() < 1e-2 * theirs.norm()
