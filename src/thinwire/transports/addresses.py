"""Addresses of a session's ends, `host:port`, split. It looks up no name and opens no connection."""

from __future__ import annotations

from ipaddress import ip_address

from thinwire.errors import ConfigError

SCHEME = "grpc://"
MAX_PORT = 65_535


def parse_address(address: str) -> tuple[str, int]:
    """Splits `host:port`, with or without `grpc://` before it.

    Raises:
        ConfigError: no host, or no port between 0 and 65535. IPv6 hosts need brackets.

    >>> parse_address("grpc://10.0.0.1:50051"), parse_address("[::1]:0")
    (('10.0.0.1', 50051), ('[::1]', 0))
    """
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not host or "/" in host or bare_ipv6 or not 0 <= number <= MAX_PORT:
        raise ConfigError(f"{address!r} is no address; give host:port or grpc://host:port, IPv6 in brackets")
    return host, number


def parse_dialled(address: str) -> tuple[str, int]:
    """Splits the address of a server to connect to. Raises ConfigError as `parse_address`, and for port 0."""
    host, port = parse_address(address)
    if port == 0:
        raise ConfigError(f"{address!r} has port 0; connect to the port that the server reports")
    return host, port


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; False for all names other than localhost.

    >>> [is_loopback(host) for host in ("127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::]", "10.0.0.1", "me")]
    [True, True, True, False, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
