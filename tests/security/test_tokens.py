"""Token files: what a line may be, whose a token is, and that a change counts at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.security.tokens import Token, TokenFile, new_token, parse_tokens

ONE, TWO, THREE = (f"{number}-{'x' * 20}" for number in ("one", "two", "three"))


def test_lines_are_tokens_of_a_rank_or_of_any() -> None:
    text = f"# of the training\n\n{ONE}\nrank=3 {TWO}   # the third site\n  rank=12\t{THREE}\n"
    assert parse_tokens(text, "f") == (Token(ONE), Token(TWO, 3), Token(THREE, 12))
    assert parse_tokens(new_token(), "f")[0].rank is None
    assert parse_tokens(f"rank=3 {ONE}\nrank=3 {ONE}", "f") == (Token(ONE, 3),) * 2, "twice the same does no harm"


def test_bad_token_files_are_refused_by_line_and_without_a_secret() -> None:
    for text, why in (
        ("", "holds no token"),
        ("# nothing\n", "holds no token"),
        (f"{ONE}\nshort", "line 2: a token of 5 characters; 16 to 256"),
        ("x" * 257, "line 1: a token of 257 characters"),
        (f"{ONE} {TWO}", "line 1: expected TOKEN or rank=3 TOKEN"),
        (f"rank=x {ONE}", "line 1: expected TOKEN or rank=3 TOKEN"),
        (f"rank=3{ONE}", "line 1: expected TOKEN or rank=3 TOKEN"),
        (f"rank=-1 {ONE}", "line 1: expected TOKEN or rank=3 TOKEN"),
        ("ümlaut" * 4, "line 1: expected TOKEN"),
        (f"{ONE}\n{TWO}\n{THREE}", "3 tokens for any rank; at most two hold at once"),
        (f"rank=1 {ONE}\nrank=1 {TWO}\nrank=1 {THREE}", "3 tokens for rank 1"),
        (f"rank=1 {ONE}\n\nrank=2 {ONE}", "line 3: the token of line 1 again, for rank 2 and not rank 1"),
        (f"rank=1 {ONE}\n{ONE}", "line 2: the token of line 1 again, for any rank and not rank 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)) as caught:
            parse_tokens(text, "f")
        assert not any(secret in str(caught.value) for secret in (ONE, TWO, THREE)), text
    assert ONE not in repr(Token(ONE, 3))


def write(path: Path, text: str) -> None:
    """Writes the file anew; a second within the clock's resolution would not show."""
    later = path.stat().st_mtime_ns + 1_000_000 if path.exists() else None
    path.write_text(text)
    if later is not None:
        os.utime(path, ns=(later, later))


def test_a_token_is_replaced_while_both_hold(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    write(path, f"rank=1 {ONE}")
    tokens = TokenFile(path)
    assert tokens.own(1) == ONE and tokens.find(ONE) == Token(ONE, 1) and tokens.find(TWO) is None
    write(path, f"rank=1 {TWO}\nrank=1 {ONE}")
    assert tokens.own(1) == TWO and tokens.find(ONE) == Token(ONE, 1) and tokens.find(TWO) == Token(TWO, 1)
    write(path, f"rank=1 {TWO}")
    assert tokens.find(ONE) is None and tokens.find(TWO) == Token(TWO, 1)
    with pytest.raises(ConfigError, match="has no token for rank 2"):
        tokens.own(2)


def test_an_unreadable_token_file_lets_no_peer_in_until_it_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(ConfigError, match=r"tokens' cannot be read: No such file"):
        TokenFile(path)
    write(path, ONE)
    tokens = TokenFile(path)
    for broken in ("short", ""):
        write(path, broken)
        for _ in range(2):
            with pytest.raises(ConfigError):
                tokens.find(ONE)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens.find(ONE)
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="it is no text"):
        tokens.find(ONE)
    path.write_text(f"{ONE}\r\n", "utf-8-sig")  # with an editor's mark
    assert tokens.find(ONE) == Token(ONE)
