"""Everything that the command line prints except results: errors, notes, files.

An error is one line on standard error and an exit code. Text of users and models is
shown without control characters.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import re
import shlex
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO
from unicodedata import category

import click

from ..backend import newer_than_tested
from ..errors import ConfigError, SpecdecError, is_full
from ..model_names import short
from ..prompts import PromptRecord
from ..utils.ctrl_c import INTERRUPTED
from ..utils.data_files import HALVES, json_text
from ..utils.extras import install, install_backend, is_backend
from ..utils.names import nearest
from ..utils.printable import message as as_message
from ..utils.printable import printable, shorten

DEBUG = "SPECDEC_DEBUG"

FAILURE, USAGE = 1, 2
# Seconds without a line after which a command seems to hang.
_SILENCE = 1.5
#: Whether a line has said that the command was interrupted.
interrupt_shown = threading.Event()

# -- streams -----------------------------------------------------------------------


def open_streams() -> None:
    """Replace closed streams, and let no stream fail because of a character.

    A closed standard input becomes empty, writing to a closed standard output fails,
    and messages to a closed standard error are dropped. Otherwise a file that is opened
    later would get a closed stream's number, and the text meant for the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _closed(number, "w" if number else "r"))
        elif number and hasattr(stream, "reconfigure"):
            # A character that the terminal's encoding lacks becomes "?", not an error.
            stream.reconfigure(errors="replace")


def _closed(number: int, mode: str) -> Any:
    # Writing to standard output must fail, so that results are not lost silently.
    access = os.O_WRONLY if number == 2 else os.O_RDONLY
    # Gets the lowest free number: the stream's own, unless a library has taken that.
    descriptor = os.open(os.devnull, access)
    return open(descriptor, mode, encoding="utf-8")


# Whether each stream, standard output and standard error, ends with a passing line.
_passing = {False: False, True: False}
_ERASE = "\r\x1b[K"


