"""Options that several commands have: one place for their names and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..config import DEFAULT_NUM_DRAFT_TOKENS, MAX_BATCH_SIZE, NumDraftTokens
from ..draft_names import DraftSpec, draft_for
from ..model_names import DEFAULT_DRAFT, DEFAULT_TARGET, target_name

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[F], F]


def target(text: str = "MLX model folder, hub id or .gguf file.") -> Option[Any]:
    """``--target``, also ``--model`` as mlx-lm calls it."""
    text = f"{text} [default: {DEFAULT_TARGET}]"
    return click.option("--target", "--model", metavar="MODEL", help=text)


def draft(text: str = "Draft, named as for `specdec run`.") -> Option[Any]:
    """``--draft``, also ``--draft-model`` as mlx-lm calls it."""
    text = (
        f"{text} [default: none; for the default target {DEFAULT_DRAFT}, which comes "
        "with specdec]"
    )
    return click.option("--draft", "--draft-model", metavar="MODEL", help=text)


def check_target(target: str | None) -> None:
    """Refuse what cannot be a target's name, before anything is imported for it.

    Raises:
        ModelNameError: it cannot.
    """
    if target is not None and not target.strip():
        raise click.UsageError("--target is empty: name a model")
    target_name(target)


def check_pair(target: str | None, draft: str | None) -> DraftSpec | None:
    """The draft that is meant; names are checked as far as they tell.

    Raises:
        ConfigError, ModelNameError: one cannot be a name.
    """
    check_target(target)
    if draft is not None and not draft.strip():
        raise click.UsageError("--draft is empty: name a model, or none")
    return draft_for(target, draft)


def prompts(text: str, *, required: bool = True) -> Option[Any]:
    """``--prompts``, whose value is named ``file``."""
    return file("--prompts", "file", text=text, required=required)


def file(*names: str, text: str, metavar: str = "FILE", **more: Any) -> Option[Any]:
    """An option that names a file, or with ``multiple`` some."""

    def named(_: click.Context, option: click.Parameter, value: Any) -> Any:
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not each.strip():
                raise click.UsageError(f"{option.opts[0]} is empty: name a file")
        return value

    return click.option(*names, metavar=metavar, callback=named, help=text, **more)


def positive(
    *names: str,
    text: str,
    default: int | tuple[int, ...] | None = None,
    low: int = 1,
    high: int | None = None,
    **more: Any,
) -> Option[Any]:
    """An option that is a number, ``low`` or more, and ``high`` at most."""
    return click.option(
        *names,
        type=click.IntRange(low, high),
        metavar="N",
        default=default,
        show_default=default is not None,
        help=text,
        **more,
    )


def num_prompts(text: str, *, default: int | None = None) -> Option[Any]:
    """``--num-prompts``: how many of a file's prompts to take."""
    return positive("--num-prompts", default=default, text=text)


def max_tokens(text: str, *, default: int | None = None, low: int = 1) -> Option[Any]:
    """``--max-tokens``, ``-m``."""
    return positive("--max-tokens", "-m", default=default, low=low, text=text)


def batch(text: str, *, default: int) -> Option[Any]:
    """``--batch``, also ``--batch-size``, whose value is named ``batch_size``."""
    return positive(
        "--batch",
        "--batch-size",
        "batch_size",
        default=default,
        high=MAX_BATCH_SIZE,
        text=text,
    )


def batches(text: str, *, default: tuple[int, ...]) -> Option[Any]:
    """The same, to be repeated; the values are named ``batch_sizes``."""
    return positive(
        "--batch",
        "--batch-size",
        "batch_sizes",
        default=default,
        high=MAX_BATCH_SIZE,
        text=text,
        multiple=True,
    )


def num_draft_tokens(text: str, *, low: int) -> Option[Any]:
    """``--num-draft-tokens``: a number, ``low`` or more, or ``auto``."""

    def parsed(
        context: click.Context, option: click.Parameter, value: str
    ) -> NumDraftTokens:
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low:
            raise click.BadParameter(f"{value!r} is not auto, nor a number from {low}")
        return number

    return click.option(
        "--num-draft-tokens",
        callback=parsed,
        metavar="N|auto",
        default=str(DEFAULT_NUM_DRAFT_TOKENS),
        show_default=True,
        help=text,
    )


def prefill_step_size(text: str, *, default: int) -> Option[Any]:
    """``--prefill-step-size``."""
    return positive("--prefill-step-size", default=default, text=text)


def max_kv_size(text: str) -> Option[Any]:
    """``--max-kv-size``."""
    return positive("--max-kv-size", low=5, text=text)


def kv_bits(text: str) -> Option[Any]:
    """``--kv-bits``: 4 or 8."""

    def parsed(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
        return int(value) if value else None

    return click.option(
        "--kv-bits", type=click.Choice(["4", "8"]), callback=parsed, help=text
    )


def kv_group_size() -> Option[Any]:
    """``--kv-group-size``."""
    return click.option(
        "--kv-group-size",
        type=click.Choice(["32", "64", "128"]),
        default="64",
        show_default=True,
        help="Elements that share a scale, with --kv-bits.",
    )


def temp(text: str = "Sampling temperature; 0 is greedy.") -> Option[Any]:
    """``--temp``."""
    return click.option(
        "--temp",
        type=click.FloatRange(min=0),
        metavar="T",
        default=0.0,
        show_default=True,
        help=text,
    )


def seed(*, random: bool = False) -> Option[Any]:
    """``--seed``; ``random``: without one it is, else 0."""
    text = "Seed of the first prompt's draws; each next prompt's is one more."
    if random:
        text += " [default: a random one, which the summary and --output report]"
    return click.option(
        "--seed",
        type=int,
        metavar="N",
        default=None if random else 0,
        show_default=not random,
        help=text,
    )


def dtype(
    text: str = "Load the weights in this type. [default: as they are stored]",
) -> Option[Any]:
    """``--dtype``."""
    choices = click.Choice(["float32", "bfloat16", "float16"])
    return click.option("--dtype", type=choices, help=text)


def trust_remote_code() -> Option[Any]:
    """``--trust-remote-code``."""
    return click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run Python code that lies in a model's folder, where the model asks for "
        "that.",
    )


def memory_limit(text: str) -> Option[Any]:
    """``--memory-limit``."""
    return click.option("--memory-limit", metavar="SIZE", help=text)


def ignore_chat_template() -> Option[Any]:
    """``--ignore-chat-template``."""
    return click.option(
        "--ignore-chat-template",
        is_flag=True,
        help="Encode prompts raw, without the chat template.",
    )


def quiet(text: str = "No progress.") -> Option[Any]:
    """``--quiet``, ``-q``."""
    return click.option("--quiet", "-q", is_flag=True, help=text)


def is_given(name: str) -> bool:
    """Whether the option was typed, be it with its default value."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def dashed(name: str) -> str:
    """The option of a parameter's name."""
    return "--" + name.replace("_", "-")
