"""What a tensor of a model is called, whatever torch has wrapped around the model. It knows torch's private names.

`torch.compile(model)` keeps the model in `_orig_mod`, and torch's activation checkpointing in
`_checkpoint_wrapped_module`. Both put their name into the names of parameters and buffers. Plans and states name a
tensor without them, so that a checkpoint fits the same model compiled and not compiled.
"""

from __future__ import annotations

COMPILED = "_orig_mod"
"""Where `torch.compile` keeps the module that it was given."""
_WRAPPERS = (f"{COMPILED}.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Returns a parameter's or buffer's name as the model has it without wrappers.

    Example:
        >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight")
        'blocks.0.fc.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
