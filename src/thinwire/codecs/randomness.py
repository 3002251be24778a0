"""Where random schemes get their numbers: one key for each (seed, tensor name, step).

Numbers are keyed, not continued, so results depend neither on the order of layers nor on threads, and a resumed run
draws what the first one drew.
"""

from __future__ import annotations

import hashlib

import numpy as np

from thinwire.codecs.scheme import Key


def random_key(seed: int, name: str, step: int) -> Key:
    """Returns the key of one tensor's random numbers at one step, for the kernels' counter-based generator.

    It is the first number of a Philox generator that is keyed with a hash of all three.

    Example:
        >>> random_key(1, "conv1.weight", 0) == random_key(1, "conv1.weight", 0) != random_key(1, "conv1.weight", 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}".encode(), digest_size=16).digest()
    word = int(np.random.Philox(key=int.from_bytes(digest, "little")).random_raw())
    return word & 0xFFFFFFFF, word >> 32
