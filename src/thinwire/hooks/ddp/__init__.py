"""One line in an existing DistributedDataParallel script: `ddp.compress(model, codec="3lc", sparsity=1.0)`.

hook         compress() and the hook itself: the adapter to DDP's register_comm_hook
state        DDP's buckets, added to the state that checkpoints contain (`hooks.exchange.state`)
all_ranks    the states of all ranks as one

The exchange itself is `thinwire.collective`, driven by `thinwire.runtime.collective` over `thinwire.transports.gloo`.
"""

from __future__ import annotations

from thinwire.hooks.ddp.all_ranks import AllRanks
from thinwire.hooks.ddp.hook import compress, thinwire_hook
from thinwire.hooks.ddp.state import ThinwireState
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.saved import merge
from thinwire.hooks.report import Report, report

__all__ = ["AllRanks", "ExchangeOptions", "Report", "ThinwireState", "compress", "merge", "report", "thinwire_hook"]
