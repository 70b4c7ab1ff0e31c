"""``specdec chat``: talk with a model on the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ..config import DEFAULT_PREFIX_CACHE_MEMORY, EngineConfig
from ..errors import MemoryLimitError, PromptError
from ..outputs import RunStats
from ..prompts import templates
from ..prompts.images import read_file
from ..utils.data_files import HALVES, json_text
from . import options, ranks
from .output import show, show_error, show_warnings, undrafted

if TYPE_CHECKING:
    from ..decoder import SpecDecoder
    from ..outputs import GenerationResult
    from ..sampling_params import SamplingParams

_MAX_TOKENS = 2048
_HELP = """\
/system TEXT   a system prompt from now on; without TEXT, none
/save FILE     write the conversation, as JSON that --prompts reads
/stats         tokens per second and acceptance so far
/image FILE    an image that goes with the next message
/clear         forget the conversation
/exit          end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""


@click.command(cls=options.Command, short_help="Talk with a model on the terminal.")
@options.models()
@options.engine(
    options.num_draft_tokens(
        "Tokens that the draft proposes in a round. auto chooses the number.", low=0
    ),
    options.kv_bits(),
    options.load_vision(),
    options.memory_limit(),
    batch_size=1,
    prefix_cache_memory=DEFAULT_PREFIX_CACHE_MEMORY,
)
@click.option("--system-prompt", metavar="TEXT", help="System turn. [default: none]")
@options.max_tokens(
    default=_MAX_TOKENS, help="Generate at most N tokens for each answer."
)
@options.max_thinking_tokens()
@options.temp()
@options.top_p()
@click.option(
    "--seed", type=int, metavar="N", help="Seed of random draws. [default: random]"
)
@options.quiet(help="No figures after the chat.")
def chat(
    *,
    models: options.Models,
    config: EngineConfig,
    system_prompt: str | None,
    max_tokens: int,
    max_thinking_tokens: int | None,
    temp: float,
    top_p: float,
    seed: int | None,
    quiet: bool,
) -> None:
    """Talk with a model; answers are shown while they are generated.

    /help lists the commands of a chat. Ctrl-C stops an answer, Ctrl-D ends the chat.
    Lines piped to standard input are messages, one after the other.

    \b
      specdec chat
      specdec chat --target MODEL --draft MODEL --temp 0.7
    """  # noqa: D301 - click's mark for lines to keep
    from ..sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        max_thinking_tokens=max_thinking_tokens,
        temperature=temp,
        top_p=top_p,
        seed=seed,
    )
    show_warnings(notes=not quiet)
    templates.start()
    loading = models.arguments(config)
    decoder, _ = ranks.load(None, quiet=quiet, **loading)
    talk = _Talk(decoder, params, system_prompt)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited from now on
        show(f"{models}: /help lists commands; Ctrl-D ends.", err=True)
    with _heard_by(signal.default_int_handler):
        for line in _lines():
            talk.take(line)
            if talk.over:
                break
    if not quiet and talk.stats.prompts:
        show(talk.figures, err=True)


