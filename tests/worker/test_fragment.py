"""Tensors that are exchanged together: the same bits as each by itself, whatever coded them, and merges by hand."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import Codec, codec
from thinwire.codecs.lag import LagBound
from thinwire.packets import BatchedTensor
from thinwire.policies.assignment import Partition
from thinwire.policies.compression import NARROW
from thinwire.schema import TableSpec
from thinwire.telemetry import Counters
from thinwire.worker.apply_buffer import Update
from thinwire.worker.batching import Batching
from thinwire.worker.fragment import Fragment
from thinwire.worker.model import PlannedTensor, WorkerTensor
from thinwire.worker.rows import Lead
from thinwire.worker.table import WorkerTable

CODECS = [codec("3lc"), NARROW, codec("fp32"), codec("int8"), codec("3lc", sparsity=1.5), NARROW]
CODECS += [codec("3lc", nonfinite="skip"), codec("3lc", sparsity=1.75, lag=3)]
SHAPES = [(30, 41), (7,), (5,), (8, 9), (200,), (33,), (6, 5), (4, 4)]


def made(*, half: bool = True) -> list[WorkerTensor]:
    """One of them may be half precision, one is channels last in spirit: transposed."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for number, (up, shape) in enumerate(zip(CODECS, SHAPES, strict=True)):
        given = torch.randn(shape, generator=generator)
        given = given.t() if number == 3 else given.half() if half and number == 4 else given
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


@pytest.mark.parametrize("half", [False, True])  # with one, which has rounded, all changes are written to memory
def test_a_fragment_sends_and_applies_what_its_tensors_would_alone(half: bool) -> None:
    together, alone = made(half=half), made(half=half)
    fragment = Fragment(together, lambda: 0.0)
    # A lag is measured at the fourth exchange and the eighth.
    for step, (keep, keep_unsent) in enumerate([(0, 0), (0, 0), (0, 1), (0.5, 0.25), *[(0, 0)] * 5]):
        train(together, step)
        train(alone, step)
        assert all(fragment.changes.look())
        frames = dict(fragment.changes.encode(Batching(lambda: 0.0)))
        pulled = []
        for tensor, other in zip(together, alone, strict=True):
            [table], [single] = tensor.tables, other.tables
            change = other.values - other.parameter.detach().float().reshape(-1)
            change = change if other.offset is None else change - other.offset
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
        fragment.merge(keep, keep_unsent)
        for tensor, other in zip(together, alone, strict=True):
            assert torch.equal(tensor.values, other.values), tensor.name
            local = other.parameter.detach().float().reshape(-1)
            merged = torch.lerp(other.values, local, keep) if keep else other.values.clone()
            residual = other.tables[0].residual
            if keep_unsent and residual is not None:
                merged -= keep_unsent * residual
            other.parameter.detach().copy_(merged.view(other.parameter.shape))
            assert torch.equal(tensor.parameter, other.parameter), tensor.name
            local = other.parameter.detach().float().reshape(-1)
            exact = not keep and not keep_unsent and other.parameter.dtype == torch.float32
            other.offset = None if exact else other.values - local
            assert (tensor.offset is None) == exact
            assert exact or torch.equal(tensor.offset, other.offset), tensor.name  # type: ignore[arg-type]
        assert all(table.cost.payload_bytes_pull > 0 for tensor in together for table in tensor.tables)
    bound, expected = (lag_bound_of(tensors[-1]) for tensors in (together, alone))
    assert bound.sparsity == 1 + 2 * 0.75 / 8
    assert bound.changing().tolist() == expected.changing().tolist()


def lag_bound_of(tensor: WorkerTensor) -> LagBound:
    [table] = tensor.tables
    assert table.context is not None and table.context.lag_bound is not None
    return table.context.lag_bound


