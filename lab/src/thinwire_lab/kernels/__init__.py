"""Numba kernels of the codecs here."""
