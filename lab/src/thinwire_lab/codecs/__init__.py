"""Codecs that only papers compare; `thinwire.codecs` has the product's."""
