"""The rules of `auto` that follow from the optimizer: how far gradients are coded, and how many steps a round has.

An adaptive optimizer divides a gradient by its own running size, so what a ternary code adds to it is not averaged
out: such trainings code gradients in 8 bits or more, or exchange what the optimizer made of them (local updates).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.codecs import Codec

ROUNDS = (4, 8, 16, 32)
"""Local steps of a round that `auto` chooses among."""
EXCHANGE_SHARE = 0.25
"""Of the time, what exchanges of local updates may take unless told otherwise."""
PLAIN_SHARE = 0.1
"""Of a step's computation: a plain all-reduce that takes less than this is left as it is."""
_SGD = (torch.optim.SGD, torch.optim.ASGD)


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer scales gradients by their own history: every class that is not known to be SGD.

    Example:
        >>> weights = [torch.zeros(2, requires_grad=True)]
        >>> is_adaptive(torch.optim.AdamW(weights)), is_adaptive(torch.optim.SGD(weights, lr=0.1))
        (True, False)
    """
    return not isinstance(optimizer, _SGD)


def is_adaptive_name(name: str) -> bool:
    """Returns the same for the name of an optimizer of `torch.optim`.

    >>> is_adaptive_name("AdamW"), is_adaptive_name("SGD")
    (True, False)
    """
    return name not in [kind.__name__ for kind in _SGD]


def takes_few_bits(codec: Codec) -> bool:
    """Returns whether a codec keeps fewer than 8 bits of a value.

    >>> from thinwire.codecs.registry import codec
    >>> takes_few_bits(codec("3lc")), takes_few_bits(codec("int8"))
    (True, False)
    """
    return codec.id not in ("fp32", "fp16", "bf16", "int8")


def few_bits_warning(optimizer: str, codec: str) -> str:
    """Returns what to tell of a codec of few bits for the gradients of an adaptive optimizer."""
    return (
        f"{codec} codes gradients in fewer than 8 bits, and {optimizer} divides them by their own size: with ternary "
        "gradients and AdamW a byte transformer ended its first 60 steps at a loss of 2.97 where uncompressed training "
        "has 2.58. optimizer = tw.distribute(model, optimizer) exchanges what the optimizer does, in as few bits; "
        "codec='int8' keeps the loss too"
    )


def local_steps(compute_s: float, all_reduce_s: float, exchange_s: float, rounds: Sequence[int] = ROUNDS) -> int:
    """Returns how many steps a round of local updates has; 1 means a plain all-reduce of every gradient.

    Args:
        compute_s: of a step without communication, in seconds.
        all_reduce_s: of all gradients uncompressed over this link, in seconds.
        exchange_s: of one exchange of local updates over this link, in seconds.
        rounds: choices, ascending; the first with which exchanges take `EXCHANGE_SHARE` of the time or less, else the
            last.

    Example:
        >>> local_steps(0.1, 0.005, 0.001), local_steps(0.1, 0.5, 0.05), local_steps(0.1, 5.0, 0.3)
        (1, 4, 16)
    """
    if all_reduce_s < PLAIN_SHARE * compute_s:
        return 1
    fits = (steps for steps in rounds if exchange_s <= EXCHANGE_SHARE * (steps * compute_s + exchange_s))
    return next(fits, rounds[-1])
