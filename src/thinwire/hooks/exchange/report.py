"""What compression cost and saved on this rank, and whether it was worth it on this link."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import Codec
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.policies.compression import Choice
from thinwire.quantities import ms_text, nbytes_text, rate_text

_SPENT = ("encode_seconds", "decode_seconds", "copy_seconds")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Means over the compressed steps so far but for the first `warm_up`, in which everything compiles; of this rank.

    Attributes:
        steps: compressed steps, the first ones included.
        steps_skipped: steps that nobody took because of NaN or Inf.
        codecs: the codecs in use, both ways where there are two, uncompressed tensors included; `auto` where one is
            chosen step by step.
        sent_nbytes: bytes sent a step, message heads included.
        uncompressed_nbytes: what a ring all-reduce sends a step, 2·(N − 1)/N times the gradients' size in the
            parameters' own dtypes; half of it where gradients are only sent to who owns their shard.
        ratio: the one over the other.
        bits_per_value: payload bits per value sent of a gradient or an average, uncompressed tensors included.
        encode_s: seconds a step of encoding pushes.
        decode_s: seconds a step of decoding, averaging and encoding the averages.
        copy_s: seconds a step of copies to and from the host.
        wait_s: seconds a step that the pulling thread waited for others.
        link_bps: bits per second of the slowest link, as measured last; 0 where it was not measured.
        resumed: how the state was loaded, if it was.
        lag: where codecs bound it, the longest of any slice in steps, as measured last; else None.
        sparsity: likewise the least and the largest sparsity multiplier of the next step.
        warm_up: how many first steps are in no mean; see `telemetry.warm_up_steps`.
        warm_up_s: seconds a step that compression took in those.
        auto: with `codec="auto"` the setting in use, in words.
        beside: what else travels, of which nothing here is counted, in words.
        gathered: the codec of parameters that are gathered, whose bytes are counted too; empty where none are coded.
    """

    steps: int
    steps_skipped: int
    codecs: str
    sent_nbytes: float
    uncompressed_nbytes: float
    ratio: float
    bits_per_value: float
    encode_s: float
    decode_s: float
    copy_s: float
    wait_s: float
    link_bps: float
    resumed: str
    lag: float | None = None
    sparsity: tuple[float, float] | None = None
    warm_up: int = 0
    warm_up_s: float = 0.0
    auto: str = ""
    beside: str = ""
    gathered: str = ""

    @property
    def saved_s(self) -> float:
        """Seconds a step that the link needs less than uncompressed, were nothing overlapped."""
        return 8 * (self.uncompressed_nbytes - self.sent_nbytes) / self.link_bps if self.link_bps else 0.0

    @property
    def spent_s(self) -> float:
        """Seconds a step that compression itself takes."""
        return self.encode_s + self.decode_s + self.copy_s

    @property
    def pays(self) -> bool | None:
        """Whether the link saves more than compression takes; None where the link was not measured."""
        return self.saved_s > self.spent_s if self.link_bps and self.steps > self.warm_up else None

    def __str__(self) -> str:
        if not self.steps:
            lines = ["thinwire: no compressed step yet"]
        elif self.steps == self.warm_up:
            lines = [f"thinwire: {self.warm_up} compressed step, in which everything starts: the next ones tell more"]
        else:
            gathers, value = (f"; {self.gathered} gathers", "gradient value") if self.gathered else ("", "value")
            lines = [
                f"thinwire: {self.steps} compressed steps, {self.steps_skipped} skipped, {self.codecs}{gathers}",
                f"  sent a step      {nbytes_text(self.sent_nbytes)}, uncompressed "
                f"{nbytes_text(self.uncompressed_nbytes)}: {self.ratio:.1f}× less, "
                f"{self.bits_per_value:.3f} bit a {value}{self.beside and f'; beside it {self.beside}'}",
                f"  time a step      encode {ms_text(self.encode_s)}, decode and average {ms_text(self.decode_s)}, "
                f"copies {ms_text(self.copy_s)}, waiting {ms_text(self.wait_s)}",
                *self._warm_up(),
                f"  verdict          {self._verdict()}",
            ]
        if self.lag is not None and self.sparsity is not None:
            least, largest = self.sparsity
            lines.append(f"  lag              up to {self.lag:.1f} steps, s from {least:.2f} to {largest:.2f}")
        if self.auto:
            lines.append(f"  auto             {self.auto}")
        if self.resumed:
            lines.append(f"  {self.resumed}")
        return "\n".join(lines)

    def _warm_up(self) -> list[str]:
        if not self.warm_up:
            return []
        which = "the first step" if self.warm_up == 1 else f"the first {self.warm_up} steps"
        return [f"  left out         {which}, with {ms_text(self.warm_up_s)} each of compressing and compiling"]

    def _verdict(self) -> str:
        if self.pays is None:
            return "unknown: the link was not measured (measure_link=False)"
        found = "compression pays" if self.pays else "uncompressed would be faster"
        seconds = f"saved {ms_text(self.saved_s)}, spent {ms_text(self.spent_s)} a step"
        return f"{found}: measured link {rate_text(self.link_bps)}, {seconds}"


