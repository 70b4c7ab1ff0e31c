"""Options that do not exist: the one that is meant, and no other."""

from __future__ import annotations

import pytest

from .conftest import Specdec


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("generate -p Hi", "run"),
        ("server", "serve"),
        ("run --temperature 1", "--temp"),
        ("run --num-speculative-tokens 3", "--num-draft-tokens"),
        ("run --repeat-penalty 1.1", "--repetition-penalty"),
        ("run --prompt-file F", "--prompts"),
        ("run --max-num-seqs 4", "--batch"),
        ("run --max-new-tokens 4", "--max-tokens"),
        ("run --n-predict 4", "--max-tokens"),
        ("run --speculative-model M", "--draft"),
        ("run --gpu-memory-utilization 1", "--memory-limit"),
        ("run --input F", "--prompts"),
        ("run --lora F", "--adapter-path"),
        ("bench --max-num-seqs 4", None),
        ("run --num-draft 3", "--num-draft-tokens"),
        ("run --max_tokens 9", "--max-tokens"),
        ("run --hlep", "--help"),
        ("run --max-tokes 9", "--max-tokens"),
        # Nothing is near these; click's own guess makes --stop of --json.
        ("run --json out", None),
        ("run --verbose", None),
        ("run --stream", None),
        ("run --ctx-size 9", None),
        ("run --tensor-parallel-size 2", "--tensor-parallel"),
        ("run -n 9", None),
        ("cache list --json", None),
    ],
)
def test_what_is_meant(specdec: Specdec, line: str, meant: str | None) -> None:
    result = specdec(*line.split())
    assert result.exit_code == 2
    assert ("Did you mean" in result.stderr) == (meant is not None)
    if meant is not None:
        assert f". Did you mean '{meant}'? (see: specdec " in result.stderr
