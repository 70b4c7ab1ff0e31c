"""The command itself, on real weights, as it is typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROMPTS = "Name a river in France.\nWhat is 6 times 7?\n"


def run(tmp_path: Path, *arguments: str) -> tuple[str, str, list[str]]:
    """Standard output, standard error, and texts in the order of the prompts."""
    output = tmp_path / "out.jsonl"
    code = "from specdec.__main__ import main; main()"
    options = ["--dtype", "float32", "--max-tokens", "5", "--ignore-chat-template"]
    options += ["--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-c", code, "run", *options, *arguments],
        input=PROMPTS,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    rows.sort(key=lambda row: row["index"])
    return done.stdout, done.stderr, [row["text"] for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
def test_run_with_the_default_target(tmp_path: Path) -> None:
    """A draft and a batch change nothing that is written, and nothing else is."""
    stdout, stderr, texts = run(tmp_path, "--draft", "none", "--batch", "1")
    assert stdout == (
        f"== [0] Name a river in France.\n{texts[0]}\n\n"
        f"== [1] What is 6 times 7?\n{texts[1]}\n\n"
    )
    # On a slow machine, how far it is.
    prefill = r"prefill, \d of 2 prompts(, \d prefilled)?"
    rounds = r"\d of 2 prompts, .* tokens/s(, about .* left)?"
    loading = r"note: loading .*"
    summary = re.sub(rf"(?m)^specdec: ({prefill}|{rounds}|{loading})\n", "", stderr)
    keys = [line.partition(":")[0] for line in summary.splitlines()]
    assert keys == ["target", "draft", "prefill", "decode", "peak memory"], stderr

    # The draft that comes with the package is the default one.
    more = ("--num-draft-tokens", "3", "--batch", "2")
    drafted, stderr, _ = run(tmp_path, *more)
    assert drafted == stdout
    assert "draft:       smollm2-135m-head, 3 tokens a round" in stderr
    rate = re.search(r"(?m)^acceptance:  rate ([\d.]+), length", stderr)
    assert rate is not None
    assert 0 < float(rate[1]) <= 1
