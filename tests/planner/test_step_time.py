"""The step model against what can be worked out by hand: the scarce resource says how long a step is."""

from dataclasses import replace
from typing import Any

import pytest

from thinwire.planner.step_time import Cluster, Layer, step_s
from thinwire.planner.transport_costs import SHARED_USE

LAYERS = [Layer(forward_s=0.001, backward_s=0.002, push_nbytes=1000.0, pull_nbytes=500.0) for _ in range(4)]
FREE = Cluster(workers=8)


def test_step_time_is_that_of_the_scarce_resource() -> None:
    slow = replace(FREE, bytes_per_s=1e4)
    computing = 4 * 0.003
    cases = {
        "nothing": (FREE, computing),
        "two cores for eight workers": (replace(FREE, cores=2), 4 * computing / SHARED_USE),
        # A server of eight workers takes in eight times what one sends; what goes out meanwhile crosses the other way.
        "the server's link": (slow, 8 * 4 * 1000 / 1e4),
        "the one worker's link": (replace(slow, workers=1), 4 * 1000 / 1e4),
        "two servers' links": (replace(slow, shards=2), 8 * 2 * 1000 / 1e4),
    }
    for scarce, (cluster, seconds) in cases.items():
        layers = [replace(layer, shard=index % cluster.shards) for index, layer in enumerate(LAYERS)]
        # The ends of a pipeline add a little: the first layer's forward pass waits for its own update.
        assert (
            seconds <= step_s(layers, cluster) <= seconds * 1.2 + computing + 8 * 500 / 1e4 * (scarce != "nothing")
        ), scarce


def test_step_time_grows_with_work_of_any_kind() -> None:
    at = replace(FREE, bytes_per_s=1e5, latency_s=1e-4)
    before = step_s(LAYERS, at)
    more: dict[str, Any]
    for kind in ("forward_s", "backward_s", "encode_s", "decode_s", "server_push_s", "server_update_s"):
        more = {kind: 0.05}
        assert step_s([replace(layer, **more) for layer in LAYERS], at) > before, kind
    for kind in ("push_nbytes", "pull_nbytes"):
        more = {kind: 1e5}
        assert step_s([replace(layer, **more) for layer in LAYERS], at) > before, kind
    assert step_s(LAYERS, replace(at, overlap=False)) >= before


def test_step_time_among_ranks_is_of_all_but_the_own_share_both_ways() -> None:
    for workers in (1, 2, 8, 1024):
        at = replace(FREE, workers=workers, bytes_per_s=1e4, collective=True)
        crossing = (1 - 1 / workers) * 4 * (1000 + 500) / 1e4
        assert crossing <= step_s(LAYERS, at) <= crossing + 4.001 * 0.003, workers
    adding = [replace(layer, server_push_s=0.1) for layer in LAYERS]
    assert step_s(adding, replace(FREE, workers=2, collective=True)) == pytest.approx(4 * 0.1 / 2, rel=0.1)
    uneven = replace(FREE, bytes_per_s=1e4, collective=True, largest_share=0.5)
    assert step_s(LAYERS, uneven) == pytest.approx(7 * 0.5 * 4 * (1000 + 500) / 1e4, rel=0.05)


def test_step_time_on_shared_cores_includes_servers_and_messages() -> None:
    adding = [replace(layer, server_push_s=0.0005) for layer in LAYERS]
    busy = 8 * 4 * (0.003 + 0.0005) / 2
    assert busy / SHARED_USE <= step_s(adding, replace(FREE, cores=2)) <= 1.2 * busy / SHARED_USE
    costly = replace(FREE, cores=2, worker_message_s=0.001, message_s=0.0005)
    messages = 8 * 4 * 2 * (0.001 + 0.0005) / 2  # one each way for every layer of every worker, at both ends
    assert step_s(adding, costly) == pytest.approx((busy + messages) / SHARED_USE, rel=0.1)
