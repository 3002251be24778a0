"""Random crop and flip: every result is a window of the padded picture or of its mirror image."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thinwire.workloads.augment import crop_and_flip


def _pictures(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (count, 3, 6, 7), generator=generator).to(torch.uint8)


def test_every_picture_is_a_window_of_its_padded_self_or_its_mirror_image() -> None:
    pictures = _pictures(200)
    out = crop_and_flip(pictures, torch.Generator().manual_seed(0), padding=2)
    assert out.shape == pictures.shape and out.dtype == pictures.dtype
    found = set()
    for picture, result in zip(pictures, out, strict=True):
        padded = F.pad(picture, (2, 2, 2, 2))
        matches = [
            (top, left, flipped)
            for top in range(5)
            for left in range(5)
            for flipped in (False, True)
            if torch.equal(result, _window(padded, top, left, flipped))
        ]
        assert len(matches) == 1
        found.add(matches[0])
    assert {flipped for _, _, flipped in found} == {False, True}
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))


def _window(padded: torch.Tensor, top: int, left: int, flipped: bool) -> torch.Tensor:
    window = padded[:, top : top + 6, left : left + 7]
    return window.flip(2) if flipped else window


def test_chance_comes_from_the_generator_alone() -> None:
    pictures = _pictures(8)
    first = crop_and_flip(pictures, torch.Generator().manual_seed(5))
    again = crop_and_flip(pictures, torch.Generator().manual_seed(5))
    other = crop_and_flip(pictures, torch.Generator().manual_seed(6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_without_padding_only_flips_remain() -> None:
    pictures = _pictures(32)
    out = crop_and_flip(pictures, torch.Generator().manual_seed(0), padding=0)
    same = [bool(torch.equal(a, b)) for a, b in zip(pictures, out, strict=True)]
    mirrored = [bool(torch.equal(a.flip(2), b)) for a, b in zip(pictures, out, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)) and any(same) and any(mirrored)
