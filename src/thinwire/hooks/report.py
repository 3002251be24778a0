"""Costs and savings of one rank's exchanges, and whether compression pays on this link."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import Codec
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.policies.compression import Choice
from thinwire.quantities import counted, ms_text, nbytes_text, rate_text

_SPENT = ("encode_seconds", "decode_seconds", "copy_seconds")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The exchanges of one rank, so far; print it.

    Bytes and the ratio are means over all steps. Seconds are means over `steps` without the first `warm_up`, in which
    code starts and compiles. A hook's `steps` are compressed steps; the optimizer's are all steps.

    Attributes:
        taken: steps so far, uncompressed and skipped ones too.
        steps: number of steps that seconds are measured over, plus the first `warm_up`.
        sent_nbytes: bytes sent, message heads included.
        received_nbytes: bytes received, likewise; None if a rank receives as much as it sends.
        uncompressed_nbytes: bytes of an uncompressed exchange each way, in the parameters' own dtypes. For a hook as
            in a ring all-reduce: 2·(N − 1)/N times the gradients' size, or half of it if gradients are only sent to
            their shard's owner.
        encode_s: encoding pushes.
        decode_s: decoding, and averaging or applying.
        wait_s: waiting for other ranks or servers, and so for the link.
        copy_s: copies to and from the host.
        warm_up: number of first steps that the seconds exclude; see `telemetry.WarmUp`.
        warm_up_s: exchanging time of one of those steps.
        steps_skipped: steps that all ranks skipped because of NaN or Inf.
        void_rounds: exchanges without this worker.
        seconds: elapsed time; 0 if only exchanges are timed.
        compute_s: outside thinwire: forward, backward, the worker's own optimizer, data and evaluation.
        compiling: whether seconds include the first two exchanges, in which kernels may have compiled.
        codecs: the codecs in use, both ways if they differ, uncompressed tensors included; `auto` if the controller
            chooses at every step; empty if unknown.
        bits_per_value: payload bits per value sent of a gradient or an average, uncompressed tensors included.
        link_bps: bits per second of the slowest link, as measured last; 0 if it was not measured.
        lag: the longest lag of any slice, in steps, as measured last; None if codecs do not bound it.
        sparsity: likewise the smallest and the largest sparsity multiplier of the next step.
        auto: the setting in use with `codec="auto"`, as text.
        auto_s: seconds of a step at that setting and uncompressed, by which the controller chooses; None until steps
            were measured.
        recorded: number of steps of `taken` with records in metrics writers.
        uncounted_traffic: other traffic, as text; its bytes are not counted here.
        gathered: the codec of gathered parameters, with bytes that are counted too; empty if they are not coded.
        resumed: how the state was loaded, if it was.

    Example:
        >>> print(Report(taken=10, steps=10, seconds=0.1, compute_s=0.09, encode_s=0.002, decode_s=0.001, wait_s=0.005,
        ...              sent_nbytes=100, received_nbytes=100, uncompressed_nbytes=4000))
        thinwire: 10 steps, 100 ms each, 90.0 % of them computing
          sent a step      100 B, received 100 B, uncompressed 4 kB each way: 40.0× less over all steps
          time a step      encode 2 ms, decode 1 ms, copies 0 ms, waiting 5 ms
    """

    taken: int
    steps: int
    sent_nbytes: float
    uncompressed_nbytes: float
    encode_s: float
    decode_s: float
    wait_s: float
    received_nbytes: float | None = None
    copy_s: float = 0.0
    warm_up: int = 0
    warm_up_s: float = 0.0
    steps_skipped: int = 0
    void_rounds: int = 0
    seconds: float = 0.0
    compute_s: float = 0.0
    compiling: bool = False
    codecs: str = ""
    bits_per_value: float = 0.0
    link_bps: float = 0.0
    lag: float | None = None
    sparsity: tuple[float, float] | None = None
    auto: str = ""
    auto_s: tuple[float, float] | None = None
    recorded: int = 0
    uncounted_traffic: str = ""
    gathered: str = ""
    resumed: str = ""

    @property
    def ratio(self) -> float:
        """Uncompressed bytes over the bytes sent and received."""
        ways = [self.sent_nbytes] if self.received_nbytes is None else [self.sent_nbytes, self.received_nbytes]
        return len(ways) * self.uncompressed_nbytes / sum(ways) if any(ways) else 0.0

    @property
    def compute_share(self) -> float:
        """Computing time over elapsed time, 0 … 1."""
        return self.compute_s / self.seconds if self.seconds else 0.0

    @property
    def saved_s(self) -> float:
        """Seconds that a compressed step saves on the link, if transfers did not overlap with computing."""
        saved = 8 * (self.uncompressed_nbytes - self.sent_nbytes) * self.taken / max(1, self.steps)
        return saved / self.link_bps if self.link_bps else 0.0

    @property
    def spent_s(self) -> float:
        """Seconds a step that compression takes."""
        return self.encode_s + self.decode_s + self.copy_s

    @property
    def pays(self) -> bool | None:
        """Whether the link saves more time than compression takes; None until link and steps were measured."""
        if self.auto:
            return None if self.auto_s is None else self.auto_s[0] < self.auto_s[1]
        return self.saved_s > self.spent_s if self.link_bps and self.steps > self.warm_up else None

    def __str__(self) -> str:
        further = {
            "auto": self.auto,
            "recorded": f"{self.recorded} of {counted(self.taken, 'step')}" * bool(self.recorded),
            "lag": "" if self.lag is None or self.sparsity is None else self._lag(self.lag, *self.sparsity),
            "resumed": self.resumed,
        }
        return "\n".join([*self._lines(), *(f"  {name:<16} {text}" for name, text in further.items() if text)])

    def _lines(self) -> list[str]:
        if not self.taken:
            return ["thinwire: no step yet"]
        if not self.steps:
            return [f"thinwire: {counted(self.taken, 'step')}, none of them compressed: {self._why_none()}"]
        if self.steps == self.warm_up:
            return [f"thinwire: {counted(self.steps, 'step')}, in which everything starts: the next ones tell more"]
        head = f"{self.steps} steps, {ms_text(self.seconds)} each, {100 * self.compute_share:.1f} % of them computing"
        if self.codecs:
            head = f"{self.steps} compressed steps of {self.taken}, {self.steps_skipped} skipped, {self.codecs}"
        head += f", {self.void_rounds} void rounds" if self.void_rounds else ""
        head += f"; {self.gathered} gathers" if self.gathered else ""
        both = "" if self.received_nbytes is None else f", received {nbytes_text(self.received_nbytes)}"
        bits = f", {self.bits_per_value:.3f} bit a {'gradient ' * bool(self.gathered)}value" * bool(self.bits_per_value)
        traffic = self.uncounted_traffic
        lines = [
            f"thinwire: {head}",
            f"  sent a step      {nbytes_text(self.sent_nbytes)}{both}, uncompressed "
            f"{nbytes_text(self.uncompressed_nbytes)}{' each way' * bool(both)}: {self.ratio:.1f}× less over all steps"
            f"{bits}{traffic and f'; not counted: {traffic}'}",
            f"  time a step      encode {ms_text(self.encode_s)}, decode {ms_text(self.decode_s)}, "
            f"copies {ms_text(self.copy_s)}, waiting {ms_text(self.wait_s)}",
        ]
        if self.warm_up:
            cost = f"with {ms_text(self.warm_up_s)} each of exchanging and compiling"
            if self.compiling:
                cost = "but kernels compile in two exchanges: more of them tell more"
            which = "the first step" if self.warm_up == 1 else f"the first {self.warm_up} steps"
            lines.append(f"  left out         {which}, {cost}")
        return lines + ([f"  verdict          {self._verdict()}"] if self.codecs else [])

    def _why_none(self) -> str:
        if not self.uncompressed_nbytes:
            return "one rank alone sends nothing"
        if not self.auto:
            return "they come before start_step"
        if not self.link_bps:
            return "the link is not measured yet"
        return f"the link ({rate_text(self.link_bps)}) is fast enough, and nothing is compressed, as intended"

    def _verdict(self) -> str:
        if self.auto:
            if self.auto_s is None:
                return "not yet: auto is measuring steps"
            now_s, plain_s = map(ms_text, self.auto_s)
            found = "compression pays" if self.pays else "uncompressed is as fast"
            return f"{found}: auto expects {now_s} a step as it is now, {plain_s} uncompressed"
        if self.pays is None:
            return "unknown: the link was not measured (measure_link=False)"
        found = "compression pays" if self.pays else "uncompressed would be faster"
        seconds = f"saved {ms_text(self.saved_s)}, spent {ms_text(self.spent_s)} a compressed step"
        return f"{found}: measured link {rate_text(self.link_bps)}, {seconds}"

    @staticmethod
    def _lag(lag: float, least: float, largest: float) -> str:
        return f"up to {lag:.1f} steps, s from {least:.2f} to {largest:.2f}"


