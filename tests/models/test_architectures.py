"""Every architecture of the installed mlx-lm: exact, or refused for a known reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.errors import UnsupportedModelError

from .architectures import NOT_RUN, REFUSED, build, differences, line, names

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
WRITE = "scripts/models_table.py writes docs/models.md"


def test_lists_hold_nothing_else() -> None:
    """An architecture that mlx-lm has dropped would stay in the lists, and the page."""
    assert {*NOT_RUN, *REFUSED} <= set(names())
    lines = [text for text in PAGE.splitlines() if text.startswith("| ")]
    assert [text.split(" | ")[0][2:] for text in lines[1:]] == names(), WRITE


@pytest.mark.parametrize("arch", [n for n in names() if n not in NOT_RUN])
def test_every_architecture_is_exact_or_refused(arch: str) -> None:
    """Other tokens than mlx-lm's; or one that is new, and nobody has looked at."""
    model = build(arch)
    if arch in REFUSED:
        with pytest.raises(UnsupportedModelError):
            differences(arch, model)
    else:
        assert differences(arch, model) == []
    assert line(arch, model) in PAGE, WRITE


@pytest.mark.parametrize("arch", sorted(NOT_RUN))
def test_what_mlx_lm_does_not_run(arch: str) -> None:
    """The page would leave it out, or say something else."""
    assert line(arch, None) in PAGE, WRITE
