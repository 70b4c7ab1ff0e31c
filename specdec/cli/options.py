"""Options: their names, meaning and checks, and the groups of a help page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from ..config import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_PREFIX_CACHE_SIZE,
    MAX_BATCH_SIZE,
    NumDraftTokens,
)
from ..errors import ConfigError
from ..grammar import Grammar
from ..model_names import (
    DEFAULT_DRAFT,
    DEFAULT_TARGET,
    DraftSpec,
    draft_for,
    target_name,
)
from ..prompts import Encoding
from ..sampling_params import DEFAULT_MAX_TOKENS, VERIFICATIONS, SamplingParams
from ..utils.data_files import DataError, check_shape, parse_json
from ..utils.sizes import parse_count, parse_size

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[F], F]
# Far more than any model serves; sums of it are numbers that can be shown.
MOST_TOKENS = 1 << 30

#: Groups of a help page, and the parameters in each; the first comes first. What is in
#: none of them ends the page.
GROUPS: dict[str, tuple[str, ...]] = {
    "Common options": (
        "target", "draft", "texts", "file", "context", "out", "max_tokens", "temp",
        "batch_size", "batch_sizes", "num_draft_tokens", "minutes", "output_file",
        "host", "port", "api_keys", "dry_run", "quiet",
    ),
    "Requests": (
        "names", "cors", "max_waiting", "max_output_tokens", "max_prompt_tokens",
        "max_body", "request_timeout", "stop_timeout",
    ),
    "Models": (
        "dtype", "adapter_path", "draft_adapter_path", "revision",
        "trust_remote_code", "tensor_parallel", "system_prompt", "prefill_response",
        "chat_template", "chat_template_config", "ignore_chat_template",
        "kind", "form", "block_size", "layers", "widen", "bits", "layers_only",
    ),
    "Prompts": ("prompts", "text", "holdout", "num_prompts"),
    "Data and training": (
        "tokens", "data_minutes", "data_tokens", "data", "resume",
        "optimizer", "learning_rate", "writers", "block_tokens",
    ),
    "Sampling": (
        "min_tokens", "stop", "stop_token_ids", "top_p", "min_p", "top_k",
        "xtc_probability", "xtc_threshold", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "logit_bias", "seed", "json_schema", "regex",
        "grammar_file",
    ),
    "Drafting": ("verification", "draws", "max_restarts", "rounds"),
    "Memory": (
        "memory_limit", "prefill_step_size", "max_kv_size", "kv_bits",
        "kv_group_size", "quantized_kv_start", "prefix_cache", "prefix_cache_size",
        "prefix_cache_memory", "prefix_sharing",
    ),
    "Many devices": ("replicas", "ray", "ray_workers"),
    "Output": (
        "output_format", "resumed", "top_logprobs", "json_file", "as_json", "help",
    ),
}  # fmt: skip
# A page of fewer options is read at a glance.
_FEW = 10


def grouped(
    command: click.Command, ctx: click.Context
) -> dict[str, list[click.Option]]:
    """The options of a command's help page by the titles of their groups."""
    found = [p for p in command.get_params(ctx) if isinstance(p, click.Option)]
    if len(found) < _FEW:
        return {"Options": found}
    where = {name: title for title, names in GROUPS.items() for name in names}
    groups: dict[str, list[click.Option]] = {title: [] for title in GROUPS}
    for option in found:
        groups.setdefault(where.get(option.name or "", "Output"), []).append(option)
    common = next(iter(GROUPS))
    groups[common].sort(key=lambda option: GROUPS[common].index(option.name or ""))
    return {title: some for title, some in groups.items() if some}


