"""Attacks on a server by an unauthenticated caller or a worker that exceeds its rights, while another worker trains.

`Watch` records bytes between the transport and the decoder: other bytes were not decoded.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import pytest
import torch
from torch import nn

import thinwire as tw
from tests.security.conftest import Pki
from thinwire.errors import ProtocolError, TransportError
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.limits import MAX_JOIN_NBYTES
from thinwire.runtime.serving import serving
from thinwire.schema import Acknowledged, Join, Refused, SessionAccepted, SessionOpen, Values, Welcome
from thinwire.server.core import ServerCore
from thinwire.transports.base import Handler, Sender, Server
from thinwire.transports.grpc import GrpcOptions, Tls
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.options import METHOD, SERVICE, TOKEN_KEY, TOKEN_SCHEME
from thinwire.transports.grpc.server import MAX_SESSIONS_EACH, serve

WAIT_S = 20.0
FAIL_S = 0.3
"""How long an attack waits whose connection never comes about."""
LARGE_NBYTES = 255 * 2**20
SETTINGS: dict[str, Any] = {"batch": 32, "steps": 1000, "data digest": "5eed"}


class Watch:
    """A handler in front of the server's, which keeps what comes out of the transport."""

    def __init__(self, inner: Handler) -> None:
        self.opened_peers: list[int] = []
        self.packets: list[tuple[int, bytes]] = []
        self.inner = inner

    def opened(self, peer: int) -> None:
        self.opened_peers.append(peer)
        self.inner.opened(peer)

    def received(self, peer: int, packet: bytes) -> None:
        self.packets.append((peer, packet))
        self.inner.received(peer, packet)

    def closed(self, peer: int, error: str | None) -> None:
        self.inner.closed(peer, error)


class Training:
    """A server with credentials, and worker 0, which can take steps alone."""

    def __init__(self, pki: Pki) -> None:
        self.pki, self.core = pki, ServerCore()
        handler = serving(self.core, grace_s=30.0)

        def watched(sender: Sender) -> Watch:
            self.watch = Watch(handler(sender))
            return self.watch

        self.server: Server = serve(watched, "127.0.0.1:0", options=pki.server().server())
        self.address = self.server.address
        self.port = int(self.address.rpartition(":")[2])
        self.opt, self.model = self.join(0)

    def join(self, rank: int, **settings: Any) -> tuple[Any, nn.Module]:
        """Joins as an honest worker does."""
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = tw.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            server=f"grpc://{self.address}",
            rank=rank,
            workers=2,
            codec="fp32",
            consistency="asp",
            credentials=self.pki.worker(rank),
            **{"settings": SETTINGS, "timeout": WAIT_S, **settings},
        )
        return opt, model

    def step(self, opt: Any, model: nn.Module) -> float:
        opt.zero_grad()
        loss = (model(torch.ones(8, 4)) - 3.0).square().mean()
        loss.backward()
        opt.step()
        opt.sync()
        return float(loss.detach())

    def trains_on(self) -> bool:
        """Whether two more steps of the honest worker lower its loss."""
        first, second = (self.step(self.opt, self.model) for _ in range(2))
        return second < first and self.core.failed is None

    def options(self, rank: int = 1, **changed: Any) -> GrpcOptions:
        """Returns the credentials of worker `rank`, with changes."""
        return replace(self.pki.worker(rank).worker(rank), **changed)

    def say(self, *packets: bytes, rank: int = 1) -> str:
        """Says something as the true worker `rank`; returns why the server ends the session."""
        with connect(self.address, connect_timeout_s=WAIT_S, options=self.options(rank)) as connection:
            for packet in packets:
                with suppress(TransportError):  # it may be over already
                    connection.send(packet)
            while (answer := connection.receive(WAIT_S)) is not None:
                if kind_of(answer) is not SessionAccepted:
                    message, _ = parse(answer)
                    return message.reason if isinstance(message, Refused) else type(message).__name__
        return "ended"

    def first(self, kind: type[Any]) -> Any:
        """The honest worker's first message of a kind."""
        return next(parse(packet)[0] for _, packet in self.watch.packets if kind_of(packet) is kind)


