"""Who may take part: certificates, tokens, and what a process shows of its own. See docs/security.md."""

from thinwire.security.credentials import Credentials

__all__ = ["Credentials"]
