"""The options of all commands: names, help, checks, and the groups of a help page.

Options that belong together reach a command as one value (:func:`packed`), so that each
rule about them is in one place.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import (
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import click
from click.core import ParameterSource

from ..config import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_PREFIX_CACHE_SIZE,
    MAX_BATCH_SIZE,
    EngineConfig,
    NumDraftTokens,
)
from ..errors import ConfigError
from ..grammar import Grammar, check_grammar
from ..model_names import (
    AUTO_DRAFT,
    DEFAULT_DRAFT,
    DEFAULT_TARGET,
    DraftSpec,
    draft_for,
    named_draft,
    pair_name,
    target_name,
)
from ..prompts import Encoding
from ..sampling_params import SamplingParams
from ..utils.data_files import DataError, parse_table, read_text
from ..utils.sizes import parse_count, parse_size

#: Adds an option to a command.
Option: TypeAlias = Callable[[Any], Any]
F = TypeVar("F", bound=Callable[..., Any])
# Far more tokens than any model's context holds.
MOST_TOKENS = 1 << 30

#: Groups of a help page and the parameters in each, in order. Parameters in no group
#: come last.
GROUPS: dict[str, tuple[str, ...]] = {
    "Common options": (
        "target", "draft", "texts", "file", "context", "out", "max_tokens", "temp",
        "batch_size", "batch_sizes", "num_draft_tokens", "minutes", "output_file",
        "host", "port", "api_keys", "dry_run", "quiet",
    ),
    "Requests": (
        "names", "cors", "max_waiting", "max_output_tokens", "max_prompt_tokens",
        "max_body", "request_timeout", "stop_timeout", "strict",
    ),
    "Models": (
        "dtype", "adapter_path", "draft_adapter_path", "revision", "may_download",
        "trust_remote_code", "tensor_parallel", "devices", "system_prompt",
        "prefill_response",
        "chat_template", "chat_template_config", "ignore_chat_template",
        "begin_with", "kind", "form", "block_size", "layers", "widen", "bits",
        "layers_only",
    ),
    "Prompts": ("prompts", "text", "holdout", "num_prompts"),
    "Data and training": (
        "tokens", "data_minutes", "data_tokens", "topics", "data", "resume",
        "learning_rate", "writers", "block_tokens",
    ),
    "Sampling": (
        "min_tokens", "max_thinking_tokens", "stop", "stop_token_ids", "top_p", "min_p",
        "top_k",
        "xtc_probability", "xtc_threshold", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "logit_bias", "seed", "json_schema", "regex",
        "grammar_file",
    ),
    "Drafting": ("verification", "draft_corpus", "draws", "max_restarts", "rounds"),
    "Memory": (
        "memory_limit", "load_vision", "device", "memory", "prefill_step_size",
        "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start", "prefix_cache",
        "prefix_cache_size", "prefix_cache_memory", "prefix_answers", "prefix_sharing",
    ),
    "Many devices": ("replicas", "ray", "ray_workers"),
    "Output": (
        "output_format", "resumed", "top_logprobs", "prompt_logprobs", "json_file",
        "as_json", "help",
    ),
}  # fmt: skip
# A page with fewer options has no groups.
_FEW = 10


def grouped(
    command: click.Command, ctx: click.Context
) -> dict[str, list[click.Option]]:
    """The options of a command's help page, by the titles of their groups."""
    remaining = {
        p.name: p for p in command.get_params(ctx) if isinstance(p, click.Option)
    }
    if len(remaining) < _FEW:
        return {"Options": list(remaining.values())}
    groups = {
        title: [remaining.pop(name) for name in names if name in remaining]
        for title, names in GROUPS.items()
    }
    groups["Output"] += remaining.values()
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


def added(command: F, some: tuple[Option, ...]) -> F:
    """Add options to ``command``."""
    for option in reversed(some):
        command = option(command)
    return command