@pytest.fixture(scope="module")
def training(pki: Pki) -> Iterator[Training]:
    training = Training(pki)
    yield training
    training.server.stop(grace_s=0)


# ---- strangers


def dial(training: Training, options: GrpcOptions, address: str = "", timeout_s: float = WAIT_S) -> str:
    """Connects as a worker and sends messages; returns the server's answer."""
    try:
        with connect(address or training.address, connect_timeout_s=timeout_s, options=options) as connection:
            connection.send(b"stranger")
            return str(connection.receive(timeout_s))
    except TransportError as error:
        return str(error)


def dial_in_vain(training: Training, tls: Tls) -> str:
    """Connects where the server hangs up in the middle of the handshake."""
    return dial(training, training.options(tls=tls), timeout_s=FAIL_S)


def shout(training: Training, token: str | None, message: bytes, method: str = METHOD, key: str = TOKEN_KEY) -> str:
    """Sends a message behind a good certificate without waiting for the server's greeting; a token with its scheme."""
    metadata = () if token is None else ((key, token),)
    tls = training.options().tls
    assert tls is not None
    credentials = grpc.ssl_channel_credentials(tls.root, tls.key, tls.certificate)
    with grpc.secure_channel(training.address, credentials, [("grpc.max_send_message_length", -1)]) as channel:
        path = method if method.startswith("/") else f"/{SERVICE}/{method}"
        call = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
        try:
            return str(list(call(iter([message]), metadata=metadata, timeout=WAIT_S)))
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"


def throw(training: Training, *parts: bytes) -> str:
    """Sends bytes to the port."""
    with socket.create_connection(("127.0.0.1", training.port), timeout=WAIT_S) as thrown:
        for part in parts:
            thrown.sendall(part)
        return "thrown"


def certificate(
    training: Training, *, own: bool = False, days: float = 1.0, usage: Any = "worker", hosts: Sequence[str] = ()
) -> Tls:
    """A certificate of worker 1, by the training's own authority or by a stranger's, in place of the true one."""
    tls = training.options().tls
    assert tls is not None
    authority = training.pki.authority if own else training.pki.stranger
    issued = authority.issue("worker-1", ["worker-1", "127.0.0.1", *hosts], usage, days=days)
    return replace(tls, certificate=issued.certificate, key=issued.key)


def nameless(training: Training) -> Tls:
    return replace(certificate(training), certificate=None, key=None)


def of_two_ranks(training: Training) -> Tls:
    return certificate(training, own=True, hosts=["worker-0"])


def stranger_root(training: Training) -> Tls:
    tls = training.options().tls
    assert tls is not None
    return replace(tls, root=training.pki.stranger.issued.certificate)


