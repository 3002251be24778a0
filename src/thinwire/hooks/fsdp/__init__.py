"""One line in an existing FSDP2 script: `fsdp.compress(model, codec="3lc", sparsity=1.0)`.

hook               compress(), and what FSDP2 calls in place of its own reductions
state              the step under way, and residuals that go on with other shards and replicas
gathering          parameters gathered as frames
parameter_groups   FSDP2's parameter groups, and the only file that touches torch's private names

The exchange itself is `thinwire.collective`, driven by `thinwire.runtime.collective` over `thinwire.transports.gloo`.
"""

from __future__ import annotations

from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.saved import merge
from thinwire.hooks.fsdp.hook import compress
from thinwire.hooks.fsdp.state import ShardedState
from thinwire.hooks.report import Report, report

__all__ = ["ExchangeOptions", "Report", "ShardedState", "compress", "merge", "report"]
