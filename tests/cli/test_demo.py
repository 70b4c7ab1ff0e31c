"""``specdec demo``: what it shows, and what it claims of its times."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from specdec.cli import main
from specdec.cli.demo import _Comparison, _Run
from tests.tools.distill.harness import write_target


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", *arguments])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("demo") / "target"))


def test_the_same_text_twice(target: str) -> None:
    """A row for each way, one text, and the command to go on with."""
    result = invoke(
        *("--target", target, "--draft", "layers:0-1", "-m", "6"),
        *("-p", "Name a river.", "-p", "Name a lake.", "--num-draft-tokens", "2"),
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith("  without ") for line in lines) == 2
    assert sum(" times as fast" in line for line in lines if "with " in line) >= 2
    assert "The texts are the same, token for token." in lines
    assert any(line.startswith("  specdec run") for line in lines)


def test_without_a_draft_there_is_nothing_to_compare(target: str) -> None:
    """Turning the draft off ended with an error about another option."""
    result = invoke("--target", target, "--draft", "none", "-m", "4", "-p", "Hi")
    assert result.exit_code == 0, result.output
    assert "There is no draft to compare with." in result.stdout
    assert "times as fast" not in result.stdout


@pytest.mark.parametrize(
    ("seconds", "others", "says", "never"),
    [
        ((3.0, 2.0), 0.0, "1.50 times as fast: 1.0 s saved", "does not pay"),
        ((2.0, 2.0), 0.0, "does not pay here (1.00 times", "saved"),
        ((2.0, 4.0), 0.0, "does not pay here (0.50 times", "saved"),
        ((3.0, 2.0), 8.0, "This machine is busy: on average 8.0", "does not pay"),
        ((6.0, 2.0), 0.0, "No draft saves that much in rounds of 1.5 tokens", "saved:"),
    ],
)
def test_what_is_claimed(
    seconds: tuple[float, float], others: float, says: str, never: str
) -> None:
    """A gain where there is none, or times of a busy machine without a word."""
    runs = [_Run(each, [1, 2, 3], "abc", 2, 2, 1) for each in seconds]
    total = _Comparison("a draft", [(runs[0], runs[1])], [others], cores=2)
    text = "\n".join(total.lines())
    assert says in text
    assert never not in text
    assert ("busy" in text) is (others > 0)
    assert "A round gave 1.5 tokens" in text
    runs[1].token_ids = [1, 2, 4]
    assert "1 text of 1 came out differently." in "\n".join(total.lines())


def test_nothing_drafted_gains_nothing() -> None:
    """Catches chance that is shown as the gain of a draft that was never asked."""
    runs = [_Run(seconds, [1, 2, 3], "abc", 3) for seconds in (3.2, 2.0)]
    text = "\n".join(_Comparison("a draft", [(runs[0], runs[1])]).lines())
    assert "Nothing was drafted" in text
    assert "times as fast" not in text
