"""A plan that cannot be served, or differs from the others', is refused in words that say what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import thinwire as tw
from tests.server.conversation import Shard, make_plan
from thinwire.codecs import codec
from thinwire.errors import ProtocolError
from thinwire.packets import pack, parse
from thinwire.schema import (
    Join,
    Plan,
    TableSpec,
    Welcome,
)
from thinwire.server import updates
from thinwire.server.agreement import usable_codecs

STRANGER = 9


def changed(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


PLANS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a mean over senders of codecs that send all": (
        lambda p: changed(p, reduce="clipped-mean-of-senders"),
        r"'clipped-mean-of-senders' is of codecs that send some of the values, .*: 3lc, fp32; plan reduce='mean'",
    ),
    "an optimizer that is not on the list": (
        lambda p: changed(p, optimizer="LBFGS"),
        r"optimizer 'LBFGS' is not on the server's list: SGD, Adam",
    ),
    "something else that torch has": (lambda p: changed(p, optimizer="Optimizer"), r"not on the server's list"),
    "an unknown option": (lambda p: changed(p, groups=({"betas": [0.9, 0.9]},)), r"SGD does not take \['betas'\]; it"),
    "an option that is ours alone": (lambda p: changed(p, groups=({"foreach": True},)), r"SGD does not take"),
    "an option out of range": (lambda p: changed(p, groups=({"momentum": -1.0},)), r"Invalid momentum value"),
    "an option of another type": (
        lambda p: changed(p, groups=({"momentum": 0.5, "dampening": "a"},)),
        r"SGD does not take these",
    ),
    "too few betas": (lambda p: changed(p, optimizer="Adam", groups=({"betas": [0.9]},)), r"Adam does not take these"),
    "no codec": (lambda p: changed(p, codecs=()), r"weight: the plan has no codec 2"),
    "a codec that is not there": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(2,), up=-1),)),
        r"w: the plan has no codec",
    ),
    "an unknown codec": (lambda p: changed(p, codecs=({"id": "4lc"},) * 3), r"unknown codec '4lc'"),
    "an unknown codec option": (
        lambda p: changed(p, codecs=({"id": "fp32", "x": 1},) * 3),
        r"unknown option 'x'",
    ),
    "a codec without an id": (lambda p: changed(p, codecs=({},) * 3), r"a codec's configuration has an id"),
    "an id that is no text": (lambda p: changed(p, codecs=({"id": [1]},) * 3), r"a codec's configuration has an id"),
    "a codec option of another type": (
        lambda p: changed(p, codecs=({"id": "3lc", "sparsity": [1.5]},) * 3),
        r"sparsity=\[1.5\]",
    ),
    "no group": (lambda p: changed(p, groups=()), r"weight: the plan has no parameter group 0"),
    "no workers": (lambda p: changed(p, workers=0), r"a plan for 0 workers; 1 … 4096 are possible"),
    "a crowd": (lambda p: changed(p, workers=5000), r"a plan for 5000 workers"),
    "one name twice": (lambda p: changed(p, tables=(p.tables[0], p.tables[0])), r"two tables have one name"),
    "a negative dimension": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(-4, -4)),)),
        r"w: shape \(-4, -4\) has a negative dimension",
    ),
    "more than any memory": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(2**40,)),)),
        r"w: with it the tables have more than 68719476736 values together",
    ),
    "overflow behind a zero": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(0, 2**62, 2**62)),)),
        r"w: with it the tables have more than",
    ),
    "too many dimensions": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(1,) * 100),)),
        r"w: 100 dimensions; at most 32 are possible",
    ),
    "a momentum at each end that is none": (
        lambda p: changed(p, downlink="momentum", groups=({"momentum": 1.0},)),
        r"momentum each end adds itself has SGD with momentum=1\.0; it goes with SGD and a momentum from 0",
    ),
    "a momentum at each end of another optimizer": (
        lambda p: changed(p, downlink="momentum", optimizer="Adam", groups=({},)),
        r"a plan whose momentum each end adds itself has Adam with momentum=None; it goes with SGD",
    ),
    "buffers that never travel": (lambda p: changed(p, state_interval=0), r"buffers that travel every 0 steps"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_served(case: str) -> None:
    make, text = PLANS[case]
    shard = Shard(begin=False)
    shard.say(STRANGER, Join(rank=0, plan=make(make_plan())))
    with pytest.raises(ProtocolError, match=text):
        raise ProtocolError(str(shard.ended[STRANGER]))
    assert not shard.core.tables, "and the next worker may bring a better one"
    shard.ended.clear()
    shard.join(0)
    assert (shard.core.plan, shard.ended) == (shard.plan, {})


def test_scales_that_options_fix_are_no_reason_to_refuse_a_codec() -> None:
    fixed = {"id": "terngrad", "scale": 0.001}
    [made] = usable_codecs(changed(make_plan(), codecs=(fixed,), tables=()))
    assert made.config()["scale"] == 0.001


def test_a_reduction_that_nobody_knows_does_not_get_past_the_packet() -> None:
    join = pack(Join(rank=0, plan=changed(make_plan(), reduce="most")))
    with pytest.raises(ProtocolError, match=r"could not be read.*'most'"):
        parse(join)


def test_tables_that_do_not_fit_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 64.0 GiB")

    monkeypatch.setattr(updates, "Table", no_memory)
    shard = Shard(begin=False)
    shard.join(0)
    assert shard.ended[0] == "the tables do not fit the server's memory: Unable to allocate 64.0 GiB"


def test_a_refused_first_worker_leaves_no_plan_behind() -> None:
    shard = Shard(begin=False)
    shard.say(STRANGER, Join(rank=4, plan=make_plan(4)))
    assert "rank 4; this training has ranks 0 … 3" in str(shard.ended[STRANGER])
    shard.join(0)
    assert shard.ended.keys() == {STRANGER}


DIFFERENCES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a tensor more": (
        lambda p: changed(p, tables=(*p.tables, TableSpec(name="extra", shape=(1,)))),
        r"this worker's model has a tensor 'extra' that the others' do not have\. Where the model is the same, the s",
    ),
    "a tensor less": (lambda p: changed(p, tables=p.tables[:1]), r"this worker's model lacks the tensor 'bias'"),
    "a shape": (
        lambda p: changed(p, tables=(p.tables[0], TableSpec(name="bias", shape=(7,)))),
        r"tensor 'bias' has shape \(7,\) in this worker's model and \(5,\) in the others'",
    ),
    "a codec of one tensor": (
        lambda p: changed(p, tables=(p.tables[0], TableSpec(name="bias", shape=(5,), up=1))),
        r"tensor bias\.up: this worker plans 1, the others 0$",
    ),
    "local updates": (
        lambda p: changed(p, local="h=4"),
        r"this worker's design pushes updates \(local updates\), the others' gradients: start all workers",
    ),
    "the order": (lambda p: changed(p, tables=p.tables[::-1]), r"plan differs"),
    "a codec": (
        lambda p: changed(p, codecs=(*p.codecs[:2], codec("3lc", sparsity=1.25).config())),
        r"codecs\[2\]\.sparsity: this worker plans 1\.25, the others 1\.5$",
    ),
    "the optimizer": (
        lambda p: changed(p, optimizer="Adam"),
        r"optimizer: this worker plans 'Adam', the others 'SGD'$",
    ),
    "its options": (
        lambda p: changed(p, groups=({"momentum": 0.75},)),
        r"groups\[0\]\.momentum: .*0\.75, the others 0\.5$",
    ),
    "the reduction": (lambda p: changed(p, reduce="sum"), r"reduce: this worker plans 'sum', the others 'mean'$"),
    "the interval": (lambda p: changed(p, state_interval=7), r"state_interval: this worker plans 7, the others 50"),
    "a setting": (lambda p: changed(p, settings={"seed": 1}), r"seed: this worker has 1, the others 0; start all"),
    "a setting more": (
        lambda p: changed(p, settings={"seed": 0, "lr": 0.1}),
        r"lr: this worker has 0.1, the others no",
    ),
    "no settings": (lambda p: changed(p, settings={}), r"seed: this worker has none, the others 0"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_plan_that_differs_is_refused_by_name(case: str) -> None:
    make, text = DIFFERENCES[case]
    shard = Shard(changed(make_plan(), settings={"seed": 0}), begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=make(shard.plan)))
    assert shard.ended.keys() == {1}
    with pytest.raises(ProtocolError, match=text):
        raise ProtocolError(str(shard.ended[1]))


def of_dtype(weight: str, bias: str) -> Plan:
    plan = make_plan()
    pairs = zip(plan.tables, (weight, bias), strict=True)
    return changed(plan, tables=tuple(msgspec.structs.replace(spec, dtype=dtype) for spec, dtype in pairs))


def test_another_dtype_is_refused_by_name() -> None:
    shard = Shard(of_dtype("float32", "float32"), begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=of_dtype("float32", "bfloat16")))
    assert "tensor 'bias' is bfloat16 in this worker's model and float32 in the others': replicas" in str(
        shard.ended[1]
    )


def test_another_thinwire_is_refused_whoever_comes_first() -> None:
    shard = Shard(begin=False)
    shard.say(0, Join(rank=0, plan=shard.plan, version="9.9.9"))
    assert f"version: this worker runs thinwire 9.9.9, the server {tw.__version__}" in str(shard.ended[0])
    shard.say(1, Join(rank=0, plan=shard.plan, version=tw.__version__))
    assert isinstance(shard.told[1][0][0], Welcome) and shard.ended.keys() == {0}


def test_an_answer_is_short_however_long_the_question() -> None:
    shard = Shard(begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=changed(shard.plan, tables=(TableSpec(name="x" * 10**6, shape=(1,)),))))
    assert len(str(shard.ended[1])) < 3000
