"""``specdec verify``: what it passes on, what it writes, how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import specdec.tools.parity
from specdec import EngineConfig, SamplingParams
from specdec.cli import main
from specdec.decoder import SpecDecoder
from tests.tools.parity.harness import TinyModel, make_decoder

Verify = Callable[..., Result]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("Hello\nPrompts\nThree\n")
    return str(path)


@pytest.fixture
def calls() -> dict[str, Any]:
    return {}


@pytest.fixture
def verify(
    tiny_model: TinyModel,
    prompts: str,
    calls: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Verify:
    """The command with small random models; ``rounding`` makes ties."""
    rounding = False
    monkeypatch.setattr("specdec.model_names.default_draft", lambda: None)

    def from_pretrained(
        target: str | None,
        draft: str | None,
        *,
        dtype: str | None,
        config: EngineConfig,
        trust_remote_code: bool,
        ranks: None,
    ) -> SpecDecoder:
        calls.update(target=target, draft=draft, dtype=dtype, config=config)
        return make_decoder(
            tiny_model,
            draft="near" if draft else "none",
            rounding=rounding,
            head_dim=32,
            config=vars(config),
        )

    right = specdec.tools.parity.certify

    def certify(decoder: Any, prompts: Any, params: Any, **options: Any) -> Any:
        calls.update(prompts=prompts, params=params, options=options)
        return right(decoder, prompts, params, **options)

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    monkeypatch.setattr(specdec.tools.parity, "certify", certify)
    monkeypatch.setattr("sys.argv", ["specdec", "verify", "--prompts", prompts])

    def invoke(*arguments: str, rounds: bool = False) -> Result:
        nonlocal rounding
        rounding = rounds
        return CliRunner().invoke(main, ["verify", "--prompts", prompts, *arguments])

    return invoke


def test_exact(verify: Verify, calls: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "exact.json"
    path.write_text("of an earlier run " * 1000)
    options = (
        "--target a/T --draft self:4bit --num-prompts 2 --max-tokens 9 --batch 2 "
        "--num-draft-tokens 4 --kv-bits 8 --kv-group-size 32 --dtype float32"
    )
    result = verify(*options.split(), "--json", str(path))
    assert result.exit_code == 0, result.output
    assert calls["config"] == EngineConfig(
        batch_size=2, num_draft_tokens=4, kv_bits=8, kv_group_size=32
    )
    assert (calls["target"], calls["draft"]) == ("a/T", "self:4bit")
    assert calls["dtype"] == "float32"
    assert calls["prompts"] == ["Hello", "Prompts"]
    assert calls["params"] == SamplingParams(max_tokens=9, seed=0)
    assert "verdict: exact: 18 of 18 tokens of 2 prompts" in result.stdout
    assert "draft:   draft, up to 4 a round, acceptance rate 0." in result.stdout
    record = json.loads(path.read_text("utf-8"))
    assert (record["verdict"], record["passed"]) == ("exact", True)
    assert record["machine"]["mlx"]
    assert record["command"].startswith("specdec ")
    assert record["options"]["batch_size"] == 2
    assert record["result"]["compared"] == 18


def test_what_is_left(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one batch end together, after minutes without an estimate."""
    for name in ("LINE_SECONDS", "_LEFT_SECONDS"):
        monkeypatch.setattr(f"specdec.cli.progress.{name}", 0.0)
    options = ("--draft", "owner/D", "--max-tokens", "9")
    result = verify(*options)
    note, first, *lines = result.stderr.splitlines()
    assert "decoding 3 prompts with the engine, then one by one without it" in note
    assert first == "specdec: speculative, 0 of 3 rows"
    assert any(
        re.fullmatch(r"specdec: speculative, 0 of 3 rows, about \d+ seconds left", line)
        for line in lines
    )
    assert "specdec: plain, 0 of 3 rows" in lines
    quiet = verify(*options, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_ties_pass(verify: Verify, tmp_path: Path) -> None:
    path = tmp_path / "ties.json"
    result = verify("--draft", "owner/D", "--json", str(path), rounds=True)
    assert result.exit_code == 0, result.output
    assert "verdict: exact up to " in result.stdout
    divergence = json.loads(path.read_text("utf-8"))["result"]["divergences"][0]
    assert divergence["kind"] == "tie"
    assert divergence["evidence"]["noise"] > 0


def test_a_fault_fails(
    verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tools.parity.test_tokens import FAULTS

    FAULTS["trim one too few"](monkeypatch)
    path = tmp_path / "failure.json"
    result = verify("--draft", "owner/D", "--json", str(path))
    assert result.exit_code == 1
    assert "verdict: FAILURE: " in result.stdout
    assert "failure at prompt" in result.stdout
    assert json.loads(path.read_text("utf-8"))["passed"] is False


def test_a_distribution(verify: Verify, calls: dict[str, Any]) -> None:
    options = (
        "--draft owner/D --temp 1.5 --seed 3 --verification block --draws 40 "
        "--num-prompts 1 --batch 40"
    )
    result = verify(*options.split())
    assert calls["params"] == SamplingParams(
        max_tokens=6, temperature=1.5, seed=3, verification="block"
    )
    assert calls["options"]["draws"] == 40
    assert "verdict: " in result.stdout
    assert "40 draws of 1 prompt" in result.stdout


def test_incomplete_does_not_pass(verify: Verify) -> None:
    result = verify("--draft", "owner/D", "--max-restarts", "0", rounds=True)
    assert result.exit_code == 1
    assert "verdict: INCOMPLETE" in result.stdout


def test_without_the_chat_template(verify: Verify, calls: dict[str, Any]) -> None:
    assert verify("--ignore-chat-template").exit_code == 0
    assert calls["options"]["ignore_chat_template"] is True


@pytest.mark.slow
def test_on_real_weights(smollm2_path: str, prompts: str, tmp_path: Path) -> None:
    """The command as it is typed, with a draft of the target's own weights."""
    path = tmp_path / "exact.json"
    code = "from specdec.cli import main; main()"
    options = "--draft self:4bit --dtype float32 --num-prompts 1 --max-tokens 4"
    options += " --ignore-chat-template"
    files = ("--prompts", prompts, "--json", str(path), "--target", str(smollm2_path))
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", *files, *options.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 tokens of 1 prompt" in done.stdout
    assert json.loads(path.read_text("utf-8"))["result"]["drafted"] > 0
