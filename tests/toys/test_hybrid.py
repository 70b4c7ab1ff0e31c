"""Long prompts of a hybrid that was trained on text, whose states no bound forgives."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.plain import BEHIND, exact
from tests.toys.hybrid import trained_model

LENGTH = 4100
ROW = "| {0} | 0.{0} | [{0}](docs/{0}.md) | yes |\n"
CODE = "    def get_{0}(self) -> int:\n        return self._values[{0}]\n\n"
#: Repetitive text: alike keys in a row, states that grow, gates near 1.
TEXTS = {
    "code": "".join(CODE.format(i % 10) for i in range(100)),
    "a table": "| number | share | page | known |\n|---|---:|---|---|\n"
    + "".join(ROW.format(i % 7) for i in range(200)),
    "white space": ("\n" + " " * 60) * 60 + "\t" * 600 + " " * 1000,
    "one letter": "a" * LENGTH,
}


def prompts() -> list[list[int]]:
    """Rows of unequal lengths, as a batch has them."""
    texts = [text.encode() for text in TEXTS.values()]
    assert all(len(text) >= LENGTH for text in texts)
    return [list(text[: LENGTH - 37 * i]) for i, text in enumerate(texts)]


def test_it_has_learnt_text() -> None:
    """Random weights (5.5) would have another kind of state."""
    model = trained_model()
    row = mx.array([list(TEXTS["code"].encode()[:300])])
    loss = nn.losses.cross_entropy(model(row[:, :-1]), row[:, 1:])
    assert float(loss.mean()) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("step", [100, 512, 2048])
def test_long_repetitive_prompts_equal_plain_decoding(step: int) -> None:
    """States that are rounded at each chunk, or an inverse that fails in alike keys."""
    backend = {"backend": BEHIND} if step == 512 else {}
    exact(trained_model(), None, prompts(), 24, prefill_step_size=step, **backend)
