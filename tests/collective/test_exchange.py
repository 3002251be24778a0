"""One exchange with all ranks played in turn, by the equations; buckets that travel together; codecs that change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.collective.ranks import SIZES, Pass, bucket_of, collectives, gradients, play, step, tensors
from thinwire.collective.core import Bucket, Collective
from thinwire.collective.cut import Cut
from thinwire.collective.exchange import MAX_REASON, Exchange, Send, abort_packet
from thinwire.collective.residuals import Residuals
from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.packets import pack, parse
from thinwire.policies.assignment import Partition
from thinwire.policies.auto.levels import Limits, residual_codec
from thinwire.policies.compression import PLAIN, Choice
from thinwire.schema import Refused, Shard, Skip

CODEC = tw.codec("3lc", sparsity=1.5)


def compress(vector: Any) -> Any:
    return tw.decode(CODEC.encode(vector)).numpy()


Pushes = dict[tuple[Any, ...], Any]


def total_at_owner(given: list[Any], span: slice, pushes: Pushes, name: str, part: Partition) -> Any:
    """The owner's sum after the push pass, by the equations; the residuals of the pushes change."""
    total = given[part.server][span].copy()
    for rank, gradient in enumerate(given):
        if rank != part.server:
            v = gradient[span] + pushes[rank, name, part]
            c = compress(v)
            pushes[rank, name, part] = v - c
            total += c
    return total * np.float32(1 / len(given))


def test_both_passes_follow_the_equations_for_any_order_of_packets() -> None:
    for world in (2, 3):
        cores, bucket = collectives(tensors(CODEC), world), bucket_of()
        residuals = cores[0].residuals
        pushes: Pushes = {
            (rank, *key): np.zeros(key[1].numel, np.float32) for rank in range(world) for key in residuals.contexts
        }
        for number in range(4):
            given = gradients(world, number)
            values = step(cores, bucket, given, number, seed=number)
            assert all(np.array_equal(one, values[0]) for one in values), "all ranks hold the same bits"
            for name, at in bucket.offsets:
                for part in residuals.partitions[name]:
                    span = slice(at + part.start, at + part.stop)
                    if name == "bias":
                        total = given[part.server][span].copy()
                        for rank in range(world):
                            total += 0 if rank == part.server else given[rank][span]
                        assert np.array_equal(values[0][span], total * np.float32(1 / world))
                        continue
                    v = total_at_owner(given, span, pushes, name, part) + pushes[part.server, name, part]
                    c = compress(v)
                    pushes[part.server, name, part] = v - c
                    assert np.array_equal(values[0][span], c), (world, number, name, part)


def test_push_pass_alone_gives_every_owner_the_average_of_its_piece() -> None:
    """As in a reduce-scatter a rank owns one piece; pieces follow in rank order, padded to one length."""
    world, cuts = 3, {"w": Cut((31, 7), 0), "few": Cut((2, 90), 0)}
    trained = [
        TrainedTensor(name, math.prod(cut.shape), torch.float32, Choice(CODEC, PLAIN)) for name, cut in cuts.items()
    ]
    parts = {name: cut.partitions(world) for name, cut in cuts.items()}
    offsets = {"w": 0, "few": cuts["w"].numel(world, 0)}
    stride = offsets["few"] + cuts["few"].numel(world, 0)
    bucket = Bucket(tuple(offsets.items()), 4 * stride * world, stride)
    cores = [
        Collective(
            Residuals(trained, rank, world, mean=True, seed=0, partitions=parts),
            skip=False,
            drop_zeros=False,
            group_nbytes=0,
            pulls=False,
        )
        for rank in range(world)
    ]
    pushes: Pushes = {
        (rank, name, part): np.zeros(part.numel, np.float32)
        for rank in range(world)
        for name in cuts
        for part in parts[name]
    }
    for number in range(3):
        draw = np.random.default_rng(number)
        given = [draw.standard_normal(stride * world).astype(np.float32) for _ in range(world)]
        values = step(cores, bucket, given, number, seed=number)
        for name, owned in parts.items():
            for part in owned:
                begin = bucket.begin(offsets[name], part)
                span = slice(begin, begin + part.numel)
                total = total_at_owner(given, span, pushes, name, part)
                assert np.array_equal(values[part.server][span], total), (number, name, part)