class Command(click.Command):
    """A command whose help page shows its options in groups."""

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        for title, some in grouped(self, ctx).items():
            records = [record for o in some if (record := o.get_help_record(ctx))]
            with formatter.section(title):
                formatter.write_dl(records)


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
    """The draft that is meant; names are checked without loading anything.

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


def context(text: str) -> Option[Any]:
    """``--context``: a number of tokens, also as ``8k``."""

    def parsed(_: click.Context, __: click.Parameter, value: str) -> int:
        try:
            n = parse_count(value)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error
        if not 2 <= n <= MOST_TOKENS:
            raise click.BadParameter(f"{value} is not between 2 and {MOST_TOKENS}")
        return n

    return click.option(
        "--context", callback=parsed, metavar="N", required=True, help=text
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
        help="Run Python code from a model's folder if the model asks for it.",
    )


_ORIGIN = (
    click.option(
        "--adapter-path",
        metavar="DIR",
        help="LoRA adapter for the target, as mlx_lm.lora writes it.",
    ),
    click.option(
        "--draft-adapter-path", metavar="DIR", help="LoRA adapter for the draft."
    ),
    click.option(
        "--revision",
        metavar="NAME",
        help="Branch, tag or commit of a target of the hub. [default: the newest]",
    ),
)


_LOADING = ("dtype", "trust_remote_code")
_ORIGINS = ("adapter_path", "draft_adapter_path", "revision")


def loading(*text: str) -> Option[Any]:
    """How models are loaded: the command gets ``loading``, to be checked.

    These are arguments of ``SpecDecoder.from_pretrained``; ``text`` is the help of
    ``--dtype``.
    """

    def give(command: F) -> F:
        @wraps(command)
        def packed(**values: Any) -> Any:
            found = {name: values.pop(name) for name in _LOADING}
            origins = {name: values.pop(name) for name in _ORIGINS}
            given = {k: v for k, v in origins.items() if v is not None}
            return command(loading={**found, **given}, **values)

        some = (dtype(*text), *_ORIGIN, trust_remote_code())
        return added(cast(F, packed), some)

    return give


def check_loading(loading: Mapping[str, Any], *, drafts: bool) -> None:
    """Check what :func:`loading` gave, before anything is loaded.

    Raises:
        click.UsageError: one is empty, or needs a draft.
    """
    for name in _ORIGINS:
        if name in loading and not loading[name].strip():
            what = "branch, tag or commit" if name == "revision" else "folder"
            raise click.UsageError(f"{dashed(name)} is empty: name a {what}")
    if "draft_adapter_path" in loading and not drafts:
        raise click.UsageError("--draft-adapter-path needs --draft: name a draft")


def chat_template_config() -> Option[Any]:
    """``--chat-template-config``, whose value :func:`template_variables` reads."""
    return click.option(
        "--chat-template-config",
        metavar="JSON",
        help="Variables for the chat template, such as '{\"enable_thinking\": false}'.",
    )


_TEMPLATE = (
    click.option(
        "--system-prompt", metavar="TEXT", help="System turn of prompts that have none."
    ),
    click.option(
        "--prefill-response",
        metavar="TEXT",
        help="Begin each answer with this text; the model continues it.",
    ),
    click.option(
        "--chat-template",
        metavar="FILE",
        help="Chat template in Jinja, in place of the model's own.",
    ),
    chat_template_config(),
)


def encoding(command: F) -> F:
    """Give ``command`` the options; it hands their values to :func:`encoding_of`."""
    return added(command, (*_TEMPLATE, ignore_chat_template()))


def template_variables(text: str | None) -> dict[str, Any]:
    """The value of ``--chat-template-config``; nothing where it was not given.

    Raises:
        click.UsageError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        found: dict[str, Any] = check_shape(parse_json(text), {})
    except DataError as error:
        raise click.UsageError(
            f"--chat-template-config: {error}: write an object, such as "
            "'{\"enable_thinking\": false}'"
        ) from error
    return found


