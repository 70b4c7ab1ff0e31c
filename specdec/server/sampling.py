"""Sampling parameters of requests, for all protocols."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ..errors import ConfigError
from ..grammar import Grammar
from ..sampling_params import FILTERS, SamplingParams, Verification
from ..utils.printable import quoted
from .config import DEFAULT_NAME
from .errors import RequestError, request_error
from .job import Chat, Client, Job, Message, Tools
from .schema import Notes, Record, Refused, read
from .service import Service
from .tool_grammar import call_ends, call_grammar

#: OpenAI documents temperatures up to this one.
_WARM = 2


class StreamOptions(Record):
    """What streams have besides the answer."""

    place = "stream_options"
    accepted = frozenset({"include_obfuscation"})  # it pads what an observer sees
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Record):
    """vLLM's forms of answers."""

    place = "structured_outputs"
    accepted = frozenset(
        {"disable_any_whitespace", "disable_additional_properties", "disable_fallback",
         "backend", "_backend", "whitespace_pattern"}
    )  # fmt: skip
    refused: ClassVar[Mapping[str, Refused]] = {
        "structural_tag": Refused("use tools, or grammar")
    }
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Record):
    """Parameters of every endpoint: mlx-lm's, vLLM's and this server's own."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
        **dict.fromkeys(
            ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"),
            "max_thinking_tokens",
        ),
    }
    accepted = frozenset(
        {"cache_prompt", "keep_alive", "priority", "request_id", "id_slot",
         "spaces_between_special_tokens", "guided_decoding_backend",
         "guided_whitespace_pattern", "timings_per_token", "n_keep",
         # Of samplers that are refused unless they are off.
         "dry_base", "dry_allowed_length", "dry_penalty_last_n",
         "dry_sequence_breakers", "dynatemp_exponent", "mirostat_tau", "mirostat_eta"}
    )  # fmt: skip
    # What mlx_lm.server, vLLM and llama.cpp take for "off".
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "top_k": (-1,),
        "logprobs": (False, -1),
        "top_logprobs": (-1, 0),
        "repetition_penalty": (0, 1),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "seed": (-1,),
        "logit_bias": ([],),
        "max_thinking_tokens": (-1,),
    }
    refused: ClassVar[Mapping[str, Refused]] = {
        "best_of": Refused(
            "candidates are not ranked here: ask for n and choose", (1,)
        ),
        "draft_model": Refused(
            "the server's draft is used: leave it out", (DEFAULT_NAME,)
        ),
        "adapters": Refused("the server names an adapter for all: leave it out"),
        "role_mapping": Refused("the model's own template is used", ({},)),
        "options": Refused("name its parameters in the request itself", ({},)),
        "think": Refused("use chat_template_kwargs or reasoning_effort"),
        "grammar": Refused("use guided_grammar, in Lark", ("",)),
        "include_stop_str_in_output": Refused("stop texts are left out", (False,)),
        "use_beam_search": Refused("there is no beam search", (False,)),
        "bad_words": Refused("use logit_bias", ([],)),
        "prompt_logprobs": Refused("prompts have no log-probabilities here"),
        "truncate_prompt_tokens": Refused("prompts are not shortened here"),
        "allowed_token_ids": Refused("use logit_bias, or a grammar", ([],)),
        "chat_template": Refused("the model's own is used"),
        "detokenize": Refused("answers are texts; use return_token_ids", (True,)),
        "documents": Refused("put them into messages", ([],)),
        "include_reasoning": Refused("leave reasoning_content unread", (True,)),
        "json_schema": Refused("use response_format"),
        "length_penalty": Refused("there is no beam search", (1,)),
        "logits_processors": Refused("nothing is run here", ([],)),
        "n_probs": Refused("use logprobs", (0,)),
        # llama.cpp's names, with the values that its clients send by default.
        "repeat_penalty": Refused("did you mean repetition_penalty?", (1,)),
        "reasoning_format": Refused(
            "thoughts are in reasoning_content", ("auto", "deepseek")
        ),
        "return_tokens_as_token_ids": Refused("use return_token_ids", (False,)),
        "return_tokens": Refused("did you mean return_token_ids?", (False,)),
        "repeat_last_n": Refused("did you mean repetition_context_size?", (0, 64, -1)),
        # Samplers of llama.cpp, with the values that turn them off.
        **dict.fromkeys(
            ("dry_multiplier", "dynatemp_range", "min_keep", "mirostat"),
            Refused("there is no such sampler", (0,)),
        ),
        "top_n_sigma": Refused("there is no such sampler", (-1, 0)),
        **dict.fromkeys(
            ("tfs_z", "typical_p"), Refused("there is no such sampler", (1,))
        ),
    }
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_context_size: int | None = None
    frequency_context_size: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=128)
    num_draft_tokens: int | None = None
    cache_salt: str | None = None
    verification: Verification | None = None
    max_thinking_tokens: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    stream: bool = False

    def user(self) -> list[Any]:
        """The names by which a request identifies its user."""
        return [self.cache_salt]


class OpenAISampling(Sampling):
    """Parameters that OpenAI documents for all of its endpoints."""

    accepted = Sampling.accepted | {
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
        "service_tier", "store", "client_metadata",
    }  # fmt: skip
    refused: ClassVar[Mapping[str, Refused]] = {
        **Sampling.refused,
        "moderation": Refused("nothing is moderated here"),
    }
    model: str | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    # A user's labels can keep prefixes apart.
    user_: str | None = Field(None, alias="user")
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None

    def user(self) -> list[Any]:
        named = (self.metadata or {}).get("user_id")
        return [named, self.cache_salt, self.user_, self.safety_identifier]

    def usage(self) -> StreamOptions:
        """What a stream says of its tokens."""
        if self.stream_options is not None and not self.stream:
            text = "stream_options needs stream: add it"
            raise RequestError.invalid("stream_options", text)
        return self.stream_options or StreamOptions()


def grammar_of(
    request: Sampling, format_: Mapping[str, Any] | None, where: str, notes: Notes
) -> tuple[str, Grammar | None]:
    """The parameter that asks for a form of the answer, and its grammar, or ``None``.

    Args:
        format_: the protocol's own field for it, which ``where`` names.
    """
    forms: list[tuple[str, Grammar | None]] = [(where, _format(format_, where, notes))]
    outputs = request.structured_outputs
    if outputs is not None:
        forms += _outputs("structured_outputs.", outputs.json_, outputs.regex,
                          outputs.choice, outputs.grammar)  # fmt: skip
        if outputs.json_object:
            forms.append(("structured_outputs.json_object", Grammar.json_object()))
    forms += _outputs("guided_", request.guided_json, request.guided_regex,
                      request.guided_choice, request.guided_grammar)  # fmt: skip
    asked = [(name, grammar) for name, grammar in forms if grammar is not None]
    # Clients of several versions of vLLM send the same grammar under both names.
    if len({grammar for _, grammar in asked}) > 1:
        raise RequestError.invalid(
            asked[1][0], f"{asked[1][0]} does not go with {asked[0][0]}: leave one out"
        )
    return asked[0] if asked else (where, None)


def _outputs(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[tuple[str, Grammar | None]]:
    forms: tuple[tuple[str, Any, Callable[[Any], Grammar]], ...] = (
        ("json", schema, Grammar.json_schema),
        ("regex", regex, Grammar.regex),
        ("choice", choice, Grammar.choice),
        ("grammar", grammar, Grammar.lark),
    )
    grammars: list[tuple[str, Grammar | None]] = []
    for name, value, make in forms:
        where = prefix + name
        try:
            if value is not None:
                grammars.append((where, make(value)))
        except ConfigError as error:
            raise RequestError.invalid(where, f"{where}: {error}") from error
    return grammars


class _Schema(Record):
    accepted = frozenset({"name", "description"})
    guesses = False
    place = "response_format"
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class _Regex(Record):
    pattern: str


class _Lark(Record):
    grammar: str


def _format(
    format_: Mapping[str, Any] | None, where: str, notes: Notes
) -> Grammar | None:
    kind = "text" if format_ is None else format_.get("type")
    if format_ is None or kind == "text":
        return None
    plain = {key: value for key, value in format_.items() if key != "type"}
    try:
        if kind == "json_object":
            return Grammar.json_object()
        if kind == "json_schema":
            # Chat completions have the schema one level deeper than other endpoints.
            inner = plain.get("json_schema", plain)
            place = where + ".json_schema" * (where == "response_format")
            return Grammar.json_schema(read(_Schema, inner, notes, place).schema_)
        if kind == "regex":
            return Grammar.regex(read(_Regex, plain, notes, where).pattern)
        if kind == "grammar":
            return Grammar.lark(read(_Lark, plain, notes, where).grammar)
    except ConfigError as error:
        raise RequestError.invalid(where, f"{where}: {error}") from error
    raise RequestError.invalid(
        where,
        f"{where}.type is {quoted(kind)}: it must be text, json_object, json_schema, "
        "regex or grammar",
    )


def chat_job(
    request: Sampling,
    service: Service,
    notes: Notes,
    *,
    names: Mapping[str, str],
    messages: Sequence[Message],
    tools: Tools,
    format_: Mapping[str, Any] | None,
    variables: Mapping[str, Any],
    continued: bool = False,
    stop: tuple[str, ...] = (),
    n: int = 1,
    **more: Any,
) -> Job:
    """What a request of a chat protocol asks for.

    Args:
        names: names of parameters, by the fields that they fill.
        format_: the protocol's own field for the form of the answer.
        continued: the last message is the beginning of the answer.
        stop: the client's stop texts.
        more: further fields for :func:`sampling`.
    """
    tokenizer = service.decoder.tokenizer
    where, grammar = grammar_of(request, format_, names["grammar"], notes)
    answer = call_grammar(tokenizer, tools, grammar, where, notes)
    names = {**names, "grammar": answer.where}
    params = sampling(
        request,
        service,
        notes,
        names,
        stop=(*stop, *call_ends(tokenizer, tools)),
        grammar=answer.grammar,
        **more,
    )
    chat = Chat(messages, tools, continued, variables, formatted=grammar is not None)
    return Job(
        [chat],
        params,
        n,
        names,
        stop=stop,
        grammar_required=answer.required,
        grammar_parts=answer.parts,
        token_ids=request.return_token_ids,
        hides_special=request.skip_special_tokens,
    )


def sampling(
    request: Sampling,
    service: Service,
    notes: Notes,
    names: Mapping[str, str],
    *,
    client: Client,
    max_tokens: int | None,
    **more: Any,
) -> SamplingParams:
    """The sampling parameters of a request; the seed is drawn here.

    Args:
        names: names of parameters, by the fields that they fill.
        client: who asks.
        max_tokens: the number that the request asks for.
        more: fields that the protocol has filled itself.
    """
    config = service.config
    limit = config.max_output_tokens
    # llama.cpp and LM Studio mean "no limit" with -1.
    wanted = config.max_tokens if max_tokens in (None, -1) else max_tokens
    if limit is not None and wanted > limit:
        param = names.get("max_tokens", "max_tokens")
        raise RequestError.invalid(
            param, f"{param} is {wanted}: this server allows {limit}"
        )
    settings: dict[str, Any] = {
        "temperature": config.temperature,
        **{
            name: value
            for name in type(request).model_fields.keys() & _FIELDS
            if (value := getattr(request, name)) is not None
        },
        "max_tokens": wanted,
        **more,
    }
    if settings.get("xtc_probability") == 0:
        settings.pop("xtc_threshold", None)  # other servers' clients send both
    if "logit_bias" in settings:
        settings["logit_bias"] = _biases(settings["logit_bias"])
    if config.prefix_sharing == "client":
        settings["cache_salt"] = json.dumps([client.name, *request.user()])
    if not client.alone:
        salt = settings.get("cache_salt")
        settings["draft_corpus"] = json.dumps([client.name, salt])
    if request.ignore_eos and settings.get("grammar") is None:
        settings["min_tokens"] = wanted
    if settings["temperature"] > _WARM and isinstance(request, OpenAISampling):
        notes.add(f"temperature is above {_WARM}, the highest that OpenAI documents")
    thinks = getattr(service.decoder.tokenizer, "has_thinking", False)
    if settings.get("max_thinking_tokens") is not None and not thinks:
        notes.add("this model does not think: max_thinking_tokens changes nothing")
    if settings["temperature"] > 0:
        settings.setdefault("seed", secrets.randbits(32))
    try:
        if settings["temperature"] == 0 and settings.keys() & set(FILTERS):
            # Filters have no effect at temperature 0; their values are still checked.
            SamplingParams(**{**settings, "temperature": 1.0})
            settings = {k: v for k, v in settings.items() if k not in FILTERS}
        return SamplingParams(**settings)
    except ConfigError as error:
        raise request_error(error, names) from error


_FIELDS = SamplingParams.__dataclass_fields__.keys()


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit()) or len(token) > 10:
            raise RequestError.invalid(
                "logit_bias",
                'logit_bias must map token ids to numbers, as in {"1234": -5}',
            )
    return {int(token): bias for token, bias in biases.items()}


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    """Stop texts, from one text or several; empty ones are left out."""
    texts = [value] if isinstance(value, str) else value or []
    return tuple(filter(None, texts))
