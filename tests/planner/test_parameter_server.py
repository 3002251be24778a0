"""The step model against what can be worked out by hand: the scarce resource says how long a step is."""

from dataclasses import replace
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.planner.parameter_server import Cluster, Layer, Link, step_s

LAYERS = [
    Layer(name=str(index), forward_s=0.001, backward_s=0.002, push_nbytes=1000.0, pull_nbytes=500.0)
    for index in range(4)
]
FREE = Cluster(workers=8, worker_link=Link(), server_link=Link())


def test_the_scarce_resource_is_the_steps_length() -> None:
    slow = Link(bytes_per_s=1e4)
    computing = 4 * 0.003
    cases = {
        "nothing": (FREE, computing),
        "two cores for eight workers": (replace(FREE, cores=2), 4 * computing),
        # A server of eight workers takes in eight times what one sends; what goes out meanwhile crosses the other way.
        "the server's link": (replace(FREE, server_link=slow), 8 * 4 * 1000 / 1e4),
        "the workers' links": (replace(FREE, worker_link=slow), 4 * 1000 / 1e4),
        "two servers' links": (replace(FREE, server_link=slow, shards=2), 8 * 2 * 1000 / 1e4),
    }
    for scarce, (cluster, seconds) in cases.items():
        layers = [replace(layer, shard=index % cluster.shards) for index, layer in enumerate(LAYERS)]
        # The ends of a pipeline add a little: the first layer's forward pass waits for its own update.
        assert (
            seconds <= step_s(layers, cluster) <= seconds * 1.2 + computing + 8 * 500 / 1e4 * (scarce != "nothing")
        ), scarce


def test_more_work_of_any_kind_never_makes_a_step_shorter() -> None:
    at = replace(FREE, worker_link=Link(bytes_per_s=1e5, latency_s=1e-4), server_link=Link(bytes_per_s=5e5))
    before = step_s(LAYERS, at)
    more: dict[str, Any]
    for kind in ("forward_s", "backward_s", "encode_s", "decode_s", "server_push_s", "server_update_s"):
        more = {kind: 0.05}
        assert step_s([replace(layer, **more) for layer in LAYERS], at) > before, kind
    for kind in ("push_nbytes", "pull_nbytes"):
        more = {kind: 1e5}
        assert step_s([replace(layer, **more) for layer in LAYERS], at) > before, kind
    assert step_s(LAYERS, replace(at, overlap=False)) >= before


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="a layer lies on shard 1, and there are 1"):
        step_s([replace(LAYERS[0], shard=1)], FREE)
    with pytest.raises(ConfigError, match="no layers"):
        step_s([], FREE)
    with pytest.raises(ConfigError, match="a rate is positive"):
        Link(bytes_per_s=0.0)