def encoding_of(
    *,
    ignore_chat_template: bool,
    chat_template_config: str | None,
    **given: str | None,
) -> Encoding:
    """How prompts are encoded.

    Raises:
        click.UsageError: an option needs the chat template, which is ignored, or is no
            JSON.
    """
    found: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    if chat_template_config is not None:
        found["chat_template_config"] = template_variables(chat_template_config)
    if ignore_chat_template and found:
        raise click.UsageError(
            f"{dashed(next(iter(found)))} needs the chat template: leave out "
            "--ignore-chat-template"
        )
    encoding: Encoding = {"ignore_chat_template": ignore_chat_template}
    encoding.update(found)  # type: ignore[typeddict-item]
    return encoding


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


def check_num_draft_tokens(draft: str | None, *, drafts: bool) -> None:
    """Refuse ``--num-draft-tokens`` where nothing drafts."""
    if drafts or not is_given("num_draft_tokens"):
        return
    if draft is not None:
        raise click.UsageError(
            f"--num-draft-tokens has no effect with --draft {draft}: leave one of them "
            "out"
        )
    raise click.UsageError("--num-draft-tokens needs --draft: name a draft")


def check_kv_options(kv_bits: int | None) -> None:
    """Refuse options of ``--kv-bits`` without it."""
    for name in ("kv_group_size", "quantized_kv_start"):
        if kv_bits is None and is_given(name):
            raise click.UsageError(
                f"{dashed(name)} needs --kv-bits: add --kv-bits 4 or 8"
            )


def check_verification(temp: float, *, drafts: bool) -> None:
    """Refuse ``--verification`` where every rule is the same."""
    if is_given("verification") and (temp == 0 or not drafts):
        missing = "a draft (--draft)" if not drafts else "--temp above 0"
        raise click.UsageError(
            f"--verification needs {missing}: without it all are the same"
        )


def dashed(name: str) -> str:
    """The option of a parameter's name."""
    return "--" + name.replace("_", "-")


# Options that are not called like the field that they fill.
_NAMED = {"temperature": "temp", "logprobs": "top_logprobs"}


def with_options(error: ConfigError, command: click.Command) -> ConfigError:
    """The error, with options of ``command`` in place of the fields that they fill.

    A field is known by the start of the message, ``NAME is VALUE: ...``, or as a
    word with an underscore: others are words of the language too.
    """
    options = {
        option.name: option.opts[0]
        for option in command.params
        if isinstance(option, click.Option)
    }

    def named(found: re.Match[str]) -> str:
        field = found.group()
        return options.get(_NAMED.get(field, field), field)

    message = re.sub(r"^\w+(?= is )", named, str(error))
    # Not within names, paths and quotes, which are the user's.
    message = re.sub(r"(?<![\w./'\"-])[a-z]+(?:_[a-z]+)+(?![\w./'\"-])", named, message)
    return type(error)(message)


# -- of ``specdec run`` alone: sampling ---------------------------------------------


def _biases(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[int, float] | None:
    """Token ids and what is added to their logits, from texts ``ID=BIAS``."""
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(
                f"{value!r} is not of the form ID=BIAS, as in 1234=-5"
            ) from None
    return biases or None


_SAMPLING = (
    max_tokens("Most tokens to generate for a prompt.", default=DEFAULT_MAX_TOKENS),
    positive(
        "--min-tokens",
        text="Tokens to generate before one may end a prompt's output.",
        default=0,
        low=0,
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="Stop before this text appears; repeat it for more.",
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        multiple=True,
        type=click.IntRange(min=0),
        metavar="ID",
        help="Stop before this token; repeat it for more.",
    ),
    temp(),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        show_default=True,
        help="Draw from the likeliest tokens that together have probability P.",
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        show_default=True,
        help="Draw from tokens at least P times as likely as the likeliest.",
    ),
    click.option(
        "--top-k",
        type=int,
        metavar="K",
        default=0,
        show_default=True,
        help="Draw from the K likeliest tokens; 0 draws from all.",
    ),
    click.option(
        "--xtc-probability",
        type=float,
        metavar="P",
        default=0.0,
        show_default=True,
        help="At each token, with probability P, leave out all tokens above "
        "--xtc-threshold but the least likely of them.",
    ),
    click.option(
        "--xtc-threshold",
        type=float,
        metavar="P",
        default=0.1,
        show_default=True,
        help="The probability above which XTC leaves tokens out.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Divide positive logits of the newest 20 tokens by X, multiply negative "
        "ones by X.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="Subtract X from the logits of the newest 20 tokens.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Subtract X for each occurrence among the newest 20 tokens.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_biases,
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID (-inf forbids it); repeat it for more.",
    ),
    seed(random=True),
    click.option(
        "--verification",
        type=click.Choice(VERIFICATIONS),
        default="coupled",
        show_default=True,
        help="How draft tokens are accepted, with --temp and --draft. Only coupled "
        "gives the same text with every draft.",
    ),
    click.option(
        "--top-logprobs",
        type=click.IntRange(min=0),
        metavar="N",
        help="Write log-probabilities of tokens, and of the N likeliest at each "
        "position, to --output.",
    ),
)


