"""What a worker does with parameters and momenta at an exchange: equal to torch's operations bit for bit."""

from __future__ import annotations

import pytest
import torch

from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.local_steps import keep_unsent_many, lead

SIZES = [1, 7, 64, 1000, 65_537]


def arrays(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(size, generator=generator) for size in SIZES]


def addresses(tensors: list[torch.Tensor]) -> Addresses:
    return torch.tensor([each.data_ptr() for each in tensors]).numpy()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_local_parameters_keep_what_was_not_sent(share: float) -> None:
    shared, unsent, local, offsets = arrays(0), arrays(1, 0.01), arrays(2), arrays(3)
    places = addresses(unsent)
    places[1] = 0  # keeps no residual
    keep_unsent_many(
        addresses(shared), places, share, addresses(local), addresses(offsets), torch.tensor(SIZES).numpy()
    )
    unsent[1].zero_()
    for ours, residual, mine, offset in zip(shared, unsent, local, offsets, strict=True):
        assert torch.equal(mine, ours - share * residual)
        assert torch.equal(offset, ours - mine)


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_a_moment_that_leads_where_all_went(eps: float) -> None:
    for before, shared, squares in zip(arrays(0), arrays(1), arrays(2, 1e-3), strict=True):
        roots = squares.abs().sqrt()
        expected = (roots * 2.32185641).add_(eps).mul_(before - shared).mul_(21.49375)
        lead(before.numpy(), shared.numpy(), roots.numpy(), 2.32185641, eps, 21.49375)
        assert torch.equal(before, expected)
