"""One table at a worker: what is sent, what accumulates, what is restored; and fragments of tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sent_frames import as_frame
from thinwire.codecs import Codec, codec, decode
from thinwire.codecs.lag import LagBound
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.frames import parse
from thinwire.local.parameters import LocalTensor, SharedParameters, lend
from thinwire.packets import BatchedTensor
from thinwire.policies.assignment import Partition
from thinwire.policies.compression import NARROW
from thinwire.policies.criteria import Criterion
from thinwire.schema import TableSpec
from thinwire.telemetry import Counters
from thinwire.worker.apply_buffer import Update
from thinwire.worker.finite import all_finite
from thinwire.worker.fragment import Fragment
from thinwire.worker.local_updates import local_tensor
from thinwire.worker.model import PlannedTensor, WorkerTensor
from thinwire.worker.table import NO_GRADIENT, WorkerTable

SHAPE = (4, 10)
PLAIN = codec("fp32")


def make(made: Codec | None = None, *, revocable: bool = False, momentum: float = 0.0) -> WorkerTable:
    seconds = iter(range(1000))
    return WorkerTable(
        Partition(0, 0, 40),
        0,
        TableSpec(name="w", shape=SHAPE),
        torch.zeros(SHAPE),
        made or PLAIN,
        Counters(),
        lambda: float(next(seconds)),
        seed=5,
        revocable=revocable,
        measures=True,
        momentum=momentum,
    )


def grad(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def residual_of(table: WorkerTable) -> torch.Tensor:
    assert table.context is not None and table.context.residual is not None
    return table.context.residual.clone()


def sent(table: WorkerTable, gradient: torch.Tensor | None) -> torch.Tensor:
    return decode(as_frame(table.encode(gradient, None), SHAPE))


# ---- up


def test_gradients_decide_about_the_bits_of_values() -> None:
    """G of `entropy[mode=rms]` is the root mean square over the local steps since the last push (Øland & Raj §3.2)."""
    table = make(codec("entropy", mode="rms"))
    table.values.copy_(grad(0))
    for scales, rms in (((3.0, 4.0), 12.5**0.5), ((100.0,), 100.0), ((), 0.0)):
        for scale in scales:
            table.observe(scale * torch.ones(SHAPE))
        resumed = make(codec("entropy", mode="rms"))
        resumed.load_state_dict(table.state_dict())
        resumed.values.copy_(grad(0))
        frame = table.encode_values()
        assert isinstance(frame, bytes) and parse(frame).payload[0] == np.ceil(np.log2(rms + 1) + 6)
        assert resumed.encode_values() == frame


def test_what_accumulated_goes_with_the_next_push() -> None:
    table = make()
    mine = grad(1)
    table.accumulate(mine)
    mine.zero_()  # it was copied
    table.accumulate(grad(2))
    torch.testing.assert_close(sent(table, grad(3)), grad(1) + grad(2) + grad(3))
    torch.testing.assert_close(sent(table, grad(4)), grad(4))
    table.accumulate(grad(5))
    torch.testing.assert_close(sent(table, None), grad(5))
    assert table.encode(None, None) == NO_GRADIENT


def test_a_criterion_accumulates_until_it_is_met_and_nothing_is_lost() -> None:
    table = make()
    every = Criterion("period", 3)
    frames = [table.encode(grad(step), every) for step in range(7)]
    assert [bool(frame) for frame in frames] == [False, False, True, False, False, True, False]
    torch.testing.assert_close(decode(as_frame(frames[2], SHAPE)), grad(0) + grad(1) + grad(2))
    torch.testing.assert_close(decode(as_frame(frames[5], SHAPE)), grad(3) + grad(4) + grad(5))
    torch.testing.assert_close(sent(table, None), grad(6))


def test_nan_changes_nothing() -> None:
    for made in (codec("3lc"), PLAIN):  # PLAIN travels in a batch
        for bad in (float("nan"), float("inf"), -float("inf")):
            table = make(made)
            table.encode(grad(0), None)
            table.accumulate(grad(1))
            before = table.state_dict()
            broken = grad(2)
            broken[1, 2] = bad
            for every in (None, Criterion("norm", 0.1)):
                with pytest.raises(NonFiniteError, match="w: holds NaN or Inf"):
                    table.encode(broken, every)
            after = table.state_dict()
            assert before.keys() == after.keys()
            for key, value in before.items():
                same = torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
                assert same, (made.id, bad, key)


# ---- down


def test_a_late_push_leaves_the_residual_bit_for_bit_what_it_was() -> None:
    for missed in (True, False):
        table = make(codec("3lc", sparsity=1.5), revocable=True)
        table.encode(grad(0), None)
        before = residual_of(table)
        table.encode(grad(1), None)
        after = residual_of(table)
        assert not torch.equal(before, after)
        table.apply([Update(1, PLAIN.encode(np.ones(SHAPE, np.float32)), False, missed=missed)], None, step=0)
        assert torch.equal(residual_of(table), before if missed else after)
        assert bool((table.values == 1).all()), "the update itself is applied"


def test_updates_are_added_taken_over_or_stepped_by() -> None:
    table = make()
    stepped: list[tuple[torch.Tensor, tuple[float, ...]]] = []
    ones = np.ones(SHAPE, np.float32)

    def local_step(_: WorkerTable, gradient: torch.Tensor, update: Update) -> None:
        stepped.append((gradient, update.rates))

    batched = BatchedTensor.of(ones.reshape(-1), "w")
    table.apply([Update(0, PLAIN.encode(5 * ones), True), Update(1, batched, False)], None, step=-1)
    assert bool((table.values == 6).all())
    table.apply([Update(2, b"", False)], None, step=0)
    table.apply([], None, step=1)
    assert table.changed_in == {-1}, "an empty update changes nothing"
    table.apply([Update(3, PLAIN.encode(ones), False, rates=(0.5,))], local_step, step=2)
    assert bool((table.values == 6).all() and (stepped[0][0] == 1).all()) and stepped[0][1] == (0.5,)
    table.apply([Update(4, PLAIN.encode(9 * ones), True), Update(5, batched, True)], local_step, step=3)
    assert bool((table.values == 1).all()) and len(stepped) == 1, "whole values are no gradient"
    assert table.changed_in == {-1, 2, 3}


def test_whole_values_come_with_the_momentum_that_this_end_adds() -> None:
    table, frames = make(momentum=0.5), [PLAIN.encode(grad(seed)) for seed in range(4)]
    with pytest.raises(ProtocolError, match="w: values of version 3 came without their momentum"):
        table.apply([Update(3, frames[0], True)], None, step=0)
    table.apply([Update(3, frames[0], True, ahead=(frames[1], frames[2])), Update(4, frames[3], False)], None, step=0)
    assert table.outer is not None and table.outer.ahead is not None
    assert torch.equal(table.values, grad(0) + grad(3))
    torch.testing.assert_close(table.outer.ahead, 0.5 * (grad(2) + table.values - grad(1)))
    table.apply([Update(0, frames[1], True)], None, step=0)  # a training that begins
    assert torch.equal(table.outer.ahead, torch.zeros(SHAPE))


# ---- state


def test_a_resumed_table_sends_the_same_bytes() -> None:
    for name in ("3lc", "terngrad", "fp32"):
        table, other = make(codec(name)), make(codec(name))
        for step in range(3):
            table.encode(grad(step), None)
        table.accumulate(grad(3))
        other.load_state_dict(table.state_dict())
        variance = Criterion("variance", 0.1)
        for each in (table, other):
            each.accumulate(grad(4))
        first, again = (as_frame(each.encode(grad(5), variance), SHAPE) for each in (table, other))
        assert first == again != b"", name
        assert table.encode(grad(6), None) == other.encode(grad(6), None), name


# ---- gradients that wait


CODECS = [codec("3lc"), NARROW, codec("fp32"), codec("int8"), codec("3lc", sparsity=1.5), NARROW]
CODECS += [codec("3lc", nonfinite="skip"), codec("3lc", sparsity=1.75, lag=3)]
SHAPES = [(30, 41), (7,), (5,), (8, 9), (200,), (33,), (6, 5), (4, 4)]


def made() -> list[WorkerTensor]:
    """One of them is half precision, one is channels last in spirit: transposed."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for number, (up, shape) in enumerate(zip(CODECS, SHAPES, strict=True)):
        given = torch.randn(shape, generator=generator)
        given = given.t() if number == 3 else given.half() if number == 4 else given
        parameter = torch.nn.Parameter(given)
        shape = tuple(parameter.shape)
        partition = Partition(0, 0, parameter.numel())
        tensor = WorkerTensor(PlannedTensor(str(number), parameter, False, up, ((partition, number),), local=True))
        tensor.tables.append(table_of(tensor, partition, number, shape, up))
        tensors.append(tensor)
    return tensors


