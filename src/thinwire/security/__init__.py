"""Authentication: certificates, tokens, and the credentials of a process. See docs/security.md."""

from thinwire.security.credentials import Credentials

__all__ = ["Credentials"]
