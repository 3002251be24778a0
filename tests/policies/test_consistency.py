"""How consistency policies are named, and what is no policy."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError
from thinwire.policies.consistency import SHIPPED, Asp, Backup, Bsp, Consistency, Local, Ssp, consistency, name_of


@pytest.mark.parametrize(
    "name",
    [
        "bsp",
        "asp",
        "ssp[5]",
        "ssp[staleness=5]",
        "ssp[τ=5,mode=aggressive]",
        "backup[1]",
        "backup[b=2]",
        "local[k=4]",
        "adaptive[norm,threshold=0.05]",
        "adaptive[time]",
    ],
)
def test_the_full_name_makes_an_equal_policy(name: str) -> None:
    policy = consistency(name)
    assert consistency(name_of(policy)) == policy
    assert consistency(policy) is policy
    assert name_of(consistency(name_of(policy))) == name_of(policy)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("bsp", Bsp()),
        ("asp", Asp()),
        ("ssp[3]", Ssp(staleness=3)),
        ("ssp[τ=3,mode=traditional]", Ssp(staleness=3, mode="traditional")),
        ("backup", Backup(spare=1)),
        ("local[k=3]", Local(steps=3)),
    ],
)
def test_short_names(name: str, policy: Consistency) -> None:
    assert consistency(name) == policy


@pytest.mark.parametrize("kind", SHIPPED)
def test_every_policy_says_what_it_is_and_where_it_comes_from(kind: type[Consistency]) -> None:
    assert consistency(kind.id).about().endswith(")")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("psp", "unknown consistency 'psp'; there are bsp, asp, ssp, backup, local, adaptive"),
        ("ssp[-1]", r"ssp: staleness is -1; it must be a whole number of at least 0"),
        ("ssp[staleness=true]", "staleness is True"),
        ("ssp[1.5]", "staleness is 1.5"),
        ("ssp[2,mode=lazy]", "mode='lazy'; allowed are passive, aggressive and traditional"),
        ("backup[-1]", "spare is -1"),
        ("local[0]", "steps is 0; it must be a whole number of at least 1"),
        ("bsp[staleness=1]", r"consistency bsp: unknown options \['staleness'\]; there are \[\]"),
        ("bsp[1]", "'1' is not option=value"),
        ("adaptive[mood]", "unknown criterion 'mood'"),
        ("adaptive[norm,threshold=-1]", "threshold=-1"),
        ("adaptive[norm,threshold=nan]", "threshold='nan'"),
    ],
)
def test_what_is_no_policy(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        consistency(name)