CLOSED = "it hung up; it may want a certificate"
USES_TLS = "uses TLS, and this worker does not: give it --tls-ca"
NO_TOKEN = "UNAUTHENTICATED: it showed no token"
WRONG = "the server does not know its token"
TWO_RANKS = "its certificate and token are for ranks 0 and 1; give it those of one rank"
STRANGERS: dict[str, tuple[Callable[[Training], str], str]] = {
    "plaintext to the TLS port": (lambda t: dial(t, GrpcOptions()), USES_TLS),
    "plaintext with a true token": (lambda t: dial(t, t.options(tls=None)), USES_TLS),
    "no certificate": (lambda t: dial(t, t.options(tls=nameless(t))), "lets in only workers with a certificate"),
    "a certificate of another authority": (lambda t: dial_in_vain(t, certificate(t)), CLOSED),
    "a certificate that has expired": (lambda t: dial_in_vain(t, certificate(t, own=True, days=-1)), CLOSED),
    "a server's certificate": (lambda t: dial_in_vain(t, certificate(t, own=True, usage="server")), CLOSED),
    "a worker that trusts another authority": (lambda t: dial_in_vain(t, stranger_root(t)), "do not trust"),
    "no token": (lambda t: dial(t, t.options(token=None)), "does not let this worker in: it showed no"),
    "a wrong token": (lambda t: dial(t, t.options(token=lambda: "x" * 43)), WRONG),
    "a token cut short": (lambda t: dial(t, t.options(token=lambda: t.pki.secrets[1][:-1])), WRONG),
    "another rank's token": (lambda t: dial(t, t.options(token=t.options(0).token)), TWO_RANKS),
    "two ranks' certificate": (lambda t: dial(t, t.options(tls=of_two_ranks(t))), TWO_RANKS),
    "an empty token": (lambda t: shout(t, TOKEN_SCHEME, b"x"), WRONG),
    "a whole line of the token file": (lambda t: shout(t, f"{TOKEN_SCHEME}rank=1 {t.pki.secrets[1]}", b"x"), WRONG),
    "a token of 7,000 characters": (lambda t: shout(t, TOKEN_SCHEME + "x" * 7000, b"x"), WRONG),
    "another method": (lambda t: shout(t, None, b"x", method="Shutdown"), "UNIMPLEMENTED"),
    "another service": (lambda t: shout(t, None, b"x", method="/grpc.health.v1.Health/Watch"), "UNIMPLEMENTED"),
    "a token of another scheme": (lambda t: shout(t, "Basic " + t.pki.secrets[1], b"x"), WRONG),
    "a token in another header": (lambda t: shout(t, t.pki.secrets[1], b"x", key="token"), NO_TOKEN),
    "a large message before the greeting": (lambda t: shout(t, None, bytes(2**23)), NO_TOKEN),
    "a Join before the greeting": (lambda t: shout(t, None, pack(t.first(Join))), NO_TOKEN),
    "a sniffed session before the greeting": (lambda t: shout(t, None, pack(t.first(SessionOpen))), NO_TOKEN),
    "a web browser": (lambda t: throw(t, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), "thrown"),
    "HTTP/2 without TLS": (lambda t: throw(t, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(9)), "thrown"),
    "a TLS greeting cut short": (lambda t: throw(t, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), "thrown"),
    "noise": (lambda t: throw(t, bytes(range(256)) * 256), "thrown"),
    "a connection that says nothing": (lambda t: throw(t), "thrown"),
}


