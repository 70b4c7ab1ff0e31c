"""``specdec demo``: the same prompts without a draft and with it, and both times."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from ..backend import defaults, describe
from ..config import EngineConfig, NumDraftTokens
from ..prompts import templates
from ..utils.printable import counted, one_line, printable
from . import options, ranks
from .busy import busy_note, others_running
from .output import noted_if_slow, show, show_passing, show_warnings, undrafted

if TYPE_CHECKING:
    from ..decoder import SpecDecoder

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A baker sells 12 loaves an hour for 5 hours. How many loaves is that?",
    "What is the capital of France, and on which river does it stand?",
)
# A block of the packaged head; on a CPU its rounds pay most with all of it.
_BLOCK = 6
# Below this ratio of times nothing is claimed.
_GAIN = 1.05
_WIDTH = 32


@click.command(cls=options.Command, short_help="Show what a draft gains here.")
@options.models(dtype_help="Type of the weights. [default: float32 on a CPU]")
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens that the draft proposes in a round. [default: 6 for the head that "
    "comes with specdec, else auto]",
)
@options.max_tokens(default=64, help="Generate N tokens for each prompt at most.")
@options.texts(
    help="A prompt; repeat it for more. [default: three that come with the command]"
)
def demo(
    *,
    models: options.Models,
    num_draft_tokens: int | None,
    max_tokens: int,
    texts: tuple[str, ...],
) -> None:
    """Decode prompts one by one, without a draft and with it, and compare the times.

    Without options the model is SmolLM2-135M-Instruct with the head that comes with
    specdec. The text is the same both times.

    \b
      specdec demo
      specdec demo --target MODEL --draft MODEL --prompt "Your own question"
    """  # noqa: D301 - click's mark for lines to keep
    show_warnings()
    templates.start()
    length: NumDraftTokens = num_draft_tokens or "auto"
    implied = models.spec is not None and models.spec.implied
    if implied and num_draft_tokens is None:
        length = _BLOCK
    loading = models.arguments(EngineConfig(batch_size=1, num_draft_tokens=length))
    if loading["dtype"] is None and defaults().name == "cpu":
        loading["dtype"] = "float32"
    drafted, _ = ranks.load(None, quiet=False, **loading)
    from ..decoder import SpecDecoder

    plain = SpecDecoder(drafted.target, config=EngineConfig(batch_size=1))
    where = _warmed(plain, drafted)
    show(f"{models}, {where}, one prompt at a time\n")
    total = _Comparison(drafted.draft_name)
    for text in texts or PROMPTS:
        _compare(text, plain, drafted, max_tokens, total)
    for line in total.lines():
        show(line)
    dtype = f" --dtype {loading['dtype']}" if loading["dtype"] else ""
    show("\nNext:")
    for arguments, what in (
        (f"run{dtype} --prompt 'Your own question'", "one prompt, streamed"),
        (f"chat{dtype}", "talk with it"),
        ("advise --target MODEL --draft MODEL", "whether a draft pays for yours"),
    ):
        show(f"  {f'specdec {arguments}':<58}{what}")


def _warmed(plain: SpecDecoder, drafted: SpecDecoder) -> str:
    """Have kernels compiled for both decoders; return where they compute."""
    with noted_if_slow("warming up: on first use, kernels are compiled", quiet=False):
        for decoder in (plain, drafted):
            decoder.generate(PROMPTS[0], max_tokens=16)
    facts = describe()
    place = facts["device"] if facts["backend"] != "cpu" else "this CPU"
    return f"{place}, float32" if plain.target.in_float32 else place


@dataclass
class _Run:
    """One prompt decoded once."""

    seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class _Comparison:
    """All prompts so far: what was decoded in which time, and what disturbed it."""

    draft: str | None
    pairs: list[tuple[_Run, _Run]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    cores: int | None = None

    def lines(self) -> Iterator[str]:
        """The result, in lines."""
        first = [plain for plain, _ in self.pairs]
        second = [drafted for _, drafted in self.pairs]
        slow, fast = (sum(run.seconds for run in runs) for runs in (first, second))
        tokens = counted(sum(len(run.token_ids) for run in first), "token")
        if self.draft is None:
            yield f"{tokens} in {slow:.1f} s. There is no draft to compare with."
            return
        if busy := busy_note(self.others, self.cores):
            yield busy
        yield f"{tokens}: {slow:.1f} s without the draft, {fast:.1f} s with it."
        ratio = slow / fast
        rounds = sum(run.rounds for run in second)
        length = 1 + sum(run.accepted for run in second) / max(rounds, 1)
        drafted = any(run.drafted for run in second)
        if not drafted:
            yield f"{undrafted(self.draft).capitalize()}. The rest is chance."
        elif ratio > _GAIN * length:
            yield (
                f"No draft saves that much in rounds of {length:.1f} tokens: something "
                "else made the first times longer."
            )
        elif ratio >= _GAIN:
            saved = f"{slow - fast:.1f} s saved"
            yield f"With the draft {ratio:.2f} times as fast: {saved}."
        else:
            yield (
                f"The draft does not pay here ({ratio:.2f} times as fast). "
                "--num-draft-tokens auto, the default elsewhere, stops drafting then."
            )
        if drafted:
            yield f"A round gave {length:.1f} tokens instead of 1."
        parted = sum(a.token_ids != b.token_ids for a, b in self.pairs)
        if not parted:
            yield "The texts are the same, token for token."
        else:
            yield (
                f"{counted(parted, 'text')} of {len(self.pairs)} came out differently. "
                "In 16 bits near ties fall either way; specdec verify tells such ties "
                "from failures."
            )


def _compare(
    prompt: str,
    plain: SpecDecoder,
    drafted: SpecDecoder,
    max_tokens: int,
    total: _Comparison,
) -> None:
    """Decode a prompt both ways and show how long each took."""
    show(one_line(prompt, 76, end=False))
    total.others += others_running()
    first = _run("without", plain, prompt, max_tokens, None)
    second = first
    if total.draft is not None:
        second = _run("with", drafted, prompt, max_tokens, first)
    total.pairs.append((first, second))
    show("")
    for line in first.text.strip().split("\n"):
        for part in textwrap.wrap(printable(line), 74) or [""]:
            show(f"  | {part}")
    show("")


def _run(
    name: str, decoder: SpecDecoder, prompt: str, max_tokens: int, before: _Run | None
) -> _Run:
    """Decode the prompt; a bar as long as its time, in terms of the run before."""
    run = _Run()
    start = time.perf_counter()
    for event in decoder.stream(prompt, max_tokens=max_tokens):
        run.seconds = time.perf_counter() - start
        run.token_ids += event.token_ids
        run.text += event.text
        if (ended := event.result) is not None:
            run.rounds = ended.rounds
            run.drafted, run.accepted = ended.drafted, ended.accepted
        share = len(run.token_ids) / max_tokens
        if before is not None:
            share = run.seconds / before.seconds
        show_passing(_bar(name, share, run))
    share = 1.0 if before is None else run.seconds / before.seconds
    times = ""
    if before is not None and run.seconds and run.drafted:
        times = f", {before.seconds / run.seconds:.2f} times as fast"
    show(_bar(name, share, run) + times)
    return run


def _bar(name: str, share: float, run: _Run) -> str:
    cells = min(_WIDTH + 8, round(_WIDTH * share))
    filled = (
        "█" * cells if "utf" in (sys.stdout.encoding or "").lower() else "#" * cells
    )
    tokens = counted(len(run.token_ids), "token")
    return f"  {name:<8}{filled:<{_WIDTH}}  {tokens} in {run.seconds:.1f} s"
