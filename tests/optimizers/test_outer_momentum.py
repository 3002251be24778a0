"""What each end adds to what was sent is Nesterov's momentum."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import ProtocolError
from thinwire.optimizers.outer_momentum import OuterMomentum


def test_it_is_what_torch_does_where_updates_are_sent_whole() -> None:
    random, rate = torch.Generator().manual_seed(1), 0.7
    for momentum in (0.3, 0.9):
        start = torch.randn(50, generator=random)
        sent, weight, outer = start.clone(), torch.nn.Parameter(start.clone()), OuterMomentum(momentum)
        optimizer = torch.optim.SGD([weight], lr=rate, momentum=momentum, nesterov=True)
        outer.begin(sent)
        for _ in range(40):
            mean = torch.randn(50, generator=random)
            weight.grad = mean
            optimizer.step()
            sent -= rate * mean
            outer.follow(sent)
            assert outer.ahead is not None
            torch.testing.assert_close(sent + outer.ahead, weight.detach(), rtol=1e-5, atol=1e-5)


def test_one_that_comes_late_goes_on_with_the_same_bits() -> None:
    sent, first, late = torch.zeros(9), OuterMomentum(0.9), OuterMomentum(0.9)
    first.begin(sent)
    for step in range(6):
        if step == 3:
            assert first.anchor is not None and first.ahead is not None
            late.load(first.anchor.clone(), first.ahead.clone())
        sent += torch.randn(9, generator=torch.Generator().manual_seed(step))
        for end in (first, late)[: 1 + (step >= 3)]:
            end.follow(sent)
    assert first.ahead is not None and late.ahead is not None and torch.equal(first.ahead, late.ahead)


def test_what_is_not_finite_is_refused_and_changes_nothing() -> None:
    outer = OuterMomentum(0.9)
    outer.begin(torch.zeros(2))
    with pytest.raises(ProtocolError, match="a momentum that is not finite"):
        outer.load(torch.zeros(2), torch.tensor([0.0, torch.inf]))
    assert outer.ahead is not None and torch.equal(outer.ahead, torch.zeros(2))