def test_a_tensor_with_nan_or_inf_is_told_from_the_others() -> None:
    for step in (0, 1):  # the norm of what is pushed is taken in the first, for which it is written to memory
        for number, bad in enumerate((float("nan"), float("inf"), -float("inf")) * 3):
            tensors = made()
            fragment = Fragment(tensors, lambda: 0.0)
            for _ in range(step):
                assert all(fragment.changes.look())
                list(fragment.changes.encode(Batching(lambda: 0.0)))
            residuals = [None if (r := t.tables[0].residual) is None else r.clone() for t in tensors]
            with torch.no_grad():
                tensors[number % len(tensors)].parameter[-1] = bad
            expected = [place != number % len(tensors) for place in range(len(tensors))]
            assert fragment.changes.look() == expected, (step, number, bad)
            for tensor, residual in zip(tensors, residuals, strict=True):
                assert residual is None or torch.equal(tensor.tables[0].residual, residual), tensor.name  # type: ignore[arg-type]


def test_residuals_in_plain_and_transposed_tensors_are_equal() -> None:
    """One tensor whose memory is not in the order of its values sends all of a fragment the other way."""
    plain, mixed = (
        [each for number, each in enumerate(made()) if number not in left_out] for left_out in ((3, 4), (4,))
    )
    fragments = [Fragment(tensors, lambda: 0.0) for tensors in (plain, mixed)]
    for step in range(3):
        for tensors, fragment in zip((plain, mixed), fragments, strict=True):
            for tensor in tensors:
                train([tensor], 100 * step + int(tensor.name))
            fragment.changes.look()
            list(fragment.changes.encode(Batching(lambda: 0.0)))
            fragment.merge(0.0, 0.5 if step == 1 else 1.0)
        others = {tensor.name: tensor for tensor in mixed}
        for tensor in plain:
            other = others[tensor.name]
            assert torch.equal(tensor.local, other.local), tensor.name
            assert tensor.offset is None and tensor.unsent
            offset, residual = tensor.held_back(), tensor.tables[0].residual
            assert offset is not None and other.offset is not None
            assert torch.equal(offset, other.offset), tensor.name
            assert residual is None or offset.any() == residual.any()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_updates_that_are_gone_on_from_in_one_pass_are_applied_led_by_and_merged(share: float) -> None:
    """One update is missed, and one damaged in nothing but its options: each goes by its table's own method."""
    once, twice = ([each for number, each in enumerate(made()) if number not in (3, 4)] for _ in range(2))
    fragments = [Fragment(tensors, lambda: 0.0) for tensors in (once, twice)]
    moments = [[(torch.randn(t.values.shape), torch.rand(t.values.shape)) for t in once]] * 2
    moments[1] = [(first.clone(), second) for first, second in moments[0]]
    leads = [None if n == 1 else Lead(*each, 1.25, 1e-8, 30.0, 1e-3) for n, each in enumerate(moments[0])]
    for step in range(3):
        pulled = []
        for tensors, fragment in zip((once, twice), fragments, strict=True):
            train(tensors, step)
            assert all(fragment.changes.look())
            frames = dict(fragment.changes.encode(Batching(lambda: 0.0)))
            if step == 1:
                frames[tensors[0].tables[0]] = codec("int8").encode(torch.ones(tensors[0].tables[0].spec.shape))
            pulled.append([(t, [Update(step + 1, each, step == 2 and t.index == 6)]) for t, each in frames.items()])
        fragments[0].continue_from(pulled[0], step, share, leads, 0.6)
        before = [tensor.values.clone() for tensor in twice]
        fragments[1].apply(pulled[1], step)
        for number, (tensor, was, (first, second)) in enumerate(zip(twice, before, moments[1], strict=True)):
            if number != 1:
                change = was - tensor.values - 1e-3 * tensor.values
                first.lerp_((second.sqrt() * 1.25 + 1e-8) * change * 30.0, 0.6)
        fragments[1].merge(0.0, share)
        for tensor, other, (found, _), (expected, _) in zip(once, twice, *moments, strict=True):
            assert torch.equal(tensor.values, other.values) and torch.equal(tensor.local, other.local), tensor.name
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            [table], [single] = tensor.tables, other.tables
            assert table.residual is None or torch.equal(table.residual, single.residual)
            assert table.cost.payload_bytes_pull == single.cost.payload_bytes_pull > 0
