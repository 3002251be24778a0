"""From which step a worker continues with all others, by what its shards have answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from thinwire.errors import ConfigError
from thinwire.schema import Offer


def agreed_step(offers: Mapping[int, Offer]) -> int | None:
    """Returns the step that all workers with the same offers choose; None while another answer must be waited for.

    Shards at which others train decide for themselves. Elsewhere it is the newest of the steps that most workers hold a
    state of; or, where nothing but connections was lost, that of the shard which is ahead of the others.

    Args:
        offers: by shard, of those that hold parameters.

    Raises:
        ConfigError: the shards have no step in common.

    Example:
        >>> saved = Offer(steps=(75, 50), held=(1, 2))
        >>> agreed_step({0: saved, 1: Offer(steps=(100, 75, 50), held=(0, 1, 2))})
        50
        >>> agreed_step({0: Offer(begin=7), 1: Offer(begin=8)}), agreed_step({0: Offer(begin=7), 1: saved})
        (8, None)
    """
    begins = {offer.begin for offer in offers.values() if offer.begin >= 0}
    waiting = [offer for offer in offers.values() if offer.begin < 0]
    if not waiting:
        return max(begins, default=0)
    held: Counter[int] = Counter()
    for offer in waiting:
        held.update(dict(zip(offer.steps, offer.held, strict=True)))
    if common := set.intersection(*({*offer.steps} for offer in waiting)):
        step = max(common, key=lambda each: (held[each], each))
    elif all(offer.newest >= 0 for offer in waiting):
        step = max(offer.newest for offer in waiting)
    else:
        said = "; ".join(
            f"shard {shard}: {' and '.join(map(str, offer.steps)) or 'none'}" for shard, offer in offers.items()
        )
        raise ConfigError(f"there is no step that all shards can go back to with all workers: {said}")
    # Workers that train at one shard, and have lost another one, are about to leave the first.
    return step if begins <= {step} else None