def test_slice_without_gradient_keeps_its_residual_with_drop_zeros() -> None:
    world, bucket = 2, bucket_of()
    cores = collectives(tensors(CODEC), world, drop_zeros=True)
    step(cores, bucket, gradients(world, 0))
    before = [core.residuals.state_dict()["residuals"]["w"] for core in cores]
    unused = gradients(world, 1)
    for gradient in unused:
        gradient[: SIZES["w"]] = 0
    values = step(cores, bucket, unused, 1)
    assert not values[0][: SIZES["w"]].any()
    for core, old in zip(cores, before, strict=True):
        assert core.residuals.state_dict()["residuals"]["w"].equal(old)
    unused[1][: SIZES["w"]] = gradients(world, 2)[1][: SIZES["w"]]
    assert step(cores, bucket, unused, 2)[0][: SIZES["w"]].any(), "one rank's gradient is enough"


def test_nan_on_any_rank_raises_or_skips_and_keeps_residuals() -> None:
    bucket = bucket_of()
    for bad in (np.nan, np.inf):
        for at in (0, 29_999, 30_003, 30_500):
            given = gradients(2, 0)
            given[0][at] = bad
            [strict, _] = collectives(tensors(CODEC), 2)
            with pytest.raises(NonFiniteError, match=r"NaN or Inf"):
                strict.bucket_ready(bucket, 0, 0, last=True)[0][0].push([given[0]])
            cores = collectives(tensors(CODEC), 2, skip=True)
            step(cores, bucket, gradients(2, 1))
            before = [core.residuals.state_dict() for core in cores]
            step(cores, bucket, given, 1, seed=at)
            assert [core.steps_skipped for core in cores] == [1, 1], at
            for core, state in zip(cores, before, strict=True):
                after = core.residuals.state_dict()
                assert all(after[kind][name].equal(state[kind][name]) for kind in state for name in state[kind]), at
            assert np.isfinite(step(cores, bucket, gradients(2, 2), 2)[0]).all()


def test_sum_that_overflows_skips_the_step() -> None:
    given = gradients(3, 0)
    for gradient in given:
        gradient[3] = 3e38  # of which each is finite
    cores = collectives(tensors(tw.codec("bf16")), 3, skip=True)
    step(cores, bucket_of(), given)
    assert [core.steps_skipped for core in cores] == [1, 1, 1]