def packed(name: str, read: Callable[..., Any], *some: Option) -> Option:
    """Combine options so that they reach a command as one argument.

    Args:
        name: the argument's name.
        read: turns the options' values into the argument's value, before a model is
            loaded. Its errors are the command's. :func:`given` reads other options.
    """

    def probe() -> None:
        """Take the options, so that their names can be read."""

    added(probe, some)
    names = [param.name for param in probe.__click_params__]  # type: ignore[attr-defined]

    def give(command: F) -> Any:
        @wraps(command)
        def call(**values: Any) -> Any:
            group = {each: values.pop(each) for each in names}
            return command(**{name: read(**group)}, **values)

        return added(call, some)

    return give


def given(name: str) -> Any:
    """The value of an option of the running command; ``None`` if there is none."""
    return click.get_current_context().params.get(name)


def is_given(name: str) -> bool:
    """Whether the option was typed, even with its default value."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def dashed(name: str) -> str:
    """The option's spelling for a parameter's name."""
    return "--" + name.replace("_", "-")


# -- kinds of options ---------------------------------------------------------------


def size(name: str, *, or_none: bool = False, **more: Any) -> Option:
    """An option for a number of bytes, such as 8GB; ``or_none`` allows 0."""

    def parsed(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else parse_size(value, or_none=or_none)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error

    return click.option(name, metavar="SIZE", callback=parsed, **more)


def positive(
    *names: str,
    default: int | tuple[int, ...] | None = None,
    low: int = 1,
    high: int | None = None,
    **more: Any,
) -> Option:
    """An option for a whole number from ``low`` to ``high``."""
    return click.option(
        *names,
        type=click.IntRange(low, high),
        metavar="N",
        default=default,
        show_default=default is not None,
        **more,
    )


def field(kind: Any, name: str, *flags: str, **more: Any) -> Option:
    """An option for a field of a dataclass: its type, default and documentation.

    The dataclass checks the value when it is built, and its error names the option.

    Args:
        flags: names of the option, and its parameter's; left out: the field's name.
        more: arguments of ``click.option`` that replace what the field says.
    """
    hint, default = get_type_hints(kind)[name], kind.__dataclass_fields__[name].default
    (inner, *_) = [each for each in get_args(hint) if each is not type(None)] or [hint]
    text, unset = documented(kind)[name]
    if default is None and unset:
        text += f" [default: {unset}]"
    settings: dict[str, Any] = {"help": text, "default": default}
    settings["show_default"] = default is not None
    if get_origin(inner or hint) is Literal or get_origin(hint) is Literal:
        settings["type"] = click.Choice(get_args(hint))
    elif get_origin(hint) is tuple:
        settings |= {"type": inner, "multiple": True, "show_default": False}
        settings["help"] += " Repeat it for more."
    else:
        settings["type"] = inner
    settings["metavar"] = {int: "N", float: "X", str: "TEXT"}.get(settings["type"])
    return click.option(*(flags or (dashed(name),)), **{**settings, **more})


@cache
def documented(kind: Any) -> dict[str, tuple[str, str]]:
    """What a dataclass's docstring says of each field, in plain text.

    Brackets that name other fields are left out: they are for Python.

    Returns:
        The text of each field, and what ``None`` stands for if it says so at its end.
    """
    text = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
    text = text.partition("\n\n")[0]
    texts = {}
    entry = r"(?m)^    ([a-z]\w*(?:, \w+)*):\s((?:.|\n {8})*)"
    for names, description in re.findall(entry, text):
        plain = re.sub(r" \([^()]*``[^()]*\)", "", " ".join(description.split()))
        plain, _, unset = plain.partition(" ``None``: ")
        plain = plain.replace("``", "").rstrip(".;,") + "."
        for name in names.split(", "):
            texts[name] = plain[:1].upper() + plain[1:], unset.rstrip(".")
    return texts


def _filled(
    *names: str, metavar: str = "FILE", remedy: str = "name a file", **more: Any
) -> Option:
    """An option of a text that is not empty, or of several with ``multiple``."""

    def check(_: click.Context, option: click.Parameter, value: Any) -> Any:
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not each.strip():
                raise click.UsageError(f"{option.opts[0]} is empty: {remedy}")
        return value

    return click.option(*names, metavar=metavar, callback=check, **more)


file = _filled
texts = partial(
    _filled, "--prompt", "-p", "texts",
    multiple=True, metavar="TEXT", remedy="give it a text",
)  # fmt: skip
prompts = partial(file, "--prompts", "file", required=True)
num_prompts = partial(positive, "--num-prompts")
max_tokens = partial(positive, "--max-tokens", "-m")
_BATCH = ("--batch", "--batch-size")
batch = partial(positive, *_BATCH, "batch_size", high=MAX_BATCH_SIZE)
batches = partial(positive, *_BATCH, "batch_sizes", high=MAX_BATCH_SIZE, multiple=True)
temp = partial(field, SamplingParams, "temperature", "--temp", "temp")
top_p = partial(field, SamplingParams, "top_p")
max_thinking_tokens = partial(field, SamplingParams, "max_thinking_tokens")
verification = partial(field, SamplingParams, "verification")
dtype = partial(
    click.option, "--dtype", type=click.Choice(["float32", "bfloat16", "float16"])
)
trust_remote_code = partial(
    click.option,
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code from a model's folder if the model asks for it.",
)
ignore_chat_template = partial(
    click.option,
    "--ignore-chat-template",
    is_flag=True,
    help="Encode prompts as they are, without the chat template.",
)
quiet = partial(click.option, "--quiet", "-q", is_flag=True, help="No progress.")
# Options of the engine, see :func:`engine`.
prefill_step_size = partial(field, EngineConfig, "prefill_step_size")
max_kv_size = partial(field, EngineConfig, "max_kv_size")
kv_bits = partial(field, EngineConfig, "kv_bits")
kv_group_size = partial(field, EngineConfig, "kv_group_size")
draft_corpus = partial(
    field, EngineConfig, "draft_corpus", "--draft-corpus/--no-draft-corpus"
)
load_vision = partial(
    field, EngineConfig, "load_vision", is_flag=True, show_default=False
)
memory_limit = partial(
    size,
    "--memory-limit",
    help="Use at most this much memory, such as 8GB or 6.5GiB. [default: all that the "
    "device has]",
)


def seed(
    text: str = "Seed of the first prompt's random draws; each next prompt's is one "
    "more.",
    *,
    random: bool = False,
) -> Option:
    """``--seed``; the default is a random seed with ``random``, else 0."""
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


def num_draft_tokens(text: str, *, low: int) -> Option:
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
        if not low <= number <= MOST_TOKENS:
            raise click.BadParameter(
                f"{value!r} is not auto, nor a whole number from {low} to {MOST_TOKENS}"
            )
        return number

    return click.option(
        "--num-draft-tokens",
        callback=parsed,
        metavar="N|auto",
        default=str(DEFAULT_NUM_DRAFT_TOKENS),
        show_default=True,
        help=text,
    )


def context(text: str) -> Option:
    """``--context``: a number of tokens, such as ``8192`` or ``8k``."""

    def parsed(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
        if value is None:
            return None
        try:
            n = parse_count(value)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error
        if not 2 <= n <= MOST_TOKENS:
            raise click.BadParameter(f"{value} is not between 2 and {MOST_TOKENS}")
        return n

    return click.option("--context", callback=parsed, metavar="N", help=text)


# -- target and draft ---------------------------------------------------------------


def target(text: str = "MLX model folder, hub id or .gguf file.") -> Option:
    """``--target``, or ``--model`` as in mlx-lm; checked before slow imports."""

    def checked(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise click.UsageError("--target is empty: name a model")
        target_name(value)
        return value

    text = f"{text} [default: {DEFAULT_TARGET}]"
    return click.option(
        "--target", "--model", metavar="MODEL", callback=checked, help=text
    )


@dataclass(frozen=True)
class Models:
    """A target, a draft, and how they are loaded.

    Args:
        target, draft: their names, as given.
        spec: the parsed draft; ``None``: no draft.
        may_download: whether ``--draft auto`` may download without asking.
        loading: further arguments of ``SpecDecoder.from_pretrained``.
    """

    target: str | None
    draft: str | None
    spec: DraftSpec | None
    loading: dict[str, Any]
    may_download: bool = False

    def __str__(self) -> str:
        return pair_name(self.target, self.spec)

    def arguments(self, config: EngineConfig) -> dict[str, Any]:
        """All arguments of ``SpecDecoder.from_pretrained``.

        With ``--draft auto``, a draft may be downloaded now.
        """
        if self.spec is not None and self.spec.automatic:
            from .auto_draft import offer

            offer(self, config)
        names = {"target": self.target, "draft": self.draft}
        return {**self.loading, **names, "config": config}

    @classmethod
    def read(
        cls,
        target: str | None,
        draft: str | None,
        dtype: str | None,
        *,
        trust_remote_code: bool,
        may_download: bool,
        **origins: str | None,
    ) -> Models:
        """Parse the models that the options name; nothing is loaded.

        Raises:
            click.UsageError: an option is empty, or has no effect without a draft.
            ConfigError, ModelNameError: no draft can have that name.
        """
        if draft is not None and not draft.strip():
            raise click.UsageError("--draft is empty: name a model, or none")
        spec = draft_for(target, draft)
        if spec is None:
            _check_no_draft(draft)
        if is_given("verification") and given("temp") == 0:
            raise click.UsageError(_alike("--temp above 0"))
        places = {name: value for name, value in origins.items() if value is not None}
        for name, value in places.items():
            if not value.strip():
                what = "branch, tag or commit" if name == "revision" else "folder"
                raise click.UsageError(f"{dashed(name)} is empty: name a {what}")
        loading = {"dtype": dtype, "trust_remote_code": trust_remote_code, **places}
        return cls(target, draft, spec, loading, may_download)

    def automatic(self) -> Models:
        """The same with the draft that ``--draft auto`` would take."""
        return replace(self, draft=AUTO_DRAFT, spec=named_draft(AUTO_DRAFT))


def _check_no_draft(draft: str | None) -> None:
    """Refuse options that have no effect without a draft."""
    if is_given("num_draft_tokens") and draft is not None:
        raise click.UsageError(
            f"--num-draft-tokens has no effect with --draft {draft}: leave one of them "
            "out"
        )
    if is_given("verification"):
        raise click.UsageError(_alike("a draft (--draft)"))
    for name in ("num_draft_tokens", "draft_adapter_path"):
        if is_given(name):
            raise click.UsageError(f"{dashed(name)} needs --draft: name a draft")


def _alike(missing: str) -> str:
    return f"--verification needs {missing}: without it all are the same"


def models(
    target_option: Option | None = None,
    *,
    draft_help: str = "Draft, named as for `specdec run`.",
    draft_default: str = "none",
    dtype_help: str = "Load the weights in this type. [default: as they are stored]",
) -> Option:
    """Options of models; the command gets ``models``, see :class:`Models`.

    Args:
        draft_help: help text of ``--draft`` (or ``--draft-model``, as in mlx-lm).
        draft_default: the draft of other targets than the default one.
        dtype_help: help text of ``--dtype``.
    """
    text = (
        f"{draft_help} [default: {draft_default}; for the default target "
        f"{DEFAULT_DRAFT}, a head that comes with specdec]"
    )
    return packed(
        "models",
        Models.read,
        target_option or target(),
        click.option("--draft", "--draft-model", metavar="MODEL", help=text),
        dtype(help=dtype_help),
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
            help="Branch, tag or commit, for a target from the hub. [default: the "
            "newest]",
        ),
        click.option(
            "--yes",
            "may_download",
            is_flag=True,
            help="With --draft auto: download a draft without asking.",
        ),
        trust_remote_code(),
    )


# -- the engine ---------------------------------------------------------------------

prefix_cache = (
    click.option(
        "--prefix-cache",
        metavar="DIR",
        help="Store keys and values of prompts in this folder. Later prompts that "
        "begin alike reuse them, in this run and in others. [default: none]",
    ),
    size(
        "--prefix-cache-size",
        help="Largest size of that folder, such as 500MB or 8GB. The entries unused "
        f"for longest are removed. [default: {DEFAULT_PREFIX_CACHE_SIZE // 10**9}GB]",
    ),
    size(
        "--prefix-cache-memory",
        or_none=True,
        help="Keep prefixes of up to this size in memory, with or without a folder; 0 "
        "keeps none. [default: 1GB with --prefix-cache, with turns and in specdec "
        "serve; else 0]",
    ),
    field(EngineConfig, "prefix_answers", "--prefix-answers/--no-prefix-answers"),
)


def engine(*some: Option, **more: Any) -> Option:
    """Options of the engine, named like its config's fields; a command gets ``config``.

    Args:
        more: values of fields that have no option, or that replace an option's default.
    """

    def read(**values: Any) -> EngineConfig:
        folder = values.get("prefix_cache")
        if folder is not None and not folder.strip():
            raise click.UsageError("--prefix-cache is empty: name a folder")
        if folder is None and is_given("prefix_cache_size"):
            raise click.UsageError(
                "--prefix-cache-size needs --prefix-cache: name a folder"
            )
        for name in ("kv_group_size", "quantized_kv_start"):
            if values["kv_bits"] is None and is_given(name):
                raise click.UsageError(
                    f"{dashed(name)} needs --kv-bits: add --kv-bits 4 or 8"
                )
        settings = {name: value for name, value in values.items() if value is not None}
        return EngineConfig(**{**more, **settings})

    return packed("config", read, *some)


# -- prompts ------------------------------------------------------------------------


def chat_template_config() -> Option:
    """``--chat-template-config``: a JSON object."""

    def parsed(
        _: click.Context, __: click.Parameter, text: str | None
    ) -> dict[str, Any] | None:
        if text is None:
            return None
        try:
            return parse_table(text)
        except DataError as error:
            raise click.UsageError(
                f"--chat-template-config: {error}: write an object, such as "
                "'{\"enable_thinking\": false}'"
            ) from error

    return click.option(
        "--chat-template-config",
        metavar="JSON",
        callback=parsed,
        help="Variables for the chat template, such as '{\"enable_thinking\": false}'.",
    )


def _encoding(*, ignore_chat_template: bool, **values: Any) -> Encoding:
    settings = {name: value for name, value in values.items() if value is not None}
    if ignore_chat_template and settings:
        raise click.UsageError(
            f"{dashed(next(iter(settings)))} needs the chat template: leave out "
            "--ignore-chat-template"
        )
    encoding: Encoding = {"ignore_chat_template": ignore_chat_template}
    encoding.update(settings)  # type: ignore[typeddict-item]
    return encoding


#: The command gets ``encoding``: how prompts become token ids.
encoding = packed(
    "encoding",
    _encoding,
    click.option(
        "--system-prompt", metavar="TEXT", help="System turn for prompts without one."
    ),
    click.option(
        "--prefill-response",
        metavar="TEXT",
        help="Begin each answer with this text; the model continues it.",
    ),
    chat_template_config(),
    ignore_chat_template(),
)


# -- sampling -----------------------------------------------------------------------


def _grammar(
    json_schema: str | None, regex: str | None, grammar_file: str | None
) -> Grammar | None:
    """The grammar that the output must follow, checked; ``None``: any output."""
    values = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar_file}
    names = [name for name, value in values.items() if value is not None]
    if len(names) > 1:
        raise click.UsageError(f"{names[0]} and {names[1]}: give one of them")
    if regex is not None:
        grammar = Grammar.regex(regex)
    elif json_schema is not None:
        grammar = Grammar.json_schema(_read(json_schema))
    elif grammar_file is not None:
        grammar = Grammar.lark(_read(grammar_file))
    else:
        return None
    check_grammar(grammar)
    return grammar


def _read(file: str) -> str:
    try:
        return read_text(file)
    except FileNotFoundError as error:
        is_text = file.lstrip().startswith(("{", "["))
        remedy = "write it into a file, and name that" if is_text else "check the path"
        raise ConfigError(f"{file}: there is no such file: {remedy}") from error
    except DataError as error:
        raise ConfigError(f"{file}: {error}: name a file of UTF-8 text") from error


def _biases(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[int, float] | None:
    """Logit biases by token id, from texts ``ID=BIAS``."""
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


def _params(
    *,
    temp: float,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    json_schema: str | None,
    regex: str | None,
    grammar_file: str | None,
    **same_names: Any,
) -> SamplingParams:
    for name, n in ("top", top_logprobs), ("prompt", prompt_logprobs):
        if n is not None and given("output_file") is None:
            raise click.UsageError(
                f"--{name}-logprobs needs --output: name a file for them"
            )
    return SamplingParams(
        temperature=temp,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        prompt_logprobs=prompt_logprobs,
        grammar=_grammar(json_schema, regex, grammar_file),
        **same_names,
    ).seeded()


#: The command gets ``params``: how all prompts are decoded.
sampling = packed(
    "params",
    _params,
    field(
        SamplingParams,
        "max_tokens",
        *("--max-tokens", "-m"),
        help="Generate at most N tokens for each prompt.",
    ),
    field(SamplingParams, "min_tokens"),
    max_thinking_tokens(),
    field(SamplingParams, "stop"),
    field(SamplingParams, "stop_token_ids", "--stop-token-id", "stop_token_ids"),
    temp(),
    top_p(),
    *(
        field(SamplingParams, name)
        for name in (
            "min_p",
            "top_k",
            "xtc_probability",
            "xtc_threshold",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_biases,
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID (-inf forbids it); repeat it for more.",
    ),
    seed(random=True),
    verification(),
    click.option(
        "--top-logprobs",
        type=click.IntRange(min=0),
        metavar="N",
        help="Write the log-probability of every token, and of the N most likely ones "
        "at its position, to --output.",
    ),
    field(SamplingParams, "prompt_logprobs"),
    file(
        "--json-schema", help="The output is JSON that follows the schema in this file."
    ),
    click.option(
        "--regex", metavar="PATTERN", help="The whole output matches this expression."
    ),
    file(
        "--grammar",
        "grammar_file",
        help="The output follows the Lark grammar in this file.",
    ),
)


# -- errors -------------------------------------------------------------------------

# Options whose name differs from the field that they fill.
_NAMED = {"temperature": "temp", "logprobs": "top_logprobs"}


def with_options(error: ConfigError, command: click.Command) -> ConfigError:
    """The error, with the names of fields replaced by options of ``command``.

    A field is recognized at the start of the message, ``NAME is VALUE: ...``, or as a
    word with an underscore; other names could be ordinary words.
    """
    options = {
        option.name: option.opts[0]
        for option in command.params
        if isinstance(option, click.Option)
    }

    def named(match: re.Match[str]) -> str:
        field = match.group()
        return options.get(_NAMED.get(field, field), field)

    message = re.sub(r"^\w+(?= is )", named, str(error))
    # Not within paths and quotes, which contain the user's words.
    message = re.sub(r"(?<![\w./'\"-])[a-z]+(?:_[a-z]+)+(?![\w./'\"-])", named, message)
    return type(error)(message)
