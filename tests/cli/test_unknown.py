"""Options that do not exist: the one that is meant, and no other."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest
from click.testing import Result

from specdec.cli import main
from specdec.cli.unknown import ELSEWHERE, describe_unknown


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("run --json=out", "--output"),
        ("run --json out", "--output"),
        ("run -o out", "--output"),
        ("verify --output out", "--json"),
        ("bench --output out", "--out"),
        # Those who come from mlx-lm, transformers, vLLM and llama.cpp.
        ("run --temperature 1", "--temp"),
        ("run --max-new-tokens 9", "--max-tokens"),
        ("run --num-speculative-tokens 3", "--num-draft-tokens"),
        ("run --speculative-model M", "--draft"),
        ("run --n-predict 9", "--max-tokens"),
        ("run --repeat-penalty 1.1", "--repetition-penalty"),
        ("run --prompt-file F", "--prompts"),
        ("estimate --ctx-size 9", "--context"),
        # The begin of one, and underscores.
        ("run --num-draft 3", "--num-draft-tokens"),
        ("run --system S", "--system-prompt"),
        ("run --max_tokens 9", "--max-tokens"),
        ("run --max_new_tokens 9", "--max-tokens"),
        # Misspelt.
        ("run --hlep", "--help"),
        ("run --max-tokes 9", "--max-tokens"),
        # Nothing is near these.
        ("run --verbose", None),
        ("run -n 9", None),
        ("cache list --json", None),
    ],
)
def test_what_is_meant(
    specdec: Callable[..., Result], line: str, meant: str | None
) -> None:
    result = specdec(*line.split())
    assert result.exit_code == 2
    assert ("Did you mean" in result.stderr) == (meant is not None)
    if meant is not None:
        assert f". Did you mean '{meant}'? (see: specdec " in result.stderr


@pytest.mark.parametrize("called", ELSEWHERE)
def test_each_name_from_elsewhere_leads_somewhere(called: str) -> None:
    """A name that no command lacks any more, or an option that was renamed."""
    found = set()
    for name, command in main.commands.items():
        context = click.Context(command, info_name=name)
        if not any(called in each.opts for each in command.get_params(context)):
            text = describe_unknown(click.NoSuchOption(called, ctx=context))
            found.add(text.partition("Did you mean ")[2].strip("'?"))
    assert set(ELSEWHERE[called]) <= found
