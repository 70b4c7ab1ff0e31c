"""The benchmark of the caches runs, at sizes that say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cache import main


@pytest.mark.parametrize("tokens", ["1", "5"])
def test_quick(tokens: str, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    arguments = ["--quick", "--columns", "256", "--tokens", tokens, "--out", str(out)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    raw = json.loads(Path(f"{out}.json").read_text("utf-8"))
    assert len(raw["layer"]) == 12
    assert {r["growths_to_32768"] for r in raw["growth"]} == {7, 127}
    ring = raw["geometry"][1]
    assert ring["measured_mib"] == pytest.approx(ring["computed_mib"], rel=0.01)
