"""Encodes a job's source as token ids: chat, text, or the middle of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ..decoder import SpecDecoder
from ..errors import PromptError
from ..grammar import Grammar
from ..prompts import EncodedPrompt, encode
from ..prompts.templates import render_chat, template_of
from .job import Chat, Message, Text, Tools
from .refusal import Refusal
from .system_turns import arranged
from .tool_calls import CallFormat, format_of

#: Tokens around the text before and after a gap: the first one, the one between, the
#: last one, and whether the text after the gap comes first. One line per model family.
_GAPS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", False),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>",
     "<\uff5cfim\u2581end\uff5c>", False),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", False),
    ("[SUFFIX]", "[PREFIX]", "", True),
)  # fmt: skip
#: Tokens with which such models end the text in the gap.
_GAP_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>",
    "<|file_separator|>", "<|repo_name|>", "\u2581<EOT>", "<EOT>",
)  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """A prompt for the model, and how its answer begins and ends.

    Args:
        thinks: whether the answer begins with reasoning.
        begun: the beginning of the answer, with which the prompt ends.
        stop_token_ids: further tokens that end the answer.
    """

    prompt: EncodedPrompt
    thinks: bool = False
    begun: str = ""
    stop_token_ids: tuple[int, ...] = ()


def encode_source(decoder: SpecDecoder, source: Chat | Text) -> Encoded:
    """Encode a source as token ids.

    Raises:
        PromptError, Refusal: the source cannot be encoded.
    """
    if isinstance(source, Chat):
        return _chat(decoder, source)
    if source.suffix is not None:
        return _gap(decoder, source)
    return Encoded(
        encode(
            decoder.tokenizer,
            source.prompt,
            limit=decoder.prompt_limit,
            ignore_chat_template=isinstance(source.prompt, str),
        )
    )


def _chat(decoder: SpecDecoder, chat: Chat) -> Encoded:
    tokenizer, tools = decoder.tokenizer, chat.tools
    calls = format_of(tokenizer)
    if tools.functions:
        check_tools(tokenizer, calls, tools)
    messages = arranged(tokenizer, chat.messages)
    if calls is not None:
        messages = calls.fit_ids(messages)
    options: dict[str, Any] = {
        "tools": list(tools.functions) or None,
        "continued": chat.continue_final,
    }
    prompt = encode(
        tokenizer,
        messages,
        limit=decoder.prompt_limit,
        chat_template_config=chat.variables,
        **options,
    )
    thinks = _thinks(tokenizer, prompt.text, messages, chat.variables, **options)
    if not tools.forced and not (thinks and chat.formatted):
        return Encoded(prompt, thinks)
    begun = beginning(calls, tools.name) if tools.forced else ""
    written = f"{tokenizer.think_end}\n\n{begun}" if thinks else begun
    more = tokenizer.encode(written, add_special_tokens=False)
    text, token_ids = prompt.text + written, (*prompt.token_ids, *more)
    return Encoded(replace(prompt, text=text, token_ids=token_ids), begun=begun)


def _thinks(
    tokenizer: Any,
    text: str,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    tools: Any,
    continued: bool,
) -> bool:
    """Whether the answer begins within a thought.

    Only what the template wrote after the last turn says so, or the beginning of the
    answer that is continued: a turn may speak of the markers.
    """
    start = getattr(tokenizer, "think_start", None)
    if not start or start not in text:
        return False
    before = ""
    if earlier := messages[:-1] if continued else messages:
        try:
            before = render_chat(
                tokenizer, earlier, variables, tools=tools, answer=False
            )
        except Exception:  # a template may refuse them without an answer
            text = messages[-1]["content"] if continued else ""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
    written = text[sum(1 for _ in same) :]
    return written.rfind(start) > written.rfind(tokenizer.think_end)


def check_tools(tokenizer: Any, calls: CallFormat | None, tools: Tools) -> None:
    """Refuse tools that the model's chat template or parser does not support."""
    template = template_of(tokenizer, tools=tools.functions)
    reads = template is None or "tools" in template
    if calls is None or not reads:
        raise Refusal.unsupported(
            "tools",
            "tools is not supported: the chat template of this model knows no tools; "
            "use another model",
        )
    if tools.forced:
        beginning(calls, tools.name)


def beginning(calls: CallFormat | None, name: str | None) -> str:
    """The beginning of an answer that calls ``name``, or any function for ``None``."""
    assert calls is not None
    if name is None:
        return calls.start
    if calls.opening is None:
        raise Refusal.unsupported(
            "tool_choice",
            f"tool_choice names a function, and calls of this model ({calls.name}) can "
            "only be required: use required",
        )
    return calls.start + calls.opening.replace("$", name)


def call_grammar(tokenizer: Any, tools: Tools) -> Grammar | None:
    """The grammar of an answer that begins with a call of a strict function."""
    wanted = [
        tool["function"]
        for tool in tools.functions
        if tools.name in (None, tool["function"]["name"])
    ]
    if not tools.forced or not any(each.get("strict") for each in wanted):
        return None
    calls = format_of(tokenizer)
    if calls is None or not calls.is_json or calls.opening is None:
        raise Refusal.unsupported(
            "tools",
            "strict is not supported: calls of this model are no JSON; leave it out",
        )
    rules = []
    for i, each in enumerate(wanted):
        schema = dict(each.get("parameters") or {"type": "object"})
        schema["x-guidance"] = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
        begun = "" if tools.name else json.dumps(calls.opening).replace(
            "$", each["name"]
        )  # fmt: skip
        rules += [f"call{i}: {begun} arguments{i} {json.dumps(calls.closing)}",
                  f"arguments{i}: %json {json.dumps(schema)}"]  # fmt: skip
    start = " | ".join(f"call{i}" for i in range(len(wanted)))
    return Grammar.lark("\n".join([f"start: {start}", *rules]))


def _gap(decoder: SpecDecoder, source: Text) -> Encoded:
    tokenizer, before, after = decoder.tokenizer, source.prompt, source.suffix
    if not isinstance(before, str) or after is None:
        raise Refusal("suffix needs a prompt that is a text", param="suffix")
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    known = (
        gap for gap in _GAPS if all(token in vocabulary for token in gap[:3] if token)
    )
    if (gap := next(known, None)) is None:
        raise Refusal.unsupported(
            "suffix",
            "suffix is not supported: this model's tokenizer has no tokens to fill the "
            "middle with; use a model that was trained for it",
        )
    first, between, last, reverse = gap
    decoder.prompt_limit.check(before, after)
    try:
        parts = [
            list(tokenizer.encode(text, add_special_tokens=False)) if text else []
            for text in ((after, before) if reverse else (before, after))
        ]
    except Exception as error:
        raise PromptError("the tokenizer fails on it") from error
    tokens = [vocabulary[first], *parts[0], vocabulary[between], *parts[1]]
    if last:
        tokens.append(vocabulary[last])
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and tokenizer.encode("")[:1] == [bos]:
        tokens.insert(0, bos)
    decoder.prompt_limit.check_count(len(tokens))
    ends = {
        vocabulary[t] for t in (*_GAP_ENDS, first, between, last) if t in vocabulary
    }
    ends = {t for t in ends if t < decoder.bounds.vocab_size}
    return Encoded(
        EncodedPrompt(before, tuple(tokens)), stop_token_ids=tuple(sorted(ends))
    )
