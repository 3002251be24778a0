"""Windows, mirror images and contrast by the caller's random generator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from thinwire_lab.workloads.augment import crop_and_flip, distort, standardise


def _pictures(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (count, 3, 6, 7), generator=generator).to(torch.uint8)


def test_crop_and_flip_returns_windows_or_their_mirror_images() -> None:
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


def test_distort_returns_windows_with_another_contrast() -> None:
    pictures = _pictures(300)
    out = distort(pictures, 5, torch.Generator().manual_seed(0))
    assert out.shape == (300, 3, 5, 5) and out.dtype == torch.float32
    found, contrasts = set(), []
    for picture, result in zip(pictures.float(), out, strict=True):
        for top, left, flipped in [(t, c, f) for t in range(2) for c in range(3) for f in (False, True)]:
            window = picture[:, top : top + 5, left : left + 5]
            window = window.flip(2) if flipped else window
            mean = window.mean((1, 2), keepdim=True)
            contrast = float(((result - mean) * (window - mean)).sum() / (window - mean).square().sum())
            if torch.allclose(result, mean + contrast * (window - mean), atol=1e-3):
                found.add((top, left, flipped))
                contrasts.append(contrast)
    assert len(contrasts) == 300, "each is one window, and one only"
    assert len(found) == 12
    assert 0.2 <= min(contrasts) < 0.25 and 1.75 < max(contrasts) <= 1.8
    assert sum(contrasts) / 300 == pytest.approx(1.0, abs=0.1)


def test_standardise_removes_each_images_brightness() -> None:
    pictures = _pictures(4).float()
    out = standardise(pictures)
    torch.testing.assert_close(out.mean((1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((1, 2, 3), correction=0), torch.ones(4))
    torch.testing.assert_close(standardise(pictures + 40), out, atol=1e-4, rtol=1e-4)
    # Nearly even: 16 values, one of them 1 above the others; the deviation counts as 255/4.
    even = torch.full((1, 1, 4, 4), 7.0)
    even[0, 0, 0, 0] = 8.0
    assert standardise(even)[0, 0, 0, 0].item() == pytest.approx(15 / 16 / (255 / 4))