def report(state: ExchangeState) -> Report:
    """Returns compression's costs and savings on this rank so far; print it.

    Args:
        state: the result of `ddp.compress`, `fsdp.compress` or `named.compress`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from thinwire.hooks import ddp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
        >>> state = ddp.compress(model, codec="3lc", min_numel=1)
        >>> print(ddp.report(state))
        thinwire: no step yet
        >>> state.close()
        >>> dist.destroy_process_group()
    """
    state.note_warm_up()
    auto, sums, totals = state.auto, state.compressed_sums(), state.totals()
    steps, taken = int(sums.get("steps", 0)), totals["taken"]
    warm_up, since = state.warm_up.split(steps, sums)
    all_steps, timed = 1 / max(1, taken), 1 / max(1, steps - warm_up)
    residuals, pulls = state.core.residuals, state.core.pulls
    base = None if auto is None else auto.base
    names = {_name(tensor.choice, base, pulls=pulls) for tensor in residuals.tensors.values()}
    bounds = [each.lag_bound for each in residuals.contexts.values() if each.lag_bound is not None]
    if auto is not None and (auto.setting.codec is None or auto.setting.codec.id != auto.base.id):
        bounds = []  # of a setting that is not in use
    multipliers = [bound.sparsity for bound in bounds]
    return Report(
        taken=taken,
        steps=steps,
        sent_nbytes=totals["wire_nbytes"] * all_steps,
        uncompressed_nbytes=totals["plain_nbytes"] * all_steps if taken else state.uncompressed_nbytes,
        encode_s=since.get("encode_seconds", 0) * timed,
        decode_s=since.get("decode_seconds", 0) * timed,
        copy_s=since.get("copy_seconds", 0) * timed,
        wait_s=since.get("wait_seconds", 0) * timed,
        warm_up=warm_up,
        warm_up_s=sum(sums.get(name, 0) - since.get(name, 0) for name in _SPENT) / max(1, warm_up),
        steps_skipped=state.steps_skipped,
        codecs="; ".join(sorted(names)),
        bits_per_value=8 * since.get("payload_bytes", 0) / max(1, since.get("values", 0)),
        link_bps=state.known_link_bps,
        lag=max((bound.lag for bound in bounds), default=None),
        sparsity=(min(multipliers), max(multipliers)) if multipliers else None,
        auto="" if auto is None else str(auto),
        auto_s=None if auto is None else auto.costs_s(),
        recorded=state.recorded,
        uncounted_traffic=state.uncounted_traffic,
        gathered=state.gathered,
        resumed=state.resumed,
    )


def _name(choice: Choice, auto: Codec | None, *, pulls: bool) -> str:
    """Returns the codecs of a tensor as text; the codec `auto` is written as `auto`."""
    up, down = ("auto" if each == auto else str(each) for each in (choice.up, choice.down))
    return up if up == down or not pulls else f"{up} up and {down} down"