def table_of(tensor: WorkerTensor, part: Partition, index: int, shape: tuple[int, ...], up: Codec) -> WorkerTable:
    values, spec = tensor.values.view(shape), TableSpec(name=tensor.name, shape=shape)
    return WorkerTable(part, index, spec, values, up, Counters(), lambda: 0.0, seed=0, revocable=False, measures=False)


def train(tensors: list[WorkerTensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor.parameter += 0.01 * torch.randn(tensor.parameter.shape, generator=generator)


def change_of(tensor: WorkerTensor, offset: torch.Tensor | None) -> torch.Tensor:
    change = tensor.values - tensor.parameter.detach().float().reshape(-1)
    return change if offset is None else change - offset


def fragment_of(tensors: list[WorkerTensor]) -> tuple[Fragment, SharedParameters, list[LocalTensor]]:
    local = [local_tensor(tensor, 0) for tensor in tensors]
    tables = [(table, own.change) for own, tensor in zip(local, tensors, strict=True) for table in tensor.tables]
    return Fragment(tables, lambda: 0.0), SharedParameters(local, 1, lend), local


def test_a_fragment_sends_and_applies_what_its_tensors_would_alone() -> None:
    together, alone = made(), made()
    fragment, shared, local_of = fragment_of(together)
    offsets: dict[str, torch.Tensor | None] = {}
    # A lag is measured at the fourth exchange and the eighth.
    for step, (keep, keep_unsent) in enumerate([(0, 0), (0, 0), (0, 1), (0.5, 0.25), *[(0, 0)] * 5]):
        train(together, step)
        train(alone, step)
        assert all(all_finite(own.take_change() for own in local_of))
        frames = dict(fragment.encode())
        pulled = []
        for tensor, other in zip(together, alone, strict=True):
            [table], [single] = tensor.tables, other.tables
            change = change_of(other, offsets.get(other.name))
            frame = single.encode(change.view(single.spec.shape), None)
            found = frames[table]
            same = found == frame if isinstance(frame, BatchedTensor) else bytes(found) == bytes(frame)  # type: ignore[arg-type]
            assert same, tensor.name
            answer = [Update(step + 1, frame, False)]
            pulled.append((table, answer))
            single.apply(answer, None, step)
            assert table.context is not None and single.context is not None
            assert table.context.payload_nbytes == single.context.payload_nbytes > 0
        fragment.apply(pulled, step)
        shared.merge([0], keep, keep_unsent)
        for tensor, own, other in zip(together, local_of, alone, strict=True):
            assert torch.equal(tensor.values, other.values), tensor.name
            local = other.parameter.detach().float().reshape(-1)
            merged = torch.lerp(other.values, local, keep) if keep else other.values.clone()
            residual = other.tables[0].residual
            if keep_unsent and residual is not None:
                merged -= keep_unsent * residual
            other.parameter.detach().copy_(merged.view(other.parameter.shape))
            assert torch.equal(tensor.parameter, other.parameter), tensor.name
            local = other.parameter.detach().float().reshape(-1)
            withheld = bool(keep_unsent) and residual is not None
            exact = not keep and not withheld and other.parameter.dtype == torch.float32
            offsets[other.name] = None if exact else other.values - local
            assert (own.offset is None) == exact
            assert exact or torch.equal(own.offset, offsets[other.name]), tensor.name  # type: ignore[arg-type]
        assert all(table.cost.payload_bytes_pull > 0 for tensor in together for table in tensor.tables)
    bound, expected = (lag_bound_of(tensors[-1]) for tensors in (together, alone))
    assert bound.sparsity == 1 + 2 * 0.75 / 8
    assert bound.changing().tolist() == expected.changing().tolist()


def lag_bound_of(tensor: WorkerTensor) -> LagBound:
    [table] = tensor.tables
    assert table.context is not None and table.context.lag_bound is not None
    return table.context.lag_bound


def test_a_tensor_with_nan_or_inf_is_told_from_the_others() -> None:
    for number, bad in enumerate((float("nan"), float("inf"), -float("inf")) * 3):
        tensors = made()
        _, _, local = fragment_of(tensors)
        with torch.no_grad():
            tensors[0].parameter[:2] = 3e38  # a sum that overflows is no Inf
            tensors[1 + number % 7].parameter[-1] = bad
        found = all_finite(own.take_change() for own in local)
        assert found == [place != 1 + number % 7 for place in range(len(tensors))], (number, bad)
