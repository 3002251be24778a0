"""Codecs that papers compare with, as `thinwire.codecs` has the others."""