@dataclass
class _Talk:
    """A conversation."""

    decoder: SpecDecoder
    params: SamplingParams
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    #: Files of images that go with the next message.
    images: list[str] = field(default_factory=list)
    over: bool = False
    stats: RunStats = field(default_factory=RunStats)

    def take(self, line: str) -> None:
        """Run a line's command, or answer its message."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if not line.strip():
            return
        if not line.startswith("/"):
            self._ask(line)
        elif command in ("/exit", "/quit"):
            self.over = True
        elif command == "/system":
            self.system = rest or None
        elif command == "/clear":
            self.messages.clear()
        elif command == "/image":
            self._attach(rest)
        elif command == "/stats":
            figures = self.figures if self.stats.prompts else "nothing was answered yet"
            show(figures, err=True)
        elif command == "/save":
            self._save(rest)
        elif command == "/help":
            show(_HELP, err=True)
        else:
            show_error(f"there is no {command}: /help lists what there is")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The messages, after the system prompt."""
        system = {"role": "system", "content": self.system}
        return [*([system] if self.system else []), *self.messages]

    def _ask(self, text: str) -> None:
        content: str | list[dict[str, str]] = text
        images, self.images = self.images, []
        if images:
            content = [{"type": "image", "image": name} for name in images]
            content.append({"type": "text", "text": text})
        self.messages.append({"role": "user", "content": content})
        try:
            answer = self._answer()
        except (PromptError, MemoryLimitError) as error:
            show_error(f"the conversation cannot be continued: {error}, or /clear it")
            self.messages.pop()
            self.images = images
            return
        if answer["content"]:
            self.messages.append(answer)
        else:
            self.messages.pop()

    def _attach(self, name: str) -> None:
        """Send an image with the next message."""
        limit = self.decoder.prompt_limit
        try:
            if isinstance(limit.images, str):
                raise PromptError(limit.images)
            image = read_file(name)
        except PromptError as error:
            show_error(str(error) if name else "/image needs the name of a file")
        else:
            self.images.append(name)
            show(f"{image.width} x {image.height}, with the next message", err=True)

    def _answer(self) -> dict[str, Any]:
        """Show an answer while it is generated; return it as a message."""
        from ..decoder import wired_memory
        from ..server.encoding import encode_source
        from ..server.job import Chat, Delta, Tools
        from ..server.parts import Parts

        encoded = encode_source(self.decoder, Chat(self.history))
        parts = Parts(0, self.decoder.tokenizer, encoded, Tools())
        session = self.decoder.session()
        index = session.add_encoded(encoded.prompt, self.params)
        texts = {"text": "", "reasoning": ""}
        # An exception on Ctrl-C would leave a half-done round.
        stop: list[int] = []
        with _heard_by(lambda number, _: stop.append(number)), wired_memory():
            while session.busy:
                if stop:
                    session.cancel(index)
                for event in session.step():
                    pieces = list(parts.feed(event.text))
                    if event.result is not None:
                        pieces += parts.finish(cut=True)
                        self._count(event.result)
                    for piece in pieces:
                        assert isinstance(piece, Delta)  # it has no tools
                        kind = piece.kind
                        if texts["reasoning"] and kind == "text" and not texts["text"]:
                            show("\n", nl=False)
                        texts[kind] += piece.text
                        show(piece.text, nl=False)
                        sys.stdout.flush()
        show("")
        answer = {"role": "assistant", "content": texts["text"]}
        if texts["reasoning"]:
            answer["reasoning_content"] = texts["reasoning"]
        return answer

    def _count(self, result: GenerationResult) -> None:
        if result.error is not None:
            show_error(result.error)
        stats, after_first = self.stats, max(0, result.generated_tokens - 1)
        stats.take_ended(result)
        stats.generated_tokens += result.generated_tokens
        stats.decode_tokens += after_first
        if result.tokens_per_second:
            stats.decode_seconds += after_first / result.tokens_per_second

    @property
    def figures(self) -> str:
        """Speed and acceptance so far."""
        stats = self.stats
        text = (
            f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.1f} a second"
        )
        if stats.drafted:
            rate, length = stats.acceptance_rate, stats.acceptance_length
            text += f"; acceptance {rate:.3f}, {length:.2f} tokens a round"
        elif self.decoder.draft_name is not None:
            text += f"; {undrafted(self.decoder.draft_name)}"
        return text

    def _save(self, path: str) -> None:
        if not path:
            show_error("/save needs the name of a file")
            return
        try:
            with open(path, "w", encoding="utf-8", errors=HALVES) as file:
                file.write(json_text({"messages": self.history}) + "\n")
        except OSError as error:
            show_error(f"{path} cannot be written: {error.strerror}")
        else:
            show(f"saved to {path}", err=True)


def _lines() -> Iterator[str]:
    """Yield the typed messages, one after the other."""
    tty = sys.stdin.isatty()
    held = ""
    while True:
        try:
            line = input(("... " if held else "> ") if tty else "")
        except EOFError:
            if tty:
                show("", err=True)
            if held:
                yield held
            return
        except KeyboardInterrupt:
            held = ""
            show("\n(Ctrl-D or /exit ends)", err=True)
            continue
        if line.endswith("\\"):
            held += line[:-1] + "\n"
            continue
        yield held + line
        held = ""


@contextmanager
def _heard_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let the handler take Ctrl-C within the block; in another thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wakeup = signal.set_wakeup_fd(-1)  # else the second one ends the process
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
