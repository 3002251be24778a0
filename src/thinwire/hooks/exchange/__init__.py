"""Set-up, state and reports of an exchange, for the hooks of DDP, FSDP2 and named tensors.

ranks        connects ranks, and describes their model
options      the arguments of compress, and the exchange that is built from them
state        residuals, step and counters between steps, with
    checkpoints  saving and loading
    saved        checks of a saved state; `merge` joins those of all ranks
auto         `codec="auto"`: the setting of every step, with
    flush        adds residuals to the first uncompressed step

The exchange itself is `thinwire.collective`, driven by `thinwire.runtime.collective`. `hooks/records.py` makes step
records for metrics writers, and `hooks/report.py` reports compression's costs and savings.
"""
