"""Fast arithmetic of the codecs on flat arrays: no frames, threads or state between calls.

`numba` computes on the CPU and `triton` on a GPU: the same functions, equal byte for byte. `contract` has the constants
and checks that both use. Importing this package imports neither.
"""