def test_messages_of_refused_callers_are_not_decoded(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    known = set(training.watch.opened_peers)
    for name, (attack, told) in STRANGERS.items():
        answer = attack(training)
        assert told in answer, f"{name}: {answer}"
        assert not any(secret in answer + caplog.text for secret in training.pki.secrets), name
        assert training.trains_on(), name
    assert set(training.watch.opened_peers) == {peer for peer, _ in training.watch.packets} == known
    assert "was not let in: " in caplog.text


def test_tls_to_a_plaintext_port_names_the_cause(training: Training) -> None:
    with serve(serving(ServerCore()), "127.0.0.1:0") as plain:
        answer = dial(training, training.options(), plain.address, timeout_s=WAIT_S)
    assert "do not trust each other" in answer and "WRONG_VERSION_NUMBER" in answer


# ---- workers that are known and go too far


def joining(training: Training, **changed: Any) -> bytes:
    """Worker 1's Join, with changes in it or in the plan."""
    join = training.first(Join)
    plan = msgspec.structs.replace(join.plan, **{k: v for k, v in changed.items() if k in join.plan.__struct_fields__})
    rest = {name: value for name, value in changed.items() if name in join.__struct_fields__}
    return pack(msgspec.structs.replace(join, **{"rank": 1, "plan": plan, **rest}))


def setting(training: Training, **changed: Any) -> bytes:
    """Worker 1's Join with other settings."""
    named = {name.replace("_", " "): value for name, value in changed.items()}
    return joining(training, settings={**training.first(Join).plan.settings, **named})


def ninth(training: Training) -> str:
    """Holds eight sessions, and opens another."""
    with ExitStack() as stack:
        for _ in range(MAX_SESSIONS_EACH):
            stack.enter_context(connect(training.address, connect_timeout_s=WAIT_S, options=training.options()))
        return shout(training, TOKEN_SCHEME + training.pki.secrets[1], b"x")


ANOTHERS = "this session is another worker's: continue with the certificate and rank that began it"


def opening(name: str, **said: Any) -> bytes:
    return pack(SessionOpen(session=name, **said))


KNOWN: dict[str, tuple[Callable[[Training], str], str]] = {
    "a Join as another rank": (lambda t: t.say(joining(t, rank=0)), "rank 0: this worker's certificate or token"),
    "another worker's session": (lambda t: t.say(pack(t.first(SessionOpen))), ANOTHERS),
    "that session, with counts": (lambda t: t.say(opening(t.first(SessionOpen).session, received=3)), ANOTHERS),
    "a session that never was": (lambda t: t.say(opening("f" * 32, received=1)), "does not know the session"),
    "a session opened twice": (lambda t: t.say(*[opening("e" * 32)] * 2), "SessionOpen came before Join"),
    "acknowledgements of too much": (
        lambda t: t.say(opening("d" * 32), pack(Acknowledged(count=9))),
        "acknowledges 9 messages",
    ),
    "nine sessions at a time": (lambda t: ninth(t), "RESOURCE_EXHAUSTED: rank 1 has 8 sessions with the server"),
    "a rank below zero": (lambda t: t.say(joining(t, rank=-1)), "rank -1: this worker's certificate"),
    "another seed": (lambda t: t.say(setting(t, seed=7)), "seed: this worker has 7, the others 0"),
    "other data": (lambda t: t.say(setting(t, data_digest="0")), "data digest: this worker has '0', the others '5eed'"),
    "settings without end": (
        lambda t: t.say(setting(t, **{str(n): n for n in range(99)})),
        "Expected `object` of",
    ),
    "another thinwire": (lambda t: t.say(joining(t, version="9.9")), "version: this worker runs thinwire 9.9"),
    "another number of workers": (lambda t: t.say(joining(t, workers=3)), "this worker expects 3 workers"),
    "values before Join": (lambda t: t.say(pack(Values(tables=(), versions=()))), "Values came before Join"),
    "a server's words": (lambda t: t.say(pack(Welcome(send_values=True))), "Welcome came before Join"),
    "garbage": (lambda t: t.say(b"\xff" * 64), "a packet begins with b'TP'"),
    "a Join in a larger packet": (lambda t: t.say(joining(t) + bytes(8)), "bytes is declared and"),
    "a Join of 1 MiB": (lambda t: t.say(joining(t) + bytes(MAX_JOIN_NBYTES)), "a first message of more than 1048576"),
    "the largest message before Join": (lambda t: t.say(bytes(LARGE_NBYTES)), "a first message of more than 1048576"),
    "a session's name of 100 kB": (lambda t: t.say(opening("x" * 100_000)), "a SessionOpen of 1000"),
}


def test_misbehaving_worker_ends_only_its_own_session(training: Training) -> None:
    for name, (attack, told) in KNOWN.items():
        answer = attack(training)
        assert answer.startswith(told) or told in answer[:120], f"{name}: {answer}"
        assert training.trains_on(), name
    with pytest.raises(ProtocolError, match="seed: this worker has 1, the others 0; start all workers with the same"):
        training.join(1, seed=1)
    opt, model = training.join(1)
    with opt:
        assert training.step(opt, model) > 0, "and the true worker 1 is let in after all of it"
    assert training.trains_on()