@pytest.mark.parametrize("clip", [False, True])
def test_means_over_senders_count_the_owner_as_a_sender(clip: bool) -> None:
    sizes = {"w": 12, "bias": 7}
    cores = collectives(tensors(tw.codec("topk", k=3), sizes, down=PLAIN), 3, of_senders=True, clip=clip)
    contexts = [tw.codec("topk", k=3).context(np.zeros(12, np.float32)) for _ in cores]
    for number in range(6):
        given = gradients(3, number, sizes)
        if number == 3:  # another process goes on
            states = [core.residuals.state_dict() for core in cores]
            cores = collectives(tensors(tw.codec("topk", k=3), sizes, down=PLAIN), 3, of_senders=True, clip=clip)
            for core, state in zip(cores, states, strict=True):
                core.residuals.load_state_dict(state)
        found = step(cores, bucket_of(sizes), given, number, seed=number)
        sent = np.stack([tw.decode(c.encode(each[:12])).numpy() for c, each in zip(contexts, given, strict=True)])
        norms = np.linalg.norm(sent.astype(np.float64), axis=1)
        scaled = sent * np.minimum(1, np.median(norms) / norms)[:, None] if clip else sent
        for each in found:
            np.testing.assert_array_equal(each, found[0])
            np.testing.assert_allclose(
                each[:12], scaled.sum(0) / np.maximum(1, (sent != 0).sum(0)), rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(each[12:], np.mean([other[12:] for other in given], 0), rtol=1e-6)
    for core, context in zip(cores, contexts, strict=True):
        [kept] = core.residuals.pushes("w").values()
        assert kept.residual is not None and context.residual is not None
        np.testing.assert_array_equal(kept.residual.numpy(), context.residual.numpy())


def begun(world: int = 2) -> tuple[Exchange, list[Send]]:
    """Rank 0's exchange of step 7 and what rank 1 pushed to it."""
    cores = collectives(tensors(CODEC), world)
    exchanges = [core.bucket_ready(bucket_of(), 7, 0, last=True)[0][0] for core in cores]
    sends = [exchange.push([values]) for exchange, values in zip(exchanges, gradients(world, 0), strict=True)]
    return exchanges[0], [send for send in sends[1] if send.peer == 0]


def test_packets_that_are_not_due_are_refused_with_the_rank() -> None:
    exchange, [send] = begun()
    frames = exchange.own.num_frames
    for packet, error, text in (
        (pack(Shard(step=8, bucket=0), [b""] * frames), ProtocolError, "rank 1 is at step 8, bucket 0"),
        (pack(Shard(step=7, bucket=1), [b""] * frames), ProtocolError, "rank 1 is at step 7, bucket 1"),
        (pack(Shard(step=7, bucket=0), [b""]), ProtocolError, "rank 1 sent 1 frames for bucket 0"),
        (pack(Shard(step=7, bucket=0), [b"x"] * frames), ProtocolError, "rank 1 sent a frame"),
        (pack(Skip(step=6, bucket=0)), ProtocolError, "rank 1 is at step 6"),
        (pack(Refused(reason="no")), ProtocolError, "rank 1 sent Refused"),
        (b"no packet of ours, but as long as one", ProtocolError, "rank 1: a packet begins with"),
        (bytes(send.packet[:-1]), ProtocolError, "rank 1: .* is declared"),
        (bytes(abort_packet(ConfigError("no such codec"))), ProtocolError, "rank 1 gave up: no such codec"),
        (bytes(abort_packet(NonFiniteError("NaN in w"))), NonFiniteError, "rank 1 gave up: NaN in w"),
    ):
        with pytest.raises(error, match=text):
            begun()[0].receive(1, Pass.PUSH, memoryview(packet))
    wrong = tw.codec("3lc").encode(np.zeros(3, np.float32))
    plain = parse(memoryview(send.packet))[1][-1]
    packet = pack(Shard(step=7, bucket=0), [*[wrong] * (frames - 1), plain])
    with pytest.raises(
        ProtocolError, match=r"w\[0:15000\]: a frame of shape \(3,\) and dtype fp32 came; .* shape \(15000,\)"
    ):
        exchange.receive(1, Pass.PUSH, memoryview(packet))
    assert len(abort_packet(ConfigError("x" * 5000))) < exchange.group.max_packet_nbytes(0)
    assert len(abort_packet(ConfigError("é" * 5000))) < MAX_REASON * 4


BY_BUCKET = {"a": 500, "bias": 7, "b": 400, "c": 300}
BUCKETS = {name: Bucket(((name, 0),), 4 * size) for name, size in BY_BUCKET.items()}


def travel(core: Collective, names: str = "a bias b c") -> list[list[int]]:
    """The first bucket and the number of buckets of each exchange of a step."""
    shown = names.split()
    ready = []
    for index, name in enumerate(shown):
        ready += core.bucket_ready(BUCKETS[name], 0, index, last=index + 1 == len(shown))
    assert [exchange.last for exchange, _ in ready] == [False] * (len(ready) - 1) + [True]
    return [[exchange.bucket, count] for exchange, count in ready]


def test_small_buckets_share_an_exchange_up_to_the_group_size() -> None:
    for nbytes, expected in (
        (0, [[0, 1], [1, 1], [2, 1], [3, 1]]),
        (2001, [[0, 2], [2, 2]]),
        (2100, [[0, 3], [3, 1]]),
        (10**6, [[0, 4]]),
    ):
        [core, _] = collectives(tensors(tw.codec("3lc"), BY_BUCKET), 2, group_nbytes=nbytes)
        assert travel(core) == expected, nbytes
        assert not core.bucket_ready(BUCKETS["bias"], 1, 0, last=False) or not nbytes
        assert travel(core) == expected, "a step that was broken off is forgotten"


def test_skip_of_a_broken_step_does_not_reach_the_next_step() -> None:
    """Residuals of a step that went well must not be restored."""
    cores = collectives(tensors(tw.codec("3lc"), BY_BUCKET), 2, skip=True, group_nbytes=0)
    bucket = Bucket((("a", 0),), 4 * BY_BUCKET["a"])
    broken = [torch.ones(BY_BUCKET["a"]) for _ in cores]
    broken[1][3] = torch.nan
    exchanges = [core.bucket_ready(bucket, 0, 0, last=False)[0][0] for core in cores]
    for core, exchange in zip(cores, exchanges, strict=True):
        core.started(exchange)
    play(exchanges, broken)
    for core, exchange in zip(cores, exchanges, strict=True):
        core.finished(exchange)
    step(cores, bucket, [torch.linspace(-1, 1, BY_BUCKET["a"]) for _ in cores], number=1)
    for core in cores:
        assert core.steps_skipped == 0
        assert any(bool(each.residual.any()) for each in core.residuals.contexts.values() if each.residual is not None)


LEVELS = {level.name: level for level in Limits().levels()}
BASE = residual_codec(Limits().levels())
WORLD = 3


def all_reduced(cores: list[Collective], given: list[Any]) -> list[Any]:
    """The average by an all-reduce of gradients with residuals added."""
    flushed = [gradient.copy() for gradient in given]
    for core, values in zip(cores, flushed, strict=True):
        core.flush(bucket_of(), values, core.residuals.names())
    total = np.sum(flushed, axis=0, dtype=np.float64)
    average = total / WORLD if cores[0].residuals.mean else total
    return [average.astype(np.float32)] * WORLD


def waiting(core: Collective) -> float:
    return max(float(context.residual.abs().max()) for context in core.residuals.contexts.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("mean", [True, False])
def test_residuals_are_sent_by_the_next_codec_or_an_all_reduce(mean: bool) -> None:
    cores = collectives(tensors(BASE), WORLD, mean=mean)
    sent, wanted = np.zeros(sum(SIZES.values())), np.zeros(sum(SIZES.values()))
    path = (
        "3lc[s=1]",
        "3lc[s=1.75,entropy=zstd]",
        "int8",
        "uncompressed",
        "bf16",
        "3lc[s=1]",
        "uncompressed",
        "uncompressed",
    )
    for number, name in enumerate(path):
        given, codec = gradients(WORLD, number), LEVELS[name].codec
        if codec is None:
            results = all_reduced(cores, given)
            assert [waiting(core) for core in cores] == [0.0] * WORLD
        else:
            for core in cores:
                core.recode(core.residuals.contexts.values(), codec)
            results = step(cores, bucket_of(), given, number)
            assert min(waiting(core) for core in cores) > 0, name
        assert all(np.array_equal(results[0], other) for other in results), name
        sent = sent + results[0].astype(np.float64)
        wanted = wanted + np.sum(given, axis=0, dtype=np.float64) / (WORLD if mean else 1)
        if codec is None:  # and so nothing is missing, but for float32's rounding
            np.testing.assert_allclose(sent, wanted, atol=3e-5, err_msg=f"after step {number}")


def test_switching_back_to_3lc_gives_the_frames_of_a_rank_that_never_switched() -> None:
    given = gradients(WORLD, 0)
    switched, plain = collectives(tensors(BASE), WORLD), collectives(tensors(BASE), WORLD)
    for name in ("int8", "3lc[s=1]"):
        for core in switched:
            core.recode(core.residuals.contexts.values(), LEVELS[name].codec or BASE)
    for one, other in zip(step(switched, bucket_of(), given), step(plain, bucket_of(), given), strict=True):
        assert np.array_equal(one, other)


def test_lag_bound_follows_limit_sparsity() -> None:
    bound = BASE.context(torch.zeros(300)).lag_bound
    assert bound is not None
    update = np.ones(300, np.float32)
    for asked, most in ((1.0, 1.0), (1.5, 1.5), (1.9, 1.9)):
        bound.limit_sparsity(asked)
        for _ in range(80):
            bound.follow(update, update)
        assert bound.sparsity == pytest.approx(most)
    bound.limit_sparsity(1.25)
    assert bound.sparsity == 1.25
