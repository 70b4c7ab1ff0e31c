"""A bounded number of malformed inputs, and that what goes wrong with one is found.

``scripts/soak --fuzz`` runs 100,000.
"""

from __future__ import annotations

from itertools import islice

import pytest

from specdec.errors import ConfigError, PromptError

from .case import (
    LONGEST_LINE,
    Answer,
    FaultError,
    check_answer,
    check_error,
)
from .kinds import KINDS
from .runner import fuzz, run

# Every seed is a case of each kind.
SEEDS = 46
PLANTED = "tests.fuzz.planted"
# What is shown of them at once; each costs a process.
MOST_FAULTS = 5


@pytest.mark.slow
def test_hundreds_of_malformed_inputs() -> None:
    """A traceback, a hang, a leak, or a neighbour with other tokens, for any input."""
    assert SEEDS * len(KINDS) >= 500
    faults = list(islice(fuzz([*KINDS], 0, SEEDS), MOST_FAULTS))
    assert not faults, "\n\n".join(map(str, faults))


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("goes_on_for_ever", "goes_on_for_ever"),
        ("waits_for_ever", "waits_for_ever"),
        ("dies", "in dies"),
        ("takes_memory", "it took"),
        ("leaves_a_file_open", "descriptors grew"),
        ("leaves_arrays", "arrays grew"),
        ("leaves_threads", "threads grew"),
        ("writes_to_the_terminal", "not asked for"),
    ],
)
def test_it_finds(name: str, shows: str) -> None:
    """A fault that the fuzzer overlooks, or shows without its place."""
    count = 60 if name.startswith("leaves") else 1
    bounds = {"goes_on_for_ever": {"seconds": 1}, "waits_for_ever": {"waiting": 2}}
    fault = run([name], 0, count, plugin=PLANTED, **bounds.get(name, {}))
    assert fault is not None
    assert shows in fault.what
    assert (fault.kinds, fault.seed, fault.count) == ((name,), 0, count)


def test_it_goes_on_after_a_fault() -> None:
    """Cases that are left out after one that failed, or one that runs twice."""
    shown: list[str] = []
    kinds = ["raises_at_seed_3", "does_nothing"]
    faults = list(fuzz(kinds, 2, 3, plugin=PLANTED, show=shown.append))
    assert [(f.kinds, f.seed, f.count) for f in faults] == [
        (("raises_at_seed_3",), 3, 1)
    ]
    assert "TypeError: nobody expected it" in faults[0].what
    again = "python -m tests.fuzz raises_at_seed_3 --first 3 --count 1"
    assert str(faults[0]).endswith(again)
    assert shown == ["seeds 2 to 3: see", "seeds 3 to 4: nothing found"]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    """A false alarm; a process of a case's that inherits the time of that case."""
    kinds = ["does_nothing", "starts_a_process"]
    assert run(kinds, 0, 30, plugin=PLANTED) is None


GOOD = Answer(2, "", "specdec: error: it is not there: check the path\n")


@pytest.mark.parametrize(
    ("code", "err"),
    [
        (0, "specdec: error: but the code says that nothing is wrong\n"),
        (1, ""),
        (1, "specdec: warning: no error is reported\n"),
        (3, GOOD.err),
        (-11, GOOD.err),
        (1, "specdec: error: unexpected TypeError: no (set SPECDEC_DEBUG=1 to see)\n"),
        (1, "Traceback (most recent call last):\n" + GOOD.err),
        (1, "UserWarning: of another library\n" + GOOD.err),
        (1, "specdec: error: \x1b[31mred\n"),
        (1, f"specdec: error: {'a' * LONGEST_LINE}\n"),
        (1, "specdec: error: without its end"),
    ],
)
def test_answers_that_are_faults(code: int, err: str) -> None:
    """What a command must never say."""
    check_answer(GOOD)
    with pytest.raises(FaultError):
        check_answer(Answer(code, "", err))


def test_errors_that_are_faults() -> None:
    """An error of Python's own, or one that hides that there was no memory left."""
    check_error(ConfigError("top_p is 2: it must be less"))
    with pytest.raises(TypeError):
        check_error(TypeError("an int is needed"))
    error = PromptError("the chat template refuses these messages")
    error.__cause__ = MemoryError()
    with pytest.raises(FaultError):
        check_error(error)
