"""One table at a worker: what is sent, what is held, what is put back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from tests.pieces import as_frame
from thinwire.codecs import Codec, codec, decode
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.frames import parse
from thinwire.hooks.slot import NO_GRADIENT, Slot
from thinwire.packets import BatchedTensor
from thinwire.policies.criteria import Pending, criterion
from thinwire.runtime.session import Session
from thinwire.schema import Plan, TableSpec
from thinwire.telemetry import Counters
from thinwire.worker.core import Update, WorkerCore

SHAPE = (4, 10)
PLAIN = codec("fp32")


@dataclass
class Answers:
    """A session that has heard these updates already."""

    core: WorkerCore
    updates: list[Update] = field(default_factory=list)

    def take(self, table: int, *, fully: bool = False) -> list[Update]:
        taken, self.updates = self.updates, []
        return taken


def make(made: Codec | None = None, *, undoable: bool = False) -> tuple[Slot, Answers]:
    plan = Plan(
        workers=2,
        tables=(TableSpec(name="w", shape=SHAPE),),
        codecs=(PLAIN.config(),),
        optimizer="SGD",
        groups=({},),
    )
    session = Answers(WorkerCore(0, plan))
    values = np.zeros(SHAPE, np.float32)
    slot = Slot(
        cast(Session, session), 0, values, slice(0, values.size), made or PLAIN, Counters(), seed=5, undoable=undoable
    )
    return slot, session


def grad(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_the_gradients_decide_about_the_bits_of_whole_weights() -> None:
    """G of `entropy[mode=rms]` is the root mean square over the local steps since the last push (Øland & Raj §3.2)."""
    slot, _ = make(codec("entropy", mode="rms"))
    slot.home.copy_(grad(0))
    for scales, rms in (((3.0, 4.0), 12.5**0.5), ((100.0,), 100.0), ((), 0.0)):
        for scale in scales:
            slot.note_gradient(scale * torch.ones(SHAPE))
        frame = slot.encode_weights()
        assert isinstance(frame, bytes) and parse(frame).payload[0] == np.ceil(np.log2(rms + 1) + 6)


def residual_of(slot: Slot) -> torch.Tensor:
    assert slot.context is not None and slot.context.residual is not None
    return slot.context.residual.clone()


def test_what_was_held_goes_with_the_next_push() -> None:
    slot, _ = make()
    slot.hold(grad(1))
    slot.hold(grad(2))
    torch.testing.assert_close(decode(as_frame(slot.encode(grad(3), None), SHAPE)), grad(1) + grad(2) + grad(3))
    torch.testing.assert_close(decode(as_frame(slot.encode(grad(4), None), SHAPE)), grad(4))
    slot.hold(grad(5))
    torch.testing.assert_close(decode(as_frame(slot.encode(None, None), SHAPE)), grad(5))
    assert slot.encode(None, None) == NO_GRADIENT


def test_a_held_gradient_is_a_copy() -> None:
    slot, _ = make()
    mine = grad(1)
    slot.hold(mine)
    mine.zero_()
    torch.testing.assert_close(decode(as_frame(slot.encode(None, None), SHAPE)), grad(1))


def test_a_criterion_holds_until_it_is_met_and_nothing_is_lost() -> None:
    slot, _ = make()
    every = criterion("period", 3)
    frames = [slot.encode(grad(step), every) for step in range(7)]
    assert [bool(frame) for frame in frames] == [False, False, True, False, False, True, False]
    torch.testing.assert_close(decode(as_frame(frames[2], SHAPE)), grad(0) + grad(1) + grad(2))
    torch.testing.assert_close(decode(as_frame(frames[5], SHAPE)), grad(3) + grad(4) + grad(5))
    torch.testing.assert_close(decode(as_frame(slot.encode(None, None), SHAPE)), grad(6))


def test_a_criterion_is_told_all_that_it_may_ask() -> None:
    asked: list[Pending] = []

    class Never:
        def send(self, pending: Pending) -> bool:
            asked.append(pending)
            return False

    slot, _ = make()
    slot.values[:] = 2
    for step in range(3):
        slot.encode(grad(step), Never())
    last = asked[-1]
    np.testing.assert_allclose(last.gradient, sum(grad(step) for step in range(3)), rtol=1e-5, atol=1e-6)
    assert last.iterations == 3 and last.weights is slot.values and last.seconds >= 0
    assert last.squares == pytest.approx(sum(float(grad(step).square().sum()) for step in range(3)), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_changes_nothing(bad: float) -> None:
    slot, _ = make(codec("3lc"))
    slot.encode(grad(0), None)
    slot.hold(grad(1))
    before = slot.state_dict()
    broken = grad(2)
    broken[1, 2] = bad
    with pytest.raises(NonFiniteError, match="w: "):
        slot.hold(broken)
    with pytest.raises(NonFiniteError, match="w: "):
        slot.encode(broken, None)
    with pytest.raises(NonFiniteError, match="w: "):
        slot.encode(broken, criterion("norm", 0.1))
    after = slot.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert (
            torch.equal(value, cast(torch.Tensor, after[key]))
            if isinstance(value, torch.Tensor)
            else value == after[key]
        )


def test_a_late_push_leaves_the_residual_bit_for_bit_what_it_was() -> None:
    slot, session = make(codec("3lc", sparsity=1.5), undoable=True)
    slot.encode(grad(0), None)
    before = residual_of(slot)
    slot.encode(grad(1), None)
    assert not torch.equal(before, residual_of(slot))
    session.updates = [Update(1, PLAIN.encode(np.ones(SHAPE, np.float32)), False, missed=True)]
    assert slot.pull(None)
    assert torch.equal(before, residual_of(slot))
    assert slot.values.min() == slot.values.max() == 1, "the update itself is applied"


def test_a_push_in_time_keeps_its_residual() -> None:
    slot, session = make(codec("3lc", sparsity=1.5), undoable=True)
    slot.encode(grad(0), None)
    after = residual_of(slot)
    session.updates = [Update(1, PLAIN.encode(np.ones(SHAPE, np.float32)), False, missed=False)]
    slot.pull(None)
    assert torch.equal(after, residual_of(slot))


def test_updates_are_added_taken_over_or_stepped_by() -> None:
    slot, session = make()
    stepped: list[tuple[torch.Tensor, tuple[float, ...]]] = []
    ones = np.ones(SHAPE, np.float32)
    session.updates = [
        Update(0, PLAIN.encode(5 * ones), True),
        Update(1, PLAIN.encode(ones), False),
        Update(2, b"", False),
    ]
    assert slot.pull(None)
    assert np.all(slot.values == 6)
    session.updates = [Update(3, PLAIN.encode(ones), False, rates=(0.5,))]
    slot.pull(lambda _, gradient, update: stepped.append((gradient, update.rates)))
    assert np.all(slot.values == 6) and bool((stepped[0][0] == 1).all()) and stepped[0][1] == (0.5,)
    session.updates = [Update(4, PLAIN.encode(9 * ones), True)]
    slot.pull(lambda _, gradient, update: stepped.append((gradient, update.rates)))
    assert np.all(slot.values == 9) and len(stepped) == 1, "whole values are nobody's gradient"
    assert not slot.pull(None)


@pytest.mark.parametrize("name", ["3lc", "stoch3", "fp32"])
def test_a_resumed_slot_sends_the_same_bytes(name: str) -> None:
    slot, _ = make(codec(name))
    for step in range(3):
        slot.encode(grad(step), None)
    slot.hold(grad(3))
    state = slot.state_dict()
    other, _ = make(codec(name))
    other.load_state_dict(state)
    slot.hold(grad(4))
    other.hold(grad(4))
    variance = criterion("variance", 0.1)
    sent, again = (as_frame(each.encode(grad(5), variance), SHAPE) for each in (slot, other))
    assert sent == again != b""
    assert slot.encode(grad(6), None) == other.encode(grad(6), None)


def test_a_state_is_a_copy_and_loading_forgets_what_was_held() -> None:
    slot, _ = make()
    empty = slot.state_dict()
    slot.hold(grad(0))
    state = slot.state_dict()
    slot.hold(grad(1))
    assert torch.equal(cast(torch.Tensor, state["held"]), grad(0))
    slot.load_state_dict(empty)
    assert slot.encode(None, None) == NO_GRADIENT


# ---- tensors of a batch


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_does_not_get_into_a_batch(bad: float) -> None:
    slot, _ = make()
    slot.hold(grad(1))
    poisoned = grad(2)
    poisoned[1, 2] = bad
    with pytest.raises(NonFiniteError, match="w: holds NaN or Inf"):
        slot.encode(poisoned, None)
    assert decode(as_frame(slot.encode(None, None), SHAPE)).equal(grad(1)), "what was held is still there"


def test_a_member_is_added_or_taken_over() -> None:
    slot, session = make()
    piece = BatchedTensor.of(grad(1).numpy().reshape(-1), "w")
    session.updates = [Update(1, piece, True), Update(2, piece, False)]
    assert slot.pull(None)
    torch.testing.assert_close(torch.from_numpy(slot.values), 2 * grad(1))


def test_a_member_of_another_size_changes_nothing() -> None:
    slot, session = make()
    session.updates = [Update(1, BatchedTensor.of(np.ones(39, np.float32), "w"), False)]
    with pytest.raises(ProtocolError, match=r"w: 39 values came in a batch, the table is \(4, 10\)"):
        slot.pull(None)
    assert not slot.values.any()
