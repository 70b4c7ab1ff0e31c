"""Values that were used last."""

from __future__ import annotations

from specdec.utils.recent import Recent


def test_what_is_put_again_is_the_newest() -> None:
    """Two prompts with one image embed it, and the second result is dropped at once."""
    recent = Recent[str, bytes](5, len)
    recent.put("a", b"123")
    recent.put("b", b"12")
    recent.put("a", b"12345")
    assert recent.get("a") == b"12345"
    assert recent.get("b") is None


def test_values_that_were_read_stay() -> None:
    """Pixels of an image that is used in each prompt are decoded each time."""
    recent = Recent[str, bytes](5, len)
    recent.put("a", b"12")
    recent.put("b", b"12")
    assert recent.get("a") == b"12"
    recent.put("c", b"12")
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (b"12", None, b"12")
    recent.pop("a")
    recent.pop("b")
    assert recent.get("a") is None
    recent.put("d", b"123456")  # one value is always kept
    assert recent.get("d") == b"123456"
