"""Every bar on the digits at its full number of steps: `make test-long`, half an hour.

Each test prints what it found, for docs/designs.md. Differences are of runs with one seed: equal initial weights and
batches.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

import pytest

from tests.designs.digits_runs import Outcome
from tests.designs.digits_runs import train as train_digits

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

train = partial(train_digits, steps=3000)
train_sgd = partial(train_digits, steps=1500)
SEEDS = (0, 1, 2)
SPARSITIES = ("1.0", "1.5", "1.75", "1.9")
PARTITIONS = {s: f"3lc[s={s},layout=partition]" for s in SPARSITIES}


def tell(text: str) -> None:
    print(f"\n{text}")


def plain_sgd(seed: int) -> Outcome:
    return train_sgd("fp32", recipe_of="doublesqueeze-1bit", seed=seed)


# ---- 3LC and what it is compared with

AS_ACCURATE = ["int8", *(PARTITIONS[s] for s in SPARSITIES[:3]), "local2", "mqe1", "sparse5", "terngrad"]


@pytest.mark.parametrize("design", AS_ACCURATE)
def test_as_accurate_as_uncompressed(design: str) -> None:
    plain, found = train("fp32"), train(design)
    tell(f"{design} {found.accuracy:.2f} %, fp32 {plain.accuracy:.2f} %")
    assert plain.accuracy >= 97.7
    assert found.accuracy >= 97.5 and found.accuracy >= plain.accuracy - 1.0


def test_a_sparsity_multiplier_of_1_9_lags_and_arrives() -> None:
    plain, found = train("fp32"), train(PARTITIONS["1.9"])
    tell(f"s = 1.9 {found.early:.2f} % after a quarter, {found.accuracy:.2f} % at the end; fp32 {plain.early:.2f} %")
    assert found.early < plain.accuracy - 1.0
    assert found.accuracy >= 97.5


# ---- DoubleSqueeze and what it is compared with


@pytest.mark.parametrize("design", ["doublesqueeze-1bit", "doublesqueeze-topk", "mem-sgd-1bit", "mem-sgd-topk"])
def test_error_feedback_keeps_the_accuracy_of_plain_sgd(design: str) -> None:
    differences = [train_sgd(design, seed=seed).accuracy - plain_sgd(seed).accuracy for seed in SEEDS]
    tell(f"{design} − SGD {', '.join(f'{each:+.2f}' for each in differences)}, mean {fmean(differences):+.2f}")
    assert min(differences) >= -1.0 and fmean(differences) >= -0.6


def test_top_k_without_error_feedback_loses() -> None:
    found, sgd = ([run(seed=seed) for seed in SEEDS] for run in (partial(train_sgd, "topk-sgd"), plain_sgd))
    differences = [one.accuracy - other.accuracy for one, other in zip(found, sgd, strict=True)]
    ratios = [one.loss / other.loss for one, other in zip(found, sgd, strict=True)]
    tell(f"top-k − SGD mean {fmean(differences):+.2f}, loss {', '.join(f'{each:.2f}×' for each in ratios)}")
    assert fmean(differences) <= -0.3
    assert fmean(one.loss for one in found) >= 1.7 * fmean(one.loss for one in sgd)


def test_the_biased_ternary_is_behind_in_the_loss() -> None:
    ratios = [train_sgd("qsgd-ds", seed=seed).loss / plain_sgd(seed).loss for seed in SEEDS]
    tell(f"qsgd-ds' loss {', '.join(f'{each:.2f}×' for each in ratios)} SGD's")
    assert fmean(ratios) >= 2


# ---- sizes, the two copies, the lag

BITS = {
    "1.0": ((0.60, 0.84), (0.63, 0.87)),
    "1.5": ((0.32, 0.47), (0.34, 0.49)),
    "1.75": ((0.22, 0.33), (0.26, 0.40)),
    "1.9": ((0.19, 0.30), (0.33, 0.52)),
}
LAGS = {"1.0": (0, 6), "1.75": (5, 50), "1.9": (15, 130)}


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_sizes_the_two_copies_and_the_lag(sparsity: str) -> None:
    found = train(PARTITIONS[sparsity])
    tell(
        f"s = {sparsity}: {found.bits_up:.3f} bits up, {found.bits_down:.3f} down; {found.lag:.1f} steps' gradients "
        f"wait; workers {found.accuracy:.2f} %, server {found.server_accuracy:.2f} %, "
        f"|server − workers − residual| ≤ {found.residual_error:.1e}"
    )
    for size, (least, most) in zip((found.bits_up, found.bits_down), BITS[sparsity], strict=True):
        assert max(least, 1.6 / 14) <= size <= most
    assert found.residual_error <= 1e-5
    assert abs(found.accuracy - found.server_accuracy) <= 0.2
    if sparsity in LAGS:
        least, most = LAGS[sparsity]
        assert least <= found.lag <= most


def test_groups_of_five_are_no_larger_than_five_partitions() -> None:
    groups, partitions = train("3lc[s=1.0]"), train(PARTITIONS["1.0"])
    shares = groups.bits_up / partitions.bits_up, groups.bits_down / partitions.bits_down
    tell(f"groups of five / five partitions at s = 1.0: {shares[0]:.3f} up, {shares[1]:.3f} down")
    assert groups.bits_up + groups.bits_down <= partitions.bits_up + partitions.bits_down
