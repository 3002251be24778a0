"""The version of this thinwire, for the files that may not import the package."""

VERSION = "0.9.0"
