"""A plan: how long a step takes with each design, link and number of workers, and whether compression pays there.

`profile`, `costs` and `exchange_work` measure on this machine, and `step_time` models the cluster. All seconds of a
plan are therefore predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property

from thinwire.errors import ConfigError
from thinwire.hooks.exchange.options import GATHER_MB
from thinwire.planner.costs import all_reduces, exchange_every, mean_bits, measure_costs, with_workers
from thinwire.planner.exchange_work import NONE, ExchangeWork, measure_exchange_work
from thinwire.planner.places import largest_share, on_servers
from thinwire.planner.predictions import WORKERS, Prediction, Round, Setting, Summary
from thinwire.planner.profile import Profile
from thinwire.planner.step_time import Cluster, Layer, TensorCosts, step_s
from thinwire.planner.transport_costs import (
    HOP_S,
    RANK_MESSAGE_S,
    TCP_HEADERS_NBYTES,
    TCP_PAYLOAD_NBYTES,
    TransportCosts,
)
from thinwire.policies.adaptive import (
    EXCHANGE_SHARE,
    PLAIN_SHARE,
    ROUNDS,
    is_adaptive_name,
    local_steps,
    takes_few_bits,
)
from thinwire.policies.designs import Design, design
from thinwire.worker.transmit_buffer import CHUNK_NBYTES

UNCOMPRESSED = "fp32"
LOCAL = f"local-sgd[h={ROUNDS[0]}]"
"""Planned for every adaptive optimizer; its exchange takes as long with any h."""
MATTERS = 1.05
"""A link has stopped mattering where a step takes at most this many times as long as without a limit."""
WORTH = 1.02
"""A design is called faster where it is by this factor: below it, noise of the measurement decides."""
TRANSPORT = TransportCosts()
GATHERED_NBYTES = 1e6 * GATHER_MB
"""Of gradients that ranks exchange together, as `ddp.compress` has it unless told otherwise."""
DRAWN_BPS, POINTS = (1e6, 1e11), 61
"""Rates that `by_link` has: twelve a decade."""
SLOWEST_BPS, FASTEST_BPS = 1e3, 1e12
"""Between these, rates are looked for at which something changes, in bits per second; a link has 1 kbit/s at least."""


def plannable(designs: Sequence[str | Design]) -> dict[str, Design]:
    """Returns the designs to compare, by name: uncompressed training, and these.

    Raises:
        ConfigError: an unknown design, or one that no plan can be made of, or one text in place of a list.
    """
    if isinstance(designs, str):  # a sequence too, of letters
        raise ConfigError(f"designs are {designs!r}; expected a list of names, as in [{designs!r}]")
    if "auto" in designs:
        raise ConfigError(
            "'auto' is no design: codec='auto' chooses among none, bf16, int8 and 3lc while it trains. Plan those; of "
            "tw.distribute(model, optimizer) the verdict says what it chooses"
        )
    given = [each if isinstance(each, Design) else design(each) for each in (UNCOMPRESSED, *designs)]
    for each in given:
        exchange_every(each)
    return {each.name: each for each in given}


class Plan:
    """Measured costs of a model on this machine, and predictions of its step in a cluster.

    Args:
        profile: of the model.
        designs: to compare; uncompressed training is always among them, and with an adaptive optimizer `LOCAL`.
        setting: the cluster for which the plan is made.
        tell: called with the name of the next measurement, as codecs of large models take a while.

    Raises:
        ConfigError: an unknown design, or one that no plan can be made of; one text in place of a list of designs; or
            one of several servers would hold nothing.

    Example:
        >>> import torch
        >>> from thinwire import plan
        >>> model = torch.nn.Linear(100, 10)
        >>> measured = plan.profile(model, lambda: model(torch.ones(4, 100)).sum().backward(), steps=3)
        >>> made = plan.Plan(measured, ["3lc[s=1.0]"], plan.Setting(link="1mbit", workers=8))
        >>> list(made.designs), made.predict("3lc[s=1.0]", workers=8, bps=1e6).speedup > 1
        (['fp32', '3lc[s=1.0]'], True)
    """

    def __init__(
        self,
        profile: Profile,
        designs: Sequence[str | Design],
        setting: Setting,
        *,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.profile, self.setting, self._tell = profile, setting, tell
        self.collective = setting.mode == "collective"
        self.adaptive = is_adaptive_name(profile.trainer.kind)
        self.designs = plannable(designs) | (plannable([LOCAL]) if self.adaptive else {})
        self._rounds: dict[tuple[str, int, float], Round] = {}
        self._shares: dict[tuple[str, int], float] = {}
        # Before anything is measured: training refuses servers that would hold nothing.
        several = [] if setting.servers == 1 else self.designs.values()
        self._servers = {each.name: on_servers(profile, each, setting.servers) for each in several}

    @cached_property
    def costs(self) -> Mapping[str, Mapping[str, TensorCosts]]:
        """The costs of every design's tensors; the first access measures them."""
        found = {}
        for name, each in self.designs.items():
            self._tell(f"codecs of {name}")
            found[name] = measure_costs(self.profile, each, workers=self.setting.workers, collective=self.collective)
        return found

    @cached_property
    def works(self) -> Mapping[str, ExchangeWork]:
        """The work of an exchange with a server, besides its codecs; the first access measures it."""
        found = dict.fromkeys(self.designs, NONE)
        for name, each in {} if self.collective else self.designs.items():
            costs = self.costs[name]
            self._tell(f"an exchange of {name}")
            found[name] = measure_exchange_work(self.profile, each, costs)
        return found

    def step_s(self, name: str, workers: int, bps: float) -> float:
        """Returns the predicted seconds of a step, the mean over steps with and without an exchange.

        Args:
            name: of a design of this plan.
            workers: how many.
            bps: bits a second of every link; infinity is no limit.

        Raises:
            ConfigError: the plan has no such design, or a number is out of its range.
        """
        return self.round_of(name, workers, bps).step_s

    def round_of(self, name: str, workers: int, bps: float) -> Round:
        """Returns the predicted round of a design; arguments as for `step_s`."""
        if name not in self.designs:
            raise ConfigError(f"{name!r} is not in this plan, which is of {', '.join(self.designs)}")
        if not (workers >= 1 and bps > 0):
            raise ConfigError(f"{workers} workers on links of {bps} bit/s; expected 1 or more, and a positive rate")
        asked = name, workers, bps
        if asked not in self._rounds:
            self._rounds[asked] = self._predicted_round(self.designs[name], workers, bps)
        return self._rounds[asked]

    def _predicted_round(self, made: Design, workers: int, bps: float) -> Round:
        setting, collective = self.setting, self.collective
        layers, ring = self._layers(made, workers), collective and all_reduces(made)
        # Both ways are in use at once, and every other packet that comes is acknowledged by one that goes.
        payload = TCP_PAYLOAD_NBYTES / (TCP_PAYLOAD_NBYTES + 1.5 * TCP_HEADERS_NBYTES)
        cluster = Cluster(
            workers=workers,
            bytes_per_s=bps / 8 * payload,
            latency_s=setting.latency_ms / 1e3,
            shards=setting.servers,
            cores=setting.cores,
            overlap=made.transmission == "wait-free" and made.local is None,
            collective=collective,
            ring=ring,
            chunk_nbytes=self._gathered_nbytes(layers) if collective else CHUNK_NBYTES,
            message_s=TRANSPORT.server_message_s,
            worker_message_s=RANK_MESSAGE_S if collective else TRANSPORT.worker_message_s,
            byte_s=0.0 if collective else TRANSPORT.byte_s,
            hop_s=HOP_S,
            largest_share=self._largest_share(made.name, workers) if collective and not ring else None,
        )
        alone = cluster.crowded * sum(layer.forward_s + layer.backward_s for layer in layers)
        exchanged = step_s(layers, cluster) if workers > 1 or not collective else alone
        return Round(steps=exchange_every(made), alone_s=alone, exchanged_s=exchanged)

    @property
    def plain_share(self) -> float:
        """Seconds of a plain all-reduce on the link that was asked about, over those of a step's computation."""
        setting, nbytes = self.setting, sum(4 * math.prod(each.shape) for each in self.profile.tensors)
        seconds = 2 * (setting.workers - 1) / setting.workers * 8 * nbytes / setting.bps
        return seconds / max(1e-9, self.round_of(UNCOMPRESSED, setting.workers, setting.bps).alone_s)

    @property
    def is_plain_enough(self) -> bool:
        """Whether ranks have so fast a link that `tw.distribute` leaves gradients to a plain all-reduce."""
        return self.collective and self.plain_share < PLAIN_SHARE

    def local_round(self) -> Round:
        """Returns the round of local updates that `tw.distribute` chooses for an adaptive optimizer in that cluster."""
        begun = self.round_of(LOCAL, self.setting.workers, self.setting.bps)
        return replace(begun, steps=local_steps(begun.alone_s, math.inf, begun.exchange_s))

    def loses_by(self, name: str) -> bool:
        """Returns whether a design codes gradients in fewer bits than the training's optimizer bears."""
        made = self.designs[name]
        return self.adaptive and made.local is None and takes_few_bits(made.up)

    def predict(self, name: str, workers: int, bps: float) -> Prediction:
        """Returns the prediction of one design in one cluster; arguments as for `step_s`."""
        seconds = self.step_s(name, workers, bps)
        return Prediction(
            design=name,
            workers=workers,
            link_bps=bps if math.isfinite(bps) else None,
            step_s=seconds,
            speedup=self.step_s(UNCOMPRESSED, workers, bps) / seconds,
        )

    def summaries(self) -> list[Summary]:
        """Returns every design in the cluster that was asked about, uncompressed training first."""
        return [self._summary(name) for name in self.designs]

    def _summary(self, name: str) -> Summary:
        asked, costs = (self.setting.workers, self.setting.bps), self.costs[name]
        bits_up, bits_down = mean_bits(costs, self.profile)
        steps = exchange_every(self.designs[name])
        made = None if self.designs[name].local is None else self.round_of(name, *asked)
        return Summary(
            at=self.predict(name, *asked),
            bits_up=bits_up / steps,
            bits_down=bits_down / steps,
            encode_s=sum(cost.encode_s for cost in costs.values()) / steps,
            decode_s=sum(cost.decode_s for cost in costs.values()) / steps,
            free_above_bps=self.free_above_bps(name),
            pays_below_bps=self.pays_below_bps(name),
            exchange_share=None if made is None else made.exchange_share,
            enough_h=None if made is None else made.steps_for(EXCHANGE_SHARE),
        )

    def by_workers(self) -> list[Prediction]:
        """Returns every design with 1 to 1,024 workers, on the link that was asked about."""
        numbers = sorted({*WORKERS, self.setting.workers})
        return [self.predict(name, workers, self.setting.bps) for name in self.designs for workers in numbers]

    def by_link(self) -> list[Prediction]:
        """Returns every design on links from 1 Mbit/s to 100 Gbit/s, with the workers that were asked about."""
        low, high = DRAWN_BPS
        rates = [low * (high / low) ** (point / (POINTS - 1)) for point in range(POINTS)]
        return [self.predict(name, self.setting.workers, bps) for name in self.designs for bps in rates]

    def free_above_bps(self, name: str) -> float | None:
        """Returns the rate above which a design's link stops mattering; see `Summary`."""
        workers = self.setting.workers
        free = self.step_s(name, workers, math.inf)

        def matters(bps: float) -> bool:
            return self.step_s(name, workers, bps) > MATTERS * free

        if not matters(SLOWEST_BPS):
            return 0.0
        return None if matters(FASTEST_BPS) else _threshold(matters, SLOWEST_BPS, FASTEST_BPS)

    def pays_below_bps(self, name: str) -> float | None:
        """Returns the rate below which a design is faster than uncompressed training; see `Summary`."""
        workers = self.setting.workers

        def pays(bps: float) -> bool:
            return self.step_s(UNCOMPRESSED, workers, bps) > WORTH * self.step_s(name, workers, bps)

        if name == UNCOMPRESSED or not pays(SLOWEST_BPS):
            return None
        # From the link that was asked about on, or back from it: nothing contradicts its own figures.
        asked = min(self.setting.bps, FASTEST_BPS)
        if not pays(asked):
            return _threshold(pays, SLOWEST_BPS, asked)
        return math.inf if pays(FASTEST_BPS) else _threshold(pays, asked, FASTEST_BPS)

    def _largest_share(self, name: str, workers: int) -> float:
        asked = name, workers
        if asked not in self._shares:
            self._shares[asked] = largest_share(self.profile, self.designs[name], self.costs[name], workers)
        return self._shares[asked]

    def _gathered_nbytes(self, layers: Sequence[Layer]) -> float:
        """Encoded bytes of as many gradients as ranks exchange at once."""
        whole = sum(4 * math.prod(each.shape) for each in self.profile.tensors)
        return GATHERED_NBYTES * sum(layer.push_nbytes for layer in layers) / whole

    def _layers(self, made: Design, workers: int) -> list[Layer]:
        tensors, setting, work = self.profile.tensors, self.setting, self.works[made.name]
        costs = with_workers(self.costs[made.name], self.profile, made, measured=setting.workers, workers=workers)
        layers = []
        for number, tensor in enumerate(tensors):
            cost, other_s = costs[tensor.name], 0.0 if number else self.profile.other_s
            worker_s, server_s = work.worker_s / len(tensors), work.server_s / len(tensors)
            whole = Layer(
                push_nbytes=cost.push_nbytes,
                pull_nbytes=cost.pull_nbytes,
                encode_s=cost.encode_s + worker_s / 2,  # half before its push, and half behind its pull
                decode_s=cost.decode_s + worker_s / 2,
                server_push_s=cost.server_push_s + server_s,
                server_update_s=cost.server_update_s,
                forward_s=(tensor.forward_s + other_s) / setting.compute,
                backward_s=tensor.backward_s / setting.compute,
            )
            parts = self._servers.get(made.name, {}).get(tensor.name, ())
            layers += [_part(whole, part.numel / max(1, math.prod(tensor.shape)), part.server) for part in parts]
            layers += [] if parts else [whole]
        return layers


def _part(whole: Layer, share: float, shard: int) -> Layer:
    """Returns the part of a layer that lies on one of several servers."""
    scaled = {each.name: share * getattr(whole, each.name) for each in fields(Layer) if each.name != "shard"}
    return Layer(**scaled, shard=shard)


def _threshold(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the rate up to which something holds, within one per cent: at `low` it does, and at `high` no more."""
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