def sampling(command: F) -> F:
    """Give ``command`` the options; it hands their values to :func:`params_of`."""
    return added(command, _SAMPLING)


def params_of(
    *,
    drafts: bool,
    output_file: str | None,
    temp: float,
    top_logprobs: int | None,
    grammar: Grammar | None = None,
    **same_names: Any,
) -> SamplingParams:
    """What the options ask for.

    Args:
        drafts: whether anything proposes tokens.
        grammar: what the output has to follow.

    Raises:
        click.UsageError: an option is left without effect by another.
        ConfigError: a value is out of range.
    """
    check_verification(temp, drafts=drafts)
    if top_logprobs is not None and output_file is None:
        raise click.UsageError("--top-logprobs needs --output: name a file for them")
    return SamplingParams(
        temperature=temp,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        grammar=grammar,
        **same_names,
    ).seeded()


# -- the prefix cache -------------------------------------

_PREFIX = (
    click.option(
        "--prefix-cache",
        metavar="DIR",
        help="Keep the keys and values of prompts in this folder. Later prompts that "
        "begin alike reuse them, in this run and in others. [default: none]",
    ),
    click.option(
        "--prefix-cache-size",
        metavar="SIZE",
        help="Most that the folder may hold, such as 500MB or 8GB; the entries unused "
        f"for longest are removed. [default: {DEFAULT_PREFIX_CACHE_SIZE // 10**9}GB]",
    ),
    click.option(
        "--prefix-cache-memory",
        metavar="SIZE",
        help="Most to keep in memory, with a folder or without; 0 keeps none. "
        "[default: 1GB with --prefix-cache, for turns and in specdec serve, else none]",
    ),
)


def prefix_cache(command: F) -> F:
    """Give ``command`` the options; it hands their values to :func:`prefix_config`."""
    return added(command, _PREFIX)


def prefix_config(
    *,
    prefix_cache: str | None,
    prefix_cache_size: str | None,
    prefix_cache_memory: str | None,
) -> dict[str, Any]:
    """What they say, as arguments of ``EngineConfig``.

    Raises:
        click.UsageError: one needs another, or is empty.
        ConfigError: no size.
    """
    if prefix_cache is not None and not prefix_cache.strip():
        raise click.UsageError("--prefix-cache is empty: name a folder")
    if prefix_cache is None and is_given("prefix_cache_size"):
        raise click.UsageError(
            "--prefix-cache-size needs --prefix-cache: name a folder"
        )
    config: dict[str, Any] = {"prefix_cache": prefix_cache}
    if prefix_cache_size is not None:
        config["prefix_cache_size"] = parse_size(prefix_cache_size)
    if prefix_cache_memory is not None:
        config["prefix_cache_memory"] = parse_size(prefix_cache_memory, or_none=True)
    return config


def added(command: F, some: tuple[Option[Any], ...]) -> F:
    """Give ``command`` some options."""
    for option in reversed(some):
        command = option(command)
    return command
