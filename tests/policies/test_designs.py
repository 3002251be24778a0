"""Designs by name, options in brackets; and which tensors of a model are compressed, and how."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar

import pytest

from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.policies import designs as module
from thinwire.policies import naming
from thinwire.policies.compression import (
    MIN_NUMEL,
    PLAIN,
    ByShape,
    Choice,
    as_codec,
    check_pull_codec,
    select,
)
from thinwire.policies.consistency import POLICIES, Consistency, consistency
from thinwire.policies.designs import Design, design, designs


def test_every_design_that_is_listed_can_be_made() -> None:
    for name in designs():
        made = design(name)
        assert made.name == name and made.cite and designs()[name]
        policy = made.compress()
        assert policy.choose("fc.weight", (100, 100)).up == made.up, name
        assert policy.choose("fc.weight", (100, 100)).down == made.down, name
        small = (
            "fp32"
            if made.local is None
            else "3lc"
            if name in ("decoupled", "diloco", "streaming-diloco", "sparseloco")
            else "bf16"
        )
        assert policy.choose("fc.bias", (100,)).up.id == small, name
        choices = json.loads(json.dumps(made.choices()))
        assert codec(**choices["up"]) == made.up and codec(**choices["down"]) == made.down, name
        assert set(choices) == set(Design.__dataclass_fields__)


def test_options_go_to_the_codec_both_ways() -> None:
    named: dict[str, dict[str, Any]] = {
        "3lc": {},
        "3lc[s=1.75]": {"sparsity": 1.75},
        "3lc[ s = 1.5 , entropy = zstd ]": {"sparsity": 1.5, "entropy": "zstd"},
        "3lc[zero_run=False,layout=partition]": {"zero_run": False, "layout": "partition"},
        "3lc[error_feedback=null]": {"error_feedback": None},
    }
    for name, options in named.items():
        made = design(name)
        assert made.up == codec("3lc", **options) == made.down, name
        assert made.name == name
    mps = design("mps[entropy=zstd,error_scale=0.5]")
    assert mps.up == codec("topk", entropy="zstd", error_scale=0.5, error_feedback=True)
    assert mps.down == codec("topk", entropy="zstd", error_feedback=True)


def test_a_codec_that_selects_is_of_pushes_alone_and_has_the_designs_options() -> None:
    found, own = design("diloco[h=30,codec=blocktopk]"), design("diloco[h=30]")
    assert (found.up.id, found.up.config()["k"], found.up.config()["bits"]) == ("blocktopk", 768, 3)
    assert (found.down, found.compression) == (own.down, own.compression), "what is left out of a pull waits everywhere"
    for given in ("codec=blocktopk[k=512]", "codec=blocktopk,k=512"):
        with_own = design(f"diloco[{given}]").up.config()
        assert (with_own["k"], with_own["bits"]) == (512, 2), "options of one's own come with the codec's defaults"
    assert design("diloco[codec=blocktopk,block=512]").up.config()["k"] == 64
    both = design("diloco[codec=blocktopk,codec_down=blocktopk[k=9]]")
    assert (both.up.config()["k"], both.down.config()["k"]) == (768, 9)
    assert design("sparseloco[codec=topk]").down.id == "topk", "its own selects as well"
    assert design("diloco[codec=int8]").down.id == "int8"


def test_policies_in_a_name_replace_the_designs_own() -> None:
    made = design("mps[fraction=0.02,consistency=bsp,placement=uniform[min=0],transmission=traditional]")
    assert made.up == made.down == codec("topk", fraction=0.02, error_feedback=True)
    assert (made.consistency, made.placement, made.transmission) == ("bsp", "uniform[min=0]", "traditional")
    assert (
        design("3lc[s=1.75,consistency=ssp[staleness=5,mode=passive]]").consistency == "ssp[staleness=5,mode=passive]"
    )
    assert design("entropy[consistency=local[steps=3]]").every == "step"
    assert design("fp32[consistency=ssp[5]]", consistency="bsp").consistency == "bsp"


def test_what_is_no_design() -> None:
    for name, named in {
        "fp32[consistency=later]": "later",
        "terngrad[consistency=ssp[5]]": r"'terngrad\[consistency=ssp\[5\]\]'",
        "4lc": r"'4lc' \(did you mean '3lc'\?\); there are fp32, .*3lc",
        "auto": "'auto' is no design",
        "": "design ''; expected an id",
        "3lc[s=2]": "sparsity=2",
        "3lc[clip=0.4]": "clip=0.4",
        "3lc[sparsty=1.5]": r"'sparsty' \(did you mean 'sparsity'\?\)",
        "fp32[s=1.5]": "unknown option 'sparsity'",
    }.items():
        with pytest.raises(ConfigError, match=named):
            design(name)


# ---- combinations that cannot work


NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    ("fp32", {"downlink": "sideways"}, "'sideways'"),
    ("mem-sgd-1bit", {"consistency": "asp"}, "with downlink=gradient"),
    ("entropy", {"consistency": "asp"}, "with downlink=weights"),
    ("entropy", {"consistency": "backup[1]"}, "the weights of all workers; here are .* backup"),
    ("entropy", {"up": codec("onebit")}, "codecs without a residual .* here are .*onebit"),
    ("entropy", {"consistency": "adaptive[norm]"}, "the weights of all workers; here are .* adaptive"),
    ("fp32", {"down": codec("votes")}, "votes are counted trits"),
    ("terngrad", {"up": codec("int8")}, "terngrad without a scale.* here are int8"),
    ("terngrad[last_layer=none]", {}, "last_layer 'none'"),
    ("terngrad", {"transmission": "wait-free"}, "bsp and transmission=traditional; .*=wait-free"),
    ("terngrad", {"down": codec("votes", workers=9)}, "votes without options"),
    ("fp32", {"compression": "by-hand"}, r"'by-hand' \(did you mean 'by-shape'\?\)"),
    ("3lc", {"down": codec("3lc", error_scale=0.5)}, "error_scale is 0.5"),
    ("3lc", {"reduce": "mean-of-senders"}, "the pushes are 3lc"),
    ("entropy", {"reduce": "sum"}, "reduce='sum' with downlink=weights"),
]


def test_nonsense_is_refused_with_the_reason() -> None:
    for name, change, named in NONSENSE:
        with pytest.raises(ConfigError, match=named):
            replace(design(name), **change)


def test_the_papers_choices() -> None:
    chosen: list[tuple[str, str, object]] = [
        ("local2[steps=4]", "consistency", "local[steps=4]"),
        ("mps[staleness=2]", "consistency", "ssp[staleness=2,mode=passive]"),
        ("mps", "placement", "heuristic"),
        ("terngrad[last_layer=same]", "last_layer", "same"),
        ("terngrad[ema=0.999]", "ema", 0.999),
        ("terngrad", "digest_every", 100),
        ("entropy", "every", "epoch"),
        ("entropy", "downlink", "weights"),
        ("doublesqueeze-topk", "downlink", "gradient"),
    ]
    for name, field, value in chosen:
        assert getattr(design(name), field) == value, (name, field)


def test_once_an_epoch_is_said_in_steps() -> None:
    assert design("entropy").with_epoch(7).consistency == "local[steps=7]"
    assert design("3lc").with_epoch(7) == design("3lc")
    assert design("entropy", consistency="local[3]").with_epoch(7).consistency == "local[3]", "chosen by the user"
    with pytest.raises(ConfigError, match="'entropy' exchanges once an epoch: give consistency="):
        design("entropy").check_counts_steps()


# ---- what other packages bring


@dataclass(frozen=True, kw_only=True)
class EveryOther(Consistency):
    """Of another package."""

    id: ClassVar[str] = "every-other"
    phase: int = 0

    def exchanges(self, iteration: int) -> bool:
        return iteration % 2 == self.phase


def theirs(consistency: str = "every-other", **options: Any) -> Design:
    """A design of another package."""
    return Design(name="theirs", up=codec("int8", **options), down=PLAIN, consistency=consistency, cite="theirs")


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("every-other", f"{__name__}:EveryOther", "thinwire.consistency")
    points = EntryPoints([point, EntryPoint("theirs", f"{__name__}:theirs", "thinwire.designs")])
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.value.partition(":")[2]])
    for each in (naming, module):
        monkeypatch.setattr(each, "plugins", lambda group: points.select(group=group))


@pytest.mark.usefixtures("other_package")
def test_another_packages_policies_and_designs_go_by_their_names() -> None:
    assert "every-other" in POLICIES.known() and "theirs" in designs()
    assert consistency("every-other[phase=1]") == EveryOther(phase=1)
    assert design("3lc", consistency="every-other").consistency == "every-other"
    with pytest.raises(ConfigError, match=r"'period'; the options are \['phase'\]"):
        consistency("every-other[period=1]")
    assert design("theirs[entropy=zstd]").up == codec("int8", entropy="zstd")


UP, DOWN = codec("3lc", sparsity=1.75), codec("int8")


def test_name_and_shape_decide() -> None:
    assert MIN_NUMEL == 128
    for shape, compressed in {
        (): False,
        (100_000,): False,  # a bias or a norm layer, however wide
        (0, 500): False,
        (MIN_NUMEL - 1, 1): False,
        (MIN_NUMEL, 1): True,
        (16, 8): True,
        (3, 3, 3, 5): True,
    }.items():
        expected = Choice(UP, DOWN) if compressed else Choice(PLAIN, PLAIN)
        assert ByShape(up=UP, down=DOWN).choose("any", shape) == expected, shape
    small = ByShape(up=UP, down=DOWN, min_numel=4)
    assert small.choose("w", (2, 2)).up is UP and small.choose("w", (3, 1)).up == PLAIN
    policy = ByShape(up=UP, down=DOWN, exclude=lambda name, shape: name.startswith("embed") or shape[0] == 999)
    assert policy.choose("embed.weight", (100, 100)) == policy.choose("fc.weight", (999, 100)) == Choice(PLAIN, PLAIN)
    assert policy.choose("fc.weight", (100, 100)) == Choice(UP, DOWN)


# ---- by name


# ---- every tensor of a model

SHAPES = {
    "first.weight": (30, 20),
    "first.bias": (30,),
    "mid.weight": (30, 30),
    "last.in": (30, 30),
    "last.out": (9, 30),
}
POLICY = ByShape(up=codec("3lc", sparsity=1.5), down=DOWN)


def test_the_policy_decides_and_exceptions_come_before_it() -> None:
    def ids(**exceptions: object) -> dict[str, str]:
        chosen = select(SHAPES, POLICY, **exceptions)  # type: ignore[arg-type]  # of both exceptions' types
        return {name: f"{choice.up.id}/{choice.down.id}" for name, choice in chosen.items()}

    both = {"first.weight": "3lc/int8", "first.bias": "fp32/fp32", "mid.weight": "3lc/int8"}
    last = {"last.in": "3lc/int8", "last.out": "3lc/int8"}
    assert ids() == both | last
    # The last layer is the module of the last matrix, with all of its tensors.
    assert ids(last_layer="fp32") == both | dict.fromkeys(last, "fp32/fp32")
    # Patterns come first, the first match wins, and a pattern takes vectors too.
    patterns = {"first.*": "bf16", "*.weight": "onebit", "last.in": codec("fp16")}
    matched = {"first.weight": "bf16/bf16", "first.bias": "bf16/bf16", "mid.weight": "onebit/onebit"}
    assert ids(codecs=patterns, last_layer="int8") == matched | {"last.in": "fp16/fp16", "last.out": "int8/int8"}
    assert select({"scale": (5,)}, POLICY, last_layer="int8")["scale"].up.id == "fp32", "a model without a matrix"


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.warns(UserWarning, match="terngrad"):
        random = codec("terngrad", error_feedback=True)
    both: dict[str, Any] = {"*.weight": "3lc", "a.*": "int8"}
    for call, named in (
        (lambda: select(SHAPES, POLICY, codecs={"conv*": "int8", "mid*": "int8"}), r"\['conv\*'\] match no parameter"),
        (lambda: select({"a.weight": (9, 9)}, POLICY, codecs=both), r"put 'a\.\*' first"),
        (lambda: select(SHAPES, ByShape(up=POLICY.up, down=random)), "first.weight: 'terngrad'"),
        (lambda: check_pull_codec(random, "pulls"), "pulls: "),
        (lambda: as_codec(POLICY.up, {"sparsity": 1.0}), r"options \['sparsity'\]"),
        (lambda: as_codec("auto", {}), "codec='auto' is of ddp.compress"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert re.search(named, str(caught.value)), named
