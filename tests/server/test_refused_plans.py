"""A plan that cannot be served, or differs from the other workers', is refused by the name of what is wrong with it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

import thinwire as tw
from tests.server.conversation import Shard, make_plan
from thinwire.codecs import codec
from thinwire.errors import ProtocolError
from thinwire.packets import pack, parse
from thinwire.schema import Join, Plan, TableSpec

STRANGER = 9


def changed(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


def table(*shape: int, name: str = "w", up: int = 0) -> tuple[TableSpec, ...]:
    return (TableSpec(name=name, shape=shape, up=up),)


WEIGHT, BIAS = make_plan().tables
NESTED = '{"a":' * 300 + "1" + "}" * 300
UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"reduce": "clipped-mean-of-senders"}, "3lc, fp32"),
    ({"optimizer": "LBFGS"}, "optimizer 'LBFGS' is not on the server's list"),
    ({"optimizer": "Optimizer"}, "not on the server's list"),
    ({"groups": ({"betas": [0.9, 0.9]},)}, "SGD does not take ['betas']"),
    ({"groups": ({"foreach": True},)}, "SGD does not take"),
    ({"groups": ({"momentum": -1.0},)}, "Invalid momentum value"),
    ({"groups": ({"momentum": 0.5, "dampening": "a"},)}, "SGD does not take these"),
    ({"optimizer": "Adam", "groups": ({"betas": [0.9]},)}, "Adam does not take these"),
    ({"codecs": ()}, "weight: the plan has no codec 2"),
    ({"codecs": ({"id": "4lc"},) * 3}, "unknown codec '4lc'"),
    ({"codecs": ({"id": "fp32", "x": 1},) * 3}, "unknown option 'x'"),
    ({"codecs": ({"id": "fp32", "self": 1},) * 3}, "unknown option 'self'"),
    ({"codecs": ({},) * 3}, "a codec's configuration has an id"),
    ({"codecs": ({"id": [1]},) * 3}, "a codec's configuration has an id"),
    ({"codecs": ({"id": "3lc", "sparsity": [1.5]},) * 3}, "sparsity=[1.5]"),
    ({"groups": ()}, "weight: the plan has no parameter group 0"),
    ({"workers": 4096, "tables": sum((table(name=f"{n}") for n in range(2000)), ())}, "together at most"),
    ({"tables": (WEIGHT, WEIGHT)}, "two tables have one name"),
    ({"tables": table(2**40)}, "w: with it the tables have more than"),
    ({"tables": table(0, 2**62, 2**62)}, "w: with it the tables have more than"),
    ({"downlink": "momentum", "groups": ({"momentum": 1.0},)}, "SGD with momentum=1.0"),
    ({"downlink": "momentum", "optimizer": "Adam", "groups": ({},)}, "Adam with momentum=None"),
    ({"consistency": "adaptive[when={}]"}, "unknown criterion"),
    ({"consistency": "ssp[staleness=" + "1" * 5000 + "]"}, "characters"),
    ({"consistency": "ssp[" + "," * 100_000 + "x=1]"}, "characters"),
    ({"consistency": f"ssp[staleness={NESTED}]"}, "ssp: staleness is"),
]


OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"tables": table(2, up=-1)}, "Expected `int` >= 0 - at `$[1].tables[0].up`"),
    ({"tables": table(-4, -4)}, "Expected `int` >= 0 - at `$[1].tables[0].shape[0]`"),
    ({"tables": table(*(1,) * 100)}, "Expected `array` of length <= 32 - at `$[1].tables[0].shape`"),
    ({"workers": 0}, "Expected `int` >= 1 - at `$[1].workers`"),
    ({"workers": 5000}, "Expected `int` <= 4096 - at `$[1].workers`"),
    ({"state_interval": 0}, "Expected `int` >= 1 - at `$[1].state_interval`"),
    ({"settings": {str(number): 1 for number in range(66)}}, "Expected `object` of length <= 65 - at `$[1].settings`"),
]


def test_a_plan_out_of_bounds_is_not_even_read() -> None:
    for fields, text in OUT_OF_BOUNDS:
        with pytest.raises(ProtocolError, match=re.escape(text)):
            parse(pack(Join(rank=0, plan=changed(make_plan(), **fields))))


def test_a_plan_that_cannot_be_served_is_refused_and_the_next_is_served() -> None:
    for fields, text in UNUSABLE:
        shard = Shard(begin=False)
        shard.say(STRANGER, Join(rank=0, plan=changed(make_plan(), **fields)))
        assert text in str(shard.ended.pop(STRANGER)), fields
        assert not shard.core.tables, "and the next worker may bring a better one"
        shard.join(0)
        assert (shard.core.plan, shard.ended) == (shard.plan, {})
    shard = Shard(begin=False)
    shard.say(STRANGER, Join(rank=4, plan=make_plan(4)))
    shard.join(0)
    assert shard.ended.keys() == {STRANGER} and "rank 4" in str(shard.ended[STRANGER])


DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"tables": (WEIGHT, BIAS, *table(1, name="extra"))}, "has a tensor 'extra' that the others' do not have"),
    ({"tables": (WEIGHT,)}, "lacks the tensor 'bias'"),
    ({"tables": (WEIGHT, *table(7, name="bias"))}, "tensor 'bias' has shape (7,) in this worker's model and (5,)"),
    ({"tables": (WEIGHT, *table(5, name="bias", up=1))}, "tensor bias.up: this worker plans 1, the others 0"),
    ({"tables": (BIAS, WEIGHT)}, "plan differs"),
    ({"local": "h=4"}, "pushes updates (local updates)"),
    ({"codecs": make_plan(down=codec("3lc", sparsity=1.25)).codecs}, "codecs[2].sparsity: this worker plans 1.25"),
    ({"optimizer": "Adam"}, "optimizer: this worker plans 'Adam', the others 'SGD'"),
    ({"groups": ({"momentum": 0.75},)}, "groups[0].momentum: "),
    ({"reduce": "sum"}, "reduce: this worker plans 'sum', the others 'mean'"),
    ({"state_interval": 7}, "state_interval: this worker plans 7, the others 50"),
    ({"settings": {"seed": 1}}, "seed: this worker has 1, the others 0"),
    ({"settings": {"seed": 0, "lr": 0.1}}, "lr: this worker has 0.1, the others no"),
    ({"settings": {}}, "seed: this worker has none, the others 0"),
]


def test_a_plan_that_differs_is_refused_by_name() -> None:
    shard = Shard(changed(make_plan(), settings={"seed": 0}), begin=False)
    shard.join(0)
    for fields, text in DIFFERENCES:
        shard.say(1, Join(rank=1, plan=changed(shard.plan, **fields)))
        assert shard.ended.keys() == {1} and text in str(shard.ended.pop(1)), fields


def test_another_thinwire_is_refused_even_where_it_comes_first() -> None:
    shard = Shard(begin=False)
    shard.say(0, Join(rank=0, plan=shard.plan, version="9.9.9"))
    assert f"version: this worker runs thinwire 9.9.9, the server {tw.__version__}" in str(shard.ended[0])
    shard.say(1, Join(rank=0, plan=shard.plan, version=tw.__version__))
    assert shard.core.here == (0,) and shard.ended.keys() == {0}


def test_answers_are_short_however_long_the_question() -> None:
    shard = Shard(begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=changed(shard.plan, tables=table(1, name="x" * 10**6))))
    assert len(str(shard.ended[1])) < 3000
