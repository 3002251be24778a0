"""A plan of a small model: what is measured, what follows from it, and what is said."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import plan
from thinwire.collective.trained import PART_NUMEL
from thinwire.errors import ConfigError
from thinwire.planner import planning
from thinwire.planner.costs import choices, exchange_every, measure_costs
from thinwire.planner.exchange_work import ExchangeWork
from thinwire.planner.optimizers import Trainer
from thinwire.planner.planning import UNCOMPRESSED, Plan
from thinwire.planner.predictions import Setting
from thinwire.planner.profile import Profile, TensorSeconds, profile
from thinwire.planner.step_time import TensorCosts
from thinwire.planner.verdict import designs_table, picture, verdict, workers_table
from thinwire.policies.adaptive import ROUNDS
from thinwire.policies.compression import Choice
from thinwire.policies.designs import Design, design
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.profiling import profile_workload

VALUES = (3300, 3200)


Known = Callable[..., Plan]


def costs_of(profile: Profile, design: Design, *, workers: int, collective: bool) -> dict[str, TensorCosts]:
    """26 kB each way uncompressed; of any other design a hundredth of it, for 100 µs a tensor."""
    share, seconds = (1.0, 0.0) if design.name == UNCOMPRESSED else (0.01, 1e-4)
    return {
        tensor.name: TensorCosts(
            encode_s=seconds,
            decode_s=seconds,
            push_nbytes=4 * values * share,
            pull_nbytes=4 * values * share,
            server_push_s=1e-6,
            server_update_s=seconds,
        )
        for tensor, values in zip(profile.tensors, VALUES, strict=True)
    }


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    """Makes plans of known costs, and of a step of 4 ms."""
    monkeypatch.setattr(planning, "measure_costs", costs_of)
    monkeypatch.setattr(planning, "measure_exchange_work", lambda profile, design, costs: ExchangeWork())
    tensors = tuple(
        TensorSeconds(name=name, shape=(values,), forward_s=0.0005, backward_s=0.001)
        for name, values in zip(("weight", "bias"), VALUES, strict=True)
    )
    measured = Profile(tensors=tensors, step_s=0.004, gradients=())
    return lambda setting, *designs: Plan(measured, designs or ["3lc"], setting)


def test_profile_has_the_seconds_of_each_tensor() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(600, 800), nn.ReLU(), nn.Linear(800, 10))
    network[3].bias.requires_grad_(False)
    unused = nn.Linear(3, 3)
    network.register_module("unused", unused)
    network.forward = lambda x: nn.Sequential(*list(network)[:4])(x)  # type: ignore[method-assign]
    measured = profile(network, lambda: network(torch.randn(64, 600)).square().sum().backward(), steps=3)
    assert [each.name for each in measured.tensors] == ["1.weight", "1.bias", "3.weight"]
    weight, bias, last = measured.tensors
    assert weight.forward_s > 0 and last.forward_s > 0 and bias.forward_s == 0
    assert all(each.backward_s >= 0 for each in measured.tensors) and weight.shape == (800, 600)
    assert sum(t.forward_s + t.backward_s for t in measured.tensors) <= measured.step_s * 1.5
    assert len(measured.gradients) == 3 and set(measured.gradients[0]) == {"1.weight", "1.bias", "3.weight"}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())


def test_profile_refuses_models_without_values_or_gradients() -> None:
    with pytest.raises(ConfigError, match="no trained parameter"):
        profile(nn.ReLU(), lambda: None)
    empty = nn.ParameterList([torch.empty(0), torch.empty(3, 0)])
    with pytest.raises(ConfigError, match="no trained parameter that holds a value; there is nothing to exchange"):
        profile(empty, lambda: None)
    with pytest.raises(ConfigError, match=r"no step made a gradient"):
        profile(nn.Linear(2, 2), lambda: None)


def test_profile_keeps_gradients_set_to_none_and_refuses_zeroed_ones() -> None:
    network = nn.Linear(30, 20)

    def step(set_to_none: bool) -> None:
        network(torch.ones(4, 30)).sum().backward()
        network.zero_grad(set_to_none=set_to_none)

    measured = profile(network, lambda: step(True), steps=2)
    assert [set(each) for each in measured.gradients] == [{"weight", "bias"}] * 2
    assert all((each["weight"] == 4).all() for each in measured.gradients)
    with pytest.raises(ConfigError, match=r"every gradient is 0 at the end of its step.*zero_grad\(\) before"):
        profile(network, lambda: step(False), steps=2)


def test_plan_step_follows_link_workers_and_steps_between_exchanges(known: Known) -> None:
    thin = known(Setting(link="1mbit", workers=4, latency_ms=0), "3lc")
    # All traffic of four workers crosses the server's link: pushes come in while the last updates still leave.
    crossing = 4 * 4 * sum(VALUES) * 8 / 1e6 * 1514 / 1448
    assert crossing <= thin.step_s("fp32", 4, 1e6) <= 2 * crossing + 0.01
    assert thin.step_s("fp32", 8, 1e6) == pytest.approx(2 * thin.step_s("fp32", 4, 1e6), rel=0.15)
    assert thin.step_s("fp32", 4, math.inf) < 0.01
    assert thin.predict("3lc", 4, 1e6).speedup > 20
    seldom, always = (
        known(Setting(latency_ms=0), name).step_s(name, 4, 1e4) for name in ("local2[steps=4]", "local2[steps=1]")
    )
    assert seldom == pytest.approx(always / 4 + 0.003, rel=0.01), "three of four steps have no exchange"
    every_rate = [thin.step_s("fp32", 4, each.link_bps or math.inf) for each in thin.by_link() if each.design == "fp32"]
    assert every_rate == sorted(every_rate, reverse=True), "a faster link never makes a step longer"


def test_plan_divides_traffic_among_shards_and_ranks(known: Known) -> None:
    one = known(Setting(link="1mbit", workers=8, latency_ms=0))
    two = known(Setting(link="1mbit", workers=8, latency_ms=0, servers=2))
    ranks = known(Setting(link="1mbit", workers=8, latency_ms=0, mode="collective"))
    seconds = [each.step_s("fp32", 8, 1e6) for each in (one, two, ranks)]
    assert seconds[0] > 1.8 * seconds[1] > 1.8 * seconds[2], "each of the two tables lies on a shard of its own"
    traffic = 2 * 7 / 8 * 4 * sum(VALUES) * 8 / 1e6 * 1514 / 1448
    assert seconds[2] == pytest.approx(traffic, rel=0.05)
    assert ranks.step_s("fp32", 1024, 1e6) < 1.2 * seconds[2], "a rank's traffic hardly depends on how many there are"
    assert one.step_s("fp32", 1024, 1e6) > 100 * seconds[0]


def test_verdict_names_the_design_and_its_rates(known: Known) -> None:
    thin, fast = (known(Setting(link=link, workers=4, latency_ms=0)) for link in ("10mbit", "100gbit"))
    assert verdict(thin)[0].startswith("compress: at 4 workers, 10mbit 3lc is ")
    [compressed] = [each for each in thin.summaries() if each.at.design == "3lc"]
    assert compressed.pays_below_bps is not None and 1e7 < compressed.pays_below_bps < 1e11
    below, above = (thin.predict("3lc", 4, factor * compressed.pays_below_bps).speedup for factor in (0.9, 1.2))
    assert below > 1.0 and above < 1.05
    assert "the link stops mattering above" in verdict(thin)[1] and "it pays below" in verdict(thin)[1]
    assert verdict(fast)[0].startswith("do not compress: at 4 workers, 100gbit uncompressed is ")
    assert "the best of the others" in verdict(fast)[0]
    free = compressed.free_above_bps
    assert free is not None
    assert thin.step_s("3lc", 4, free) <= 1.06 * thin.step_s("3lc", 4, math.inf) < thin.step_s("3lc", 4, free / 2)


def test_verdict_names_the_line_and_its_choice_for_the_optimizer(known: Known) -> None:
    def said(link: str, optimizer: str, **setting: Any) -> list[str]:
        where = Setting(link=link, mode="collective", **setting)
        return verdict(Plan(replace(known(where).profile, trainer=Trainer(name=optimizer)), ["3lc"], where))

    for optimizer in ("SGD", "AdamW"):
        assert said("10gbit", optimizer)[0].startswith("plain DDP is enough: at 4 workers, 10gbit an all-reduce takes ")
        assert said("1mbit", optimizer, workers=1)[0].startswith("plain DDP is enough")
    first, ternary = said("1mbit", "SGD")
    assert first.endswith("; write tw.distribute(model, optimizer), which chooses a codec for gradients")
    assert "loses accuracy" not in ternary
    first, ternary, local = said("1mbit", "AdamW")
    found = re.match(r"write tw.+, which takes local-sgd\[h=(\d+)\]: at 4 workers, 1mbit a step", first)
    enough = re.search(r"h=(\d+) is enough", local)
    assert found and enough and local.startswith("local-sgd[h=4] ")
    assert int(found[1]) == min(h for h in ROUNDS if h >= int(enough[1])), "the rule of both is one"
    assert ternary.endswith("AdamW loses accuracy by gradients in fewer than 8 bits")


def test_plan_bits_and_codec_seconds_are_per_step_also_where_steps_share_an_exchange(known: Known) -> None:
    names = ("3lc", "local2", "3lc[consistency=local[4]]", "local-sgd[h=5]")
    made = known(Setting(mode="collective"), *names)
    found = {each.at.design: each for each in made.summaries()}
    always = found["3lc"]
    for name, steps in zip(names, (1, 2, 4, 5), strict=True):
        assert found[name].bits_up == found[name].bits_down == pytest.approx(always.bits_up / steps), name
        assert found[name].encode_s == found[name].decode_s == pytest.approx(always.encode_s / steps), name
    by_name = {name: next(each for each in verdict(made) if each.startswith(f"{name} ")) for name in names}
    assert by_name["local2"].endswith("it sends the sum of 2 steps' gradients, and weights change once in 2 steps")
    assert "sum of 4 steps' gradients" in by_name["3lc[consistency=local[4]]"]
    assert "sum of" not in by_name["3lc"] + by_name["local-sgd[h=5]"]


BITS = {"fp32": 32, "bf16": 16, "int8": 8}
SHAPES = {"resnet20": (3, 32, 32), "mlp-5m": (3, 32, 32), "byte-transformer-10m": (128,)}


@pytest.mark.parametrize("name", SHAPES)
def test_plan_step_grows_with_the_number_of_ranks(name: str) -> None:
    """Within five per cent, while each rank can own eight slices; with fewer at 85 per cent of it or more."""
    network = model(name, num_classes=256 if name.startswith("byte") else 10, in_shape=SHAPES[name], seed=0)
    tensors = tuple(
        TensorSeconds(name=each, shape=tuple(values.shape), forward_s=1e-6, backward_s=2e-6, number=number)
        for number, (each, values) in enumerate(network.named_parameters())
    )
    measured = Profile(tensors=tensors, step_s=4e-6 * len(tensors), gradients=())
    made = Plan(measured, ["3lc", "int8", "local-sgd[h=4]"], Setting(link="10mbit", mode="collective"))

    def cost(values: int, choice: Choice) -> TensorCosts:
        up, down = (values * BITS.get(codec.id, 1) / 8 for codec in (choice.up, choice.down))
        return TensorCosts(push_nbytes=up, pull_nbytes=down)

    made.costs = {
        each: {name: cost(network.get_parameter(name).numel(), choice) for name, choice in chosen.items()}
        for each, chosen in ((each, choices(measured, known)) for each, known in made.designs.items())
    }
    numel = sum(each.numel() for each in network.parameters())
    for each in made.designs:
        rows = [(found.workers, found.step_s) for found in made.by_workers() if found.design == each]
        for (_, fewer_s), (workers, more_s) in pairwise(rows):
            least = 0.95 if numel > 8 * PART_NUMEL * workers else 0.85
            assert more_s >= least * fewer_s, (each, workers)


def paying(monkeypatch: pytest.MonkeyPatch, speedup: Callable[[float], float]) -> None:
    """Has a step take a second uncompressed, whatever the link is, and else so much less."""
    monkeypatch.setattr(Plan, "step_s", lambda _, name, __, bps: 1.0 if name == UNCOMPRESSED else 1 / speedup(bps))


@pytest.mark.parametrize(
    ("link", "speedup", "said", "below"),
    [
        ("2kbit", lambda bps: 1.5 if bps < 5e4 else 1.0, "it pays below 50 kbit/s", 5e4),
        ("1mbit", lambda bps: 1.5 if bps <= 1e12 else 1.0, "it pays at any rate", math.inf),
        ("1mbit", lambda bps: 1.5 if bps > 1e8 else 1.0, "it pays neither here nor on the thinnest links", None),
    ],
)
def test_plan_pays_below_agrees_with_the_prediction_at_the_link(
    known: Known,
    monkeypatch: pytest.MonkeyPatch,
    link: str,
    speedup: Callable[[float], float],
    said: str,
    below: float | None,
) -> None:
    made = known(Setting(link=link))
    paying(monkeypatch, speedup)
    found = made.pays_below_bps("3lc")
    assert found == (None if below is None else pytest.approx(below, rel=0.02))
    assert said in verdict(made)[1]


def test_plan_finds_the_h_that_keeps_exchanges_to_a_quarter(known: Known) -> None:
    setting = Setting(link="1mbit", workers=4, mode="collective")
    made = known(setting, "local-sgd[h=4]", "local2")
    _, seldom, accumulated = made.summaries()
    assert (accumulated.exchange_share, accumulated.enough_h) == (None, None), "its steps are the optimizer's batches"
    assert seldom.enough_h is not None and seldom.exchange_share is not None
    # 4 ms of computing; two tensors' codecs, a hundredth of the bytes, and messages, which all come behind it.
    exchange_s = 4 * seldom.at.step_s - 4 * 0.004
    assert exchange_s > 0.002 and seldom.exchange_share == pytest.approx(exchange_s / (4 * seldom.at.step_s))

    def share(steps: int) -> float:
        [_, found] = known(setting, f"local-sgd[h={steps}]").summaries()
        assert found.enough_h == seldom.enough_h and found.exchange_share is not None
        return found.exchange_share

    assert seldom.enough_h > 1 and share(seldom.enough_h) <= 0.25 < share(seldom.enough_h - 1)
    assert f"h={seldom.enough_h} is enough for 25 % or less" in verdict(made)[1] and " h=" not in verdict(made)[2]


def test_plan_of_the_digits_is_measured_shown_and_drawn() -> None:
    measured = profile_workload("mlp", "digits", steps=2)
    told: list[str] = []
    designs, setting = ["3lc[s=1.75]", "terngrad", "local2"], plan.Setting(link="1mbit", workers=8)
    made = plan.Plan(measured, designs, setting, tell=told.append)
    found = {each.at.design: each for each in made.summaries()}
    assert list(found) == ["fp32", "3lc[s=1.75]", "terngrad", "local2"]
    assert told == [f"{what} {name}" for what in ("codecs of", "an exchange of") for name in found]
    assert found["fp32"].bits_up == pytest.approx(32, rel=0.05) and found["3lc[s=1.75]"].bits_up < 3
    assert found["terngrad"].at.speedup > 2 and found["3lc[s=1.75]"].at.speedup > 5
    assert designs_table(made).lines[1][0] == "3lc[s=1.75]" and len(workers_table(made).lines) == 11
    assert verdict(made)[0].startswith("compress: at 8 workers, 1mbit 3lc[s=1.75] is ")
    assert len(picture(made).axes[0].get_lines()) == 4 + 1
    assert measure_costs(measured, design("fp32")).keys() == {each.name for each in measured.tensors}


def test_plan_refuses_designs_and_settings_outside_its_model(known: Known) -> None:
    for name, steps in (("3lc[consistency=local[3]]", 3), ("local-sgd[h=7]", 7), ("fp32", 1)):
        assert exchange_every(design(name)) == steps
    for name in ("mps", "3lc[consistency=asp]", "entropy", "3lc[consistency=backup[1]]"):
        with pytest.raises(ConfigError, match="a plan is of"):
            known(Setting(), name)
    wrong: list[dict[str, Any]] = [{"workers": 1025}, {"mode": "ring"}, {"workers": 2.5}, {"latency_ms": math.nan}]
    wrong += [{"mode": "collective", "servers": 2}]
    for each in wrong:
        with pytest.raises(ConfigError):
            replace(Setting(), **each)
    with pytest.raises(ConfigError, match="'auto' is no design: codec='auto' chooses among none, bf16, int8 and 3lc"):
        Plan(known(Setting()).profile, ["3lc", "auto"], Setting())
    with pytest.raises(ConfigError, match="'int4' is not in this plan, which is of fp32, 3lc"):
        known(Setting()).predict("int4", 4, 1e6)