def report(state: ExchangeState) -> Report:
    """Returns what compression cost and saved on this rank so far; print it.

    Args:
        state: what `ddp.compress` or `fsdp.compress` returned.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from thinwire.hooks import ddp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
        >>> state = ddp.compress(model, codec="3lc", min_numel=1)
        >>> print(ddp.report(state))
        thinwire: no compressed step yet
        >>> state.close()
        >>> dist.destroy_process_group()
    """
    state.note_warm_up()
    sums = state.compressed_sums()
    taken = int(sums.get("steps", 0))
    warm_up, counters = state.warm_up.split(taken, sums)
    per = 1 / max(1, taken - warm_up)
    tensors = state.core.residuals.tensors.values()
    sent = counters.get("wire_bytes", 0) * per
    uncompressed = state.uncompressed_nbytes + counters.get("gather_uncompressed_bytes", 0) * per
    auto = state.auto
    base, pulls = None if auto is None else auto.base, state.core.pulls
    names = {_name(tensor.choice, base, pulls=pulls) for tensor in tensors}
    bounds = [each.lag_bound for each in state.core.residuals.contexts.values() if each.lag_bound is not None]
    if auto is not None and (auto.setting.codec is None or auto.setting.codec.id != auto.base.id):
        bounds = []  # of a setting that is not in use
    multipliers = [bound.sparsity for bound in bounds]
    return Report(
        steps=taken,
        steps_skipped=state.steps_skipped,
        codecs="; ".join(sorted(names)),
        sent_nbytes=sent,
        uncompressed_nbytes=uncompressed,
        ratio=uncompressed / sent if sent else 0.0,
        bits_per_value=8 * counters.get("payload_bytes", 0) / max(1, counters.get("values", 0)),
        encode_s=counters.get("encode_seconds", 0) * per,
        decode_s=counters.get("decode_seconds", 0) * per,
        copy_s=counters.get("copy_seconds", 0) * per,
        wait_s=counters.get("wait_seconds", 0) * per,
        link_bps=state.known_link_bps,
        resumed=state.resumed,
        lag=max((bound.lag for bound in bounds), default=None),
        sparsity=(min(multipliers), max(multipliers)) if multipliers else None,
        warm_up=warm_up,
        auto="" if auto is None else str(auto),
        beside=state.beside,
        gathered=state.gathered,
        warm_up_s=sum(sums.get(name, 0) - counters.get(name, 0) for name in _SPENT) / max(1, warm_up),
    )


def _name(choice: Choice, auto: Codec | None, *, pulls: bool) -> str:
    """Returns in words how tensors are compressed; `auto` is the codec that stands for whichever is in use."""
    up, down = ("auto" if each == auto else str(each) for each in (choice.up, choice.down))
    return up if up == down or not pulls else f"{up} up and {down} down"