def show(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print lines without control characters, in the place of a passing line.

    Args:
        err: print to standard error. A failure to do so is ignored.
        nl: end the last line.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    _echo(lines, err=err, nl=nl, passing=False)


def show_passing(line: str, *, err: bool = False) -> None:
    """Show a line on a terminal until the next line comes; elsewhere do nothing."""
    if (sys.stderr if err else sys.stdout).isatty():
        _echo(printable(line), err=err, nl=False, passing=True)


def write(text: str) -> None:
    """Write a model's text to standard output as it is, at once.

    On a terminal, control characters become question marks.

    Raises:
        OSError: it cannot be written.
    """
    if sys.stdout.isatty():
        text = "".join(
            "?" if category(each) in ("Cc", "Cs") and each not in "\n\t" else each
            for each in text
        )
    sys.stdout.write(text)
    sys.stdout.flush()


def _echo(text: str, *, err: bool, nl: bool, passing: bool) -> None:
    erase = _ERASE if _passing[err] else ""
    _passing[err] = passing
    try:
        click.echo(erase + text, err=err, nl=nl)
    except OSError as error:
        if err:
            drop(sys.stderr)
        elif isinstance(error, BrokenPipeError):
            raise
        else:
            raise output_failed(error) from error


def flush_output() -> None:
    """Flush standard output."""
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = output_failed(error)
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader has closed the pipe
        raise failed from error


def output_failed(error: OSError) -> click.ClickException:
    """The error for a standard output that cannot be written, which is then dropped."""
    drop(sys.stdout)
    return cannot_write("standard output", error)


def cannot_write(what: str, error: OSError, then: str = "") -> click.ClickException:
    """The error for something that cannot be written, and what to do ``then``."""
    return click.ClickException(f"{what} cannot be written: {error.strerror}{then}")


def drop(stream: TextIO) -> None:
    """Send a stream to /dev/null: the interpreter's flush at exit would fail again."""
    with suppress(OSError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


class OutputFile:
    """A file of JSON lines. It is made, or changed, when the first line is written.

    It is closed when the command ends.

    Args:
        option: the option that names the file.
        prompts_file: the file of prompts, which must be another one.
        prepare: called before the first line is added. Without it the file's content is
            dropped then.

    Raises:
        click.UsageError: it is the file of prompts, or cannot be written.
    """

    def __init__(
        self,
        option: str,
        path: str,
        prompts_file: str | None,
        prepare: Callable[[], None] | None = None,
    ):
        self._option, self._path, self._prepare = option, path, prepare
        self._context = click.get_current_context()
        both_exist = prompts_file and prompts_file != "-" and os.path.exists(path)
        if both_exist and os.path.samefile(path, str(prompts_file)):
            raise click.UsageError(f"{option} is the file of --prompts: name another")
        self._file: TextIO | None = None
        try:
            # The reader of a pipe sees its end even if nothing is written.
            if not _can_be_written(path, replaced=prepare is not None):
                self._file = self._opened()
        except OSError as error:
            reason = f"{error.strerror}: name another file"
            folder = os.path.dirname(path)
            if folder and not os.path.isdir(folder):
                reason = f"there is no folder {shorten(folder)}: create it first"
            raise click.UsageError(
                f"{option} {shorten(path)} cannot be written: {reason}"
            ) from error

    def write(self, value: Any, *, indent: int | None = None) -> None:
        """Write a value as JSON."""
        try:
            if self._file is None:
                self._file = self._started()
            self._file.write(json_text(value, indent=indent) + "\n")
            self._file.flush()
        except OSError as error:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()  # its buffer would fail again later
            what = f"{self._option} {self._path}"
            room = "make room or " * (error.errno == errno.ENOSPC)
            raise cannot_write(what, error, f": {room}name another file") from error

    def _started(self) -> TextIO:
        """A regular file, with the content that it keeps."""
        if self._prepare is not None:
            self._prepare()
        file = self._opened()
        if self._prepare is None:
            file.truncate(0)
        return file

    def _opened(self) -> TextIO:
        return self._context.with_resource(
            open(self._path, "a", encoding="utf-8", errors=HALVES)
        )


def _can_be_written(path: str, *, replaced: bool) -> bool:
    """Whether a regular file is there, or can be made there, and can be written.

    Args:
        replaced: whether a new file will take the place of one that is there.

    Returns:
        ``False`` if something else is there, such as a pipe.

    Raises:
        OSError: the file cannot be written.
    """
    places = []
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        places.append(path)
    except FileNotFoundError:
        replaced = True
    if replaced:
        whole = os.path.realpath(path) if os.path.islink(path) else path
        places.append(os.path.dirname(whole) or ".")
    for place in places:
        os.stat(place)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return True


# -- errors ------------------------------------------------------------------------


def report(error: Exception) -> int:
    """Print one line to standard error; return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return USAGE
    if isinstance(error, click.Abort):
        show_interrupted()
        return INTERRUPTED
    if debugging():
        traceback.print_exception(error)
    message, code = _describe(error)
    show_error(message)
    return code


def show_error(message: str) -> None:
    """Print one line to standard error."""
    show(f"specdec: error: {as_message(' '.join(message.split()))}", err=True)


def note(text: str) -> None:
    """Print a line to standard error that is not an error."""
    show(f"specdec: note: {as_message(text)}", err=True)


@contextmanager
def noted_if_slow(text: str, *, quiet: bool) -> Iterator[None]:
    """Note what the block does, once it has taken :data:`_SILENCE` seconds."""
    timer = threading.Timer(_SILENCE, note, [text])
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show_interrupted(state: str | None = None) -> None:
    """Report an interrupt, and what was kept if the command keeps anything."""
    show("specdec: interrupted" + (f": {state}" if state else ""), err=True)
    interrupt_shown.set()


class _Lines(logging.Handler):
    """Shows each record as a line; on a terminal, the next replaces a passing one."""

    _before = False  # the record before was a passing one

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning" if record.levelno >= logging.WARNING else "note"
        line = f"specdec: {kind}: {as_message(record.getMessage())}"
        before, self._before = self._before, getattr(record, "passing", False)
        if not self._before:
            show(line, err=True)
        elif sys.stderr.isatty():
            show_passing(line, err=True)
        elif not before:  # a log gets the first of them, and their outcome
            show(line, err=True)


def show_warnings(*, notes: bool = True) -> None:
    """Show the library's warnings and notes as lines, like errors."""
    logger = logging.getLogger("specdec")
    if not logger.handlers:
        logger.addHandler(_Lines())
    logger.setLevel(logging.INFO if notes else logging.WARNING)


def debugging() -> bool:
    """Whether SPECDEC_DEBUG asks for tracebacks."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def _describe(error: Exception) -> tuple[str, int]:
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "specdec"
        message = (
            _unknown(error)
            if isinstance(error, click.NoSuchOption)
            else _with_range(error) + _stray(error) + _elsewhere(error.message)
        )
        return f"{message} (see: {command} --help)", USAGE
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, SpecdecError):
        return str(error), USAGE if isinstance(error, ConfigError) else FAILURE
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f"{shorten(error.filename)}: "
        return f"{name}{error.strerror}", FAILURE
    if isinstance(error, ImportError) and is_backend(error):
        return f"MLX has no backend here: {install_backend()} ({error})", FAILURE
    if is_full(error):
        return (
            "the memory is full: end other programs that use the device, or lower "
            f"--memory-limit or --batch if the command has them ({shorten(error)})",
            FAILURE,
        )
    newer = newer_than_tested()
    return (
        f"unexpected {type(error).__name__}: {shorten(error)} "
        f"({newer + '; ' if newer else ''}set {DEBUG}=1 to see where it comes from)",
        FAILURE,
    )


def _with_range(error: click.UsageError) -> str:
    """The error's message; for a wrong number, with the accepted ones in words.

    click writes ``x>=0`` for a range, and ``not a valid float range`` for a word.
    """
    message = error.format_message()
    kind = getattr(getattr(error, "param", None), "type", None)
    if isinstance(kind, click.types.IntParamType):
        numbers = "a whole number"
    elif isinstance(kind, click.types.FloatParamType):
        numbers = "a number"
    else:
        return message
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if high is not None:
        numbers += f" from {low} to {high}"
    elif low is not None:
        above = getattr(kind, "min_open", False)
        numbers += f" above {low}" if above else f", {low} or more"
    wrong = r" is not (?:in the range .*|a valid (?:integer|float).*)$"
    return re.sub(wrong, f" is not {numbers}", message)


def _stray(error: click.UsageError) -> str:
    """A hint for stray words, if the command takes prompts, settings or a model."""
    if error.ctx is None or "unexpected extra argument" not in error.message:
        return ""
    settings = error.ctx.params.get("settings") or ()
    if any("[" in each and "]" not in each for each in map(str, settings)):
        # The shell has split a list at its blanks.
        return ": put the value of --set in quotes, as in --set 'batch=[1, 8]'"
    options = {name for each in error.ctx.command.params for name in each.opts}
    words = error.message.partition("(")[2].rstrip(")").split()
    if "--prompts" in options and words and all(map(os.path.isfile, words)):
        return ": name one file after --prompts; cat joins several"
    if "--prompt" in options:
        return ": write a prompt after --prompt, in quotes"
    return ": name a model after --target" * ("--target" in options)


def _elsewhere(message: str) -> str:
    """A hint for a command of another program."""
    match = re.match(r"No such command '(.*)'\.$", message)
    meant = _COMMANDS_ELSEWHERE.get(match[1].lower()) if match else None
    return f" Did you mean '{meant}'?" if meant else ""


def _unknown(error: click.NoSuchOption) -> str:
    """The error's message, with the option of the closest spelling.

    click's own guess counts the dashes, which all options have: for ``--json`` it
    suggests ``--stop``.
    """
    message = f"No such option {error.option_name!r}."
    if error.ctx is None:
        return message
    name = error.option_name.lower().replace("_", "-")
    known = {
        opt.removeprefix("--"): opt
        for each in error.ctx.command.get_params(error.ctx)
        for opt in each.opts
        if opt.startswith("--")
    }
    name = name.lstrip("-")
    if name in _ELSEWHERE:
        closest = _ELSEWHERE[name] if _ELSEWHERE[name] in known else None
    else:
        candidates = [o for o in known if o.startswith(name) or name.startswith(o)]
        sure = len(candidates) == 1 and len(name) > 2
        closest = candidates[0] if sure else nearest(name, known, cutoff=_NEAR)
    return message if closest is None else f"{message} Did you mean {known[closest]!r}?"


# Commands of mlx-lm, vLLM, llama.cpp and others that have another name here.
_COMMANDS_ELSEWHERE = {
    "batch": "run",
    "benchmark": "bench",
    "cli": "run",
    "complete": "run",
    "generate": "run",
    "lora": "distill",
    "run-batch": "run",
    "start": "serve",
    "train": "distill",
    "try": "demo",
}
# The least similarity of two names that differ by one typing error.
_NEAR = 0.74
# Options of mlx-lm, vLLM and llama.cpp that have another name here, or no counterpart
# although another option is spelt alike.
_ELSEWHERE = {
    "ctx-size": None,
    "draft-max": "num-draft-tokens",
    "file": "prompts",
    "gpu-memory-utilization": "memory-limit",
    "input": "prompts",
    "input-file": "prompts",
    "json": None,
    "lora": "adapter-path",
    "lora-path": "adapter-path",
    "max-batch-size": "batch",
    "max-model-len": "max-prompt-tokens",
    "max-new-tokens": "max-tokens",
    "max-num-seqs": "batch",
    "max-seq-len": None,
    "model-draft": "draft",
    "n-predict": "max-tokens",
    "num-speculative-tokens": "num-draft-tokens",
    "out": "output",
    "outfile": "output",
    "output-file": "output",
    "prompt-file": "prompts",
    "prompts-file": "prompts",
    "quantize": None,
    "spec-draft-model": "draft",
    "speculative-config": "draft",
    "speculative-model": "draft",
    "stream": None,
    "system": "system-prompt",
    "tensor-parallel-size": "tensor-parallel",
}


def name_of(index: int, records: Sequence[PromptRecord]) -> str:
    """A prompt's name for messages: its file and line, if it has them."""
    where = records[index].where
    return f"prompt {index}" if where is None else f"{where} (prompt {index})"


def share_text(share: float | None) -> str:
    """A text after a draft's name: how much of the target's vocabulary it shares."""
    return "" if share is None else f", which has {share:.1%} of the target's tokens"


def undrafted(draft: str) -> str:
    """Why ``auto`` drafted nothing; n-grams also need words that come again."""
    copied = "no words came again, or " if draft == "ngram" else ""
    return f"nothing was drafted: {copied}it is not worth it here"


@contextmanager
def places_named(records: Sequence[PromptRecord]) -> Iterator[None]:
    """Let errors of a prompt name its file and line within the block."""
    try:
        yield
    except SpecdecError as error:
        if error.prompt is None:
            raise
        name = name_of(error.prompt, records)
        raise error.of_prompt(error.prompt, name) from error


def command_line() -> str:
    """The command line as typed, with absolute paths cut to their last part."""
    return shlex.join(["specdec", *map(short, sys.argv[1:])])


def check_extra(what: str, extra: str, *modules: str) -> None:
    """Refuse to go on without the packages of an extra."""
    if not all(map(importlib.util.find_spec, modules)):
        raise click.ClickException(f"{what} needs more packages: {install(extra)}")


def silence_third_parties() -> None:
    """Quiet transformers and the hub, before they are imported.

    Environment variables that the user has set stay as they are. A download keeps its
    progress bar on a terminal, as a model can take minutes.
    """
    if debugging():
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
