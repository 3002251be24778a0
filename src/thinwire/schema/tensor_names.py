"""Names of a model's tensors without the names of torch's wrappers, which are private to torch.

`torch.compile(model)` keeps the model in `_orig_mod`, and torch's activation checkpointing in
`_checkpoint_wrapped_module`. Both names become parts of the names of parameters and buffers. Plans and states omit
them, so that a checkpoint fits the same model with and without compilation.
"""

from __future__ import annotations

COMPILED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the original module."""
_WRAPPERS = (f"{COMPILED}.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Returns a parameter's or buffer's name in the model without wrappers.

    Example:
        >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight")
        'blocks.0.fc.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
