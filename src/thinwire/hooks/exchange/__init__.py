"""Set-up, state and reports of an exchange, for the hooks of DDP, FSDP2 and named tensors.

ranks        ranks meet, and describe their model
options      the arguments of compress, and the exchange that is built from them
state        residuals, step and counters between steps, with
    checkpoints  its part that is saved and loaded
    saved        checks of a saved state; `merge` joins those of all ranks
auto         `codec="auto"`: the setting of every step, with
    flush        residuals go into the first uncompressed step

The exchange itself is `thinwire.collective`, driven by `thinwire.runtime.collective`. `hooks/records.py` makes step
records for metrics writers, and `hooks/report.py` says what compression cost and saved.
"""
