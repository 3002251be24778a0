"""`thinwire codecs`: figures of every codec on real gradients."""

from __future__ import annotations

from thinwire.bench.sample import real_gradients, sample_codecs
from thinwire.codecs import registry


def test_every_codec_is_measured_on_real_gradients() -> None:
    gradients = real_gradients(steps=5)
    rows = {row.codec: row for row in sample_codecs(gradients)}
    assert list(rows) == registry.ids()
    assert rows["fp32"].bits_per_value == 32 and rows["fp32"].relative_error == 0
    assert rows["3lc"].bits_per_value < 1.6 < rows["int8"].bits_per_value < 8.1
    fed = rows["3lc"].after_feedback
    assert fed is not None and fed < rows["3lc"].relative_error / 2, "what was not sent comes later"
