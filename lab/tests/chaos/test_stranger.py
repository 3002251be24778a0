"""A stranger says what it should say: the same for a seed, and well-formed as far as it claims to be."""

from __future__ import annotations

import random

from thinwire_lab.chaos import stranger


def test_what_strangers_say() -> None:
    for kind in ("bytes", "http2", "message"):
        words = stranger.said(kind, random.Random("7"), "/service/method")
        assert words == stranger.said(kind, random.Random("7"), "/service/method") and words, kind
        assert words.startswith(b"PRI * HTTP/2.0") == (kind != "bytes"), kind


def test_a_message_is_a_call_with_a_body_of_the_length_that_it_says() -> None:
    words = stranger.said("message", random.Random("7"), "/service/method")
    words = words.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    kinds = []
    while words:
        size, kind, body = int.from_bytes(words[:3], "big"), words[3], words[9:]
        kinds.append(kind)
        last, words = body[:size], body[size:]
    assert kinds == [4, 1, 0], "settings, headers, data"
    assert int.from_bytes(last[1:5], "big") == len(last) - 5
