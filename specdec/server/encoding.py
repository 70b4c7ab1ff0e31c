"""Encodes a job's source as token ids: chat, text, or the middle of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..decoder import SpecDecoder
from ..errors import PromptError
from ..prompts import EncodedPrompt, encode
from .errors import RequestError
from .job import Chat, Message, Text
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
        opening: the beginning of the answer, with which the prompt ends.
        stop_token_ids: further tokens that end the answer.
    """

    prompt: EncodedPrompt
    thinks: bool = False
    opening: str = ""
    stop_token_ids: tuple[int, ...] = ()


def encode_source(decoder: SpecDecoder, source: Chat | Text) -> Encoded:
    """Encode a source as token ids.

    Raises:
        PromptError, RequestError: the source cannot be encoded.
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
    messages: Sequence[Message] = arranged(tokenizer, chat.messages)
    if calls is not None:
        messages = calls.fitted(calls.fit_ids(messages), tools.functions)
    prompt = encode(
        tokenizer,
        messages,
        limit=decoder.prompt_limit,
        tools=list(tools.functions) or None,
        continued=chat.continued,
        chat_template_config=chat.variables,
    )
    thinks = prompt.thinks
    if not tools.forced and not (thinks and chat.formatted):
        return Encoded(prompt, thinks)
    opening = beginning(calls, tools.name) if tools.forced else ""
    written = f"{tokenizer.think_end}\n\n{opening}" if thinks else opening
    more = tokenizer.encode(written, add_special_tokens=False)
    text, token_ids = prompt.text + written, (*prompt.token_ids, *more)
    prompt = replace(prompt, text=text, token_ids=token_ids, thinks=False)
    return Encoded(prompt, opening=opening)


def beginning(calls: CallFormat | None, name: str | None) -> str:
    """The beginning of an answer that calls ``name``, or any function for ``None``."""
    assert calls is not None
    start = "" if calls.bare else calls.start
    if name is None:
        return start
    assert calls.opening is not None  # checked with the request
    return start + calls.opening.replace("$", name)


def _gap(decoder: SpecDecoder, source: Text) -> Encoded:
    tokenizer, before, after = decoder.tokenizer, source.prompt, source.suffix
    if not isinstance(before, str) or after is None:
        text = "suffix needs a prompt that is a text"
        raise RequestError.invalid("suffix", text)
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    known = (
        gap for gap in _GAPS if all(token in vocabulary for token in gap[:3] if token)
    )
    if (gap := next(known, None)) is None:
        raise RequestError.unsupported(
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
