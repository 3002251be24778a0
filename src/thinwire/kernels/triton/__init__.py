"""The codecs' arithmetic in Triton, for tensors on a GPU: the same bytes and the same residual bits as on the CPU.

All functions work on a *batch*, a list of flat tensors of one type on one device; one tensor is a batch of one. A few
launches encode a batch of any number of tensors. `batch` maps programs to values, `workspace` owns the memory and the
stream, and each codec has a file.

Importing this package does not import Triton; importing one of its files does. Triton's interpreter
(`TRITON_INTERPRET=1`, set before Triton is imported) runs every kernel on CPU tensors.
"""

from __future__ import annotations

from importlib.util import find_spec


def missing() -> str | None:
    """Returns why no kernel of this package can run here; None where kernels can.

    Example:
        >>> missing() is None or "pip install" in missing()
        True
    """
    return None if find_spec("triton") else "Triton is not installed (pip install triton)"
