"""What the hooks of equal ranks share, of DDP, FSDP2 and named tensors: how an exchange is set up, kept and told.

ranks        what ranks find and tell each other before training
options      what the user asks for, checked, and the exchange that is made of it
state        what is kept between steps and travels with a checkpoint, and
    saved        what such a state is made of; `merge` joins that of all ranks
auto         `codec="auto"`: the setting of every step, with
    flush        residuals go into the first uncompressed step

The exchange itself is `thinwire.collective`, driven by `thinwire.runtime.collective`. `hooks/records.py` makes step
records for metrics writers, and `hooks/report.py` says what compression cost and saved.
"""
