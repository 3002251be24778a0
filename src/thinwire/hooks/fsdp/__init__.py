"""One line in an existing FSDP2 script: `fsdp.compress(model, codec="3lc", sparsity=1.0)`.

hook               compress(), and the exchanges that replace FSDP2's reductions
state              the step under way, and residuals, which other shards and replicas can load
gathering          parameters gathered as frames
parameter_groups   FSDP2's parameter groups, by torch's private names
passes             FSDP2's forward and backward passes, by torch's private names

The exchange itself is `thinwire.collective`, driven by `thinwire.runtime.collective` over `thinwire.transports.gloo`.
"""

from __future__ import annotations

from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.saved import merge
from thinwire.hooks.fsdp.hook import compress
from thinwire.hooks.fsdp.state import ShardedState
from thinwire.hooks.report import Report, report

__all__ = ["ExchangeOptions", "Report", "ShardedState", "compress", "merge", "report"]
