"""Options that are made from the fields of the dataclasses that they fill."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.cli.options import documented
from specdec.config import EngineConfig
from specdec.sampling_params import SamplingParams


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_field_is_described(kind: type) -> None:
    """A field without a text, or a help page with marks of docstrings."""
    texts = documented(kind)
    assert texts.keys() == {each.name for each in fields(kind)}
    for text, unset in texts.values():
        assert text[0].isupper() or text[0].isdigit()
        assert text.endswith(".")
        assert not {"``", "None:"} & {*text.split(), *unset.split()}


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ((), "loading SmolLM2-135M-Instruct with smollm2-135m-head"),
        (("--draft", "none"), "loading SmolLM2-135M-Instruct"),
        (("--draft", "ngram"), "loading SmolLM2-135M-Instruct with ngram"),
    ],
)
def test_the_note_on_loading_names_the_draft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft: tuple[str, ...], said: str
) -> None:
    """Commands that load the same models say that they load others."""
    notes: list[str] = []

    def noted(text: str, **_: Any) -> Any:
        notes.append(text)
        raise SystemExit

    monkeypatch.setattr("specdec.cli.ranks.noted_if_slow", noted)
    (tmp_path / "p.txt").write_text("one\n")
    prompts = ("--prompts", str(tmp_path / "p.txt"))
    commands = [("run", *prompts), ("serve", "--port", "0"), ("chat",), ("demo",)]
    if draft != ("--draft", "none"):
        commands.append(("advise", *prompts))
    for command in commands:
        CliRunner().invoke(main, [*command, *draft])
    assert notes == [said] * len(commands)
