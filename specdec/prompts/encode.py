"""Encodes a prompt (text, chat messages or token ids) as token ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar, Unpack

from ..errors import PromptError, PromptTooLongError, is_panic
from ..utils.printable import quoted, shorten
from .images import (
    MAX_ALL_PIXELS,
    MAX_IMAGES,
    Image,
    PlacedImage,
    holds_image,
    image_in,
)
from .templates import render_chat

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]

T = TypeVar("T")

# The limit of a prompt for a model whose context is not known.
MAX_PROMPT_BYTES = 64 * 2**20

#: Variables that specdec sets for templates, and options of the rendering function.
OWN_VARIABLES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message",
     "conversations", "max_length", "messages", "padding", "return_tensors",
     "return_assistant_tokens_mask", "return_dict", "tokenize", "tokenizer_kwargs",
     "truncation"}
)  # fmt: skip


class Encoding(TypedDict, total=False):
    """How a prompt becomes token ids; see :func:`encode`."""

    system_prompt: str | None
    ignore_chat_template: bool
    chat_template_config: Mapping[str, Any] | None
    prefill_response: str | None


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready for the model.

    ``text`` is a string prompt as it was given, messages as the chat template
    renders them, and a token list as the tokenizer decodes it. ``images`` stand in
    the order of their tokens. ``thinks``: the answer begins within a thought.
    """

    text: str
    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()
    thinks: bool = False


class ImageTokens(Protocol):
    """How a target writes images; :class:`specdec.models.vision.ImageEncoder`."""

    @property
    def marker(self) -> str: ...

    @property
    def token(self) -> int: ...

    def text_of(self, image: Image) -> str: ...

    def count_of(self, image: Image) -> int: ...

    def grid_of(self, image: Image) -> tuple[int, int] | None: ...


@dataclass(frozen=True)
class PromptLimit:
    """The largest prompt that can fit, checked before any work.

    Args:
        tokenizer: the target's tokenizer.
        context_length: the target's context, in tokens; ``None``: not known, so that
            only :data:`MAX_PROMPT_BYTES` counts.
        images: how images become tokens, or why there can be none.
    """

    tokenizer: Any = None
    context_length: int | None = None
    images: ImageTokens | str = "images are not supported here: leave them out"

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes of a prompt of ``context_length`` tokens."""
        if self.context_length is None:
            return MAX_PROMPT_BYTES
        vocabulary = self.tokenizer.get_vocab()
        longest = max((len(str(token).encode()) for token in vocabulary), default=1)
        return self.context_length * longest

    def check(self, *texts: str) -> None:
        """Refuse texts that have too many bytes together.

        Raises:
            PromptError: they have; the message names both numbers.
        """
        # A character has 1 to 4 bytes; a token has 1 or more.
        few = 4 * sum(map(len, texts)) <= (self.context_length or MAX_PROMPT_BYTES)
        if few or (size := sum(map(_num_bytes, texts))) <= self.max_bytes:
            return
        context = ""
        if self.context_length is not None:
            context = f" in the target's context of {self.context_length} tokens"
        longest = self.max_bytes // (self.context_length or 1)
        raise PromptTooLongError(
            f"it has {size} bytes and at most {self.max_bytes} fit{context}: shorten "
            "it",
            None if self.context_length is None else -(-size // longest),
            self.context_length,
        )

    def check_count(
        self, count: int, what: str = "tokens", image_tokens: int = 0
    ) -> None:
        """Refuse too many token ids, or other parts that take at least a token each.

        Args:
            image_tokens: how many of them are tokens of images.

        Raises:
            PromptError: there are too many; the message names both numbers.
        """
        if self.context_length is not None and count > self.context_length:
            unit = "" if what == "tokens" else " tokens"
            of_images = smaller = ""
            if image_tokens:
                of_images = f" ({image_tokens} of images)"
                smaller = ", or send fewer or smaller images"
            raise PromptTooLongError(
                f"it has {count} {what}{of_images} and the target's context is "
                f"{self.context_length}{unit}: shorten it{smaller}",
                count,
                self.context_length,
                image_tokens,
            )


NO_CONTEXT = PromptLimit()


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def encode_all(
    tokenizer: Any,
    prompts: Iterable[Prompt],
    *,
    limit: PromptLimit = NO_CONTEXT,
    **encoding: Unpack[Encoding],
) -> list[EncodedPrompt]:
    """Encode several prompts; an error names the prompt's index."""
    single = isinstance(prompts, str | bytes | Mapping)
    if single or not isinstance(prompts, Iterable):
        way_out = "[[message]]" if isinstance(prompts, Mapping) else "[prompt]"
        raise PromptError(
            f"prompts is of type {type(prompts).__name__}: pass a list of prompts, "
            + way_out
        )
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(encode(tokenizer, prompt, limit=limit, **encoding))
        except PromptError as error:
            raise error.of_prompt(index) from error
    return encoded


def encode(
    tokenizer: Any,
    prompt: Prompt,
    *,
    system_prompt: str | None = None,
    ignore_chat_template: bool = False,
    chat_template_config: Mapping[str, Any] | None = None,
    prefill_response: str | None = None,
    limit: PromptLimit = NO_CONTEXT,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continued: bool = False,
) -> EncodedPrompt:
    """Encode one prompt.

    A string becomes a user turn of the tokenizer's chat template, if there is one.
    Without a template, or with ``ignore_chat_template``, it is encoded raw, with
    special tokens unless it already begins with the BOS token, as in mlx-lm. Chat
    messages need a template. Token ids are taken as they are.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, or a tokenizer of transformers.
        prompt: a string, chat messages, or token ids.
        system_prompt: the system turn of prompts that have none of their own.
        ignore_chat_template: encode strings raw.
        chat_template_config: variables for the chat template, such as
            ``{"enable_thinking": False}``.
        prefill_response: the beginning of the answer, which the model continues.
        limit: the largest prompt.
        tools: tools that the model may call, as the chat template takes them.
        continued: the last message is the beginning of the answer.

    Raises:
        PromptError: the prompt is empty, too large, or cannot be encoded as asked.
    """
    has_template = not ignore_chat_template and _has_chat_template(tokenizer)
    of_template = {
        "a system prompt": system_prompt,
        "a configuration of the chat template": chat_template_config,
        "a prefilled response": prefill_response,
    }
    present = [what for what, value in of_template.items() if value is not None]
    if present and not has_template:
        raise PromptError(
            f"{present[0]} needs a chat template: leave it out"
            + (", or do not ignore the template" if ignore_chat_template else "")
        )
    _check_option("system prompt", system_prompt)
    _check_option("prefilled response", prefill_response)
    _check_template_config(chat_template_config)
    pictures: list[Image] = []

    def render(messages: list[Mapping[str, Any]]) -> EncodedPrompt:
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        if prefill_response is not None:
            messages = [*messages, {"role": "assistant", "content": prefill_response}]
        variables = chat_template_config or {}
        begins = continued or prefill_response is not None
        text = _render(tokenizer, messages, variables, tools=tools, continued=begins)
        thinks = _thinks(tokenizer, text, messages, variables, tools, begins)
        if pictures:
            whole = _with_images(tokenizer, text, pictures, limit)
            return replace(whole, thinks=thinks)
        tokens = _encode_rendered(tokenizer, text, limit)
        return EncodedPrompt(text, tokens, thinks=thinks)

    if isinstance(prompt, str):
        limit.check(prompt)
        check_text(prompt)
        if not has_template:
            return EncodedPrompt(prompt, _encode_raw(tokenizer, prompt))
        rendered = render([{"role": "user", "content": prompt}])
        return replace(rendered, text=prompt)
    if hasattr(prompt, "tolist"):  # an array of token ids
        prompt = prompt.tolist()
    no_list = isinstance(prompt, Mapping | bytes | bytearray)
    if no_list or not isinstance(prompt, Sequence):
        raise PromptError(
            "expected a string, a list of chat messages or a list of token ids, "
            f"not {type(prompt).__name__}"
            + (": pass [message]" if isinstance(prompt, Mapping) else "")
        )
    if not prompt:
        raise PromptError("it is empty")
    if not isinstance(prompt[0], Mapping):
        if present:
            raise PromptError(
                f"{present[0]} cannot be added to token ids: leave it out"
            )
        limit.check_count(len(prompt))
        token_ids = _check_token_ids(prompt, len(tokenizer))
        text = _tried(lambda: str(tokenizer.decode(list(token_ids))))
        return EncodedPrompt(text, token_ids)
    if not has_template:
        why = "it is ignored" if ignore_chat_template else "this tokenizer has none"
        raise PromptError(
            f"chat messages need a chat template, and {why}: give the prompt as a "
            "string"
        )
    return render(check_messages(prompt, limit, pictures))


def _thinks(
    tokenizer: Any,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
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
    size = len(before)
    if not text.startswith(before):
        pairs = zip(text, before, strict=False)
        size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    written = text[size:]
    return written.rfind(start) > written.rfind(tokenizer.think_end)


def _with_images(
    tokenizer: Any, text: str, pictures: Sequence[Image], limit: PromptLimit
) -> EncodedPrompt:
    """Encode rendered messages; each marker in them stands for an image."""
    encoder = limit.images
    assert not isinstance(encoder, str)
    between = text.split(encoder.marker)
    if len(between) != len(pictures) + 1:
        raise PromptError(
            f"the rendered messages have {len(between) - 1} image markers for "
            f"{len(pictures)} images: write no {encoder.marker} into a text"
        )
    whole, counts = between[0], []
    for image, following in zip(pictures, between[1:], strict=True):
        counts.append(encoder.count_of(image))
        limit.check_count(sum(counts), "tokens or more", sum(counts))
        whole += encoder.text_of(image) + following
    token_ids = _encode_rendered(tokenizer, whole, limit)
    limit.check_count(len(token_ids), image_tokens=sum(counts))
    places = [i for i, token in enumerate(token_ids) if token == encoder.token]
    if len(places) != sum(counts):
        raise PromptError(
            f"it has {len(places)} tokens of images for {sum(counts)} embeddings: "
            "write no marker of images into a text"
        )
    if places[-1] == len(token_ids) - 1:
        raise PromptError("it ends with an image: end it with text")
    placed: list[PlacedImage] = []
    for image, count in zip(pictures, counts, strict=True):
        at, places = tuple(places[:count]), places[count:]
        placed.append(PlacedImage(image, at, encoder.grid_of(image)))
    return EncodedPrompt(text, token_ids, tuple(placed))


def _has_chat_template(tokenizer: Any) -> bool:
    # mlx-lm's wrapper also knows templates that are not on the tokenizer.
    if hasattr(tokenizer, "has_chat_template"):
        return bool(tokenizer.has_chat_template)
    return getattr(tokenizer, "chat_template", None) is not None


def check_text(text: str) -> None:
    """Refuse a text that is blank, or not Unicode."""
    if not text.strip():
        raise PromptError("it is empty")
    _check_unicode(text)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} is half of a surrogate pair, not Unicode text"
        ) from error


def _check_option(what: str, text: str | None) -> None:
    try:
        _check_unicode(text or "")
    except PromptError as error:
        raise PromptError(f"the {what}: {error}") from error


def _encode_raw(tokenizer: Any, text: str) -> tuple[int, ...]:
    bos = tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    return _tokens(tokenizer, text, add_special_tokens=not has_bos)


def _tokens(tokenizer: Any, text: str, **options: bool) -> tuple[int, ...]:
    return tuple(_tried(lambda: tokenizer.encode(text, **options)))


def _tried(work: Callable[[], T]) -> T:
    """What a tokenizer makes.

    Raises:
        PromptError: it fails.
    """
    try:
        return work()
    except PromptError:
        raise
    except BaseException as error:  # a tokenizer's files may hold anything
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise PromptError(
            f"the tokenizer fails ({type(error).__name__}: {shorten(error)}): if it "
            "fails on every prompt, download the model again"
        ) from error


def _encode_rendered(tokenizer: Any, text: str, limit: PromptLimit) -> tuple[int, ...]:
    limit.check(text)
    # The template has written the special tokens, BOS among them.
    return _tokens(tokenizer, text, add_special_tokens=False)


def _check_template_config(config: object) -> None:
    if config is None:
        return
    keys = list(config) if isinstance(config, Mapping) else [None]
    if any(not isinstance(key, str) or key in OWN_VARIABLES for key in keys):
        raise PromptError(
            "chat_template_config holds variables of the chat template, such as "
            f'{{"enable_thinking": false}}, not {quoted(config)}'
        )


def _render(
    tokenizer: Any,
    messages: list[Mapping[str, Any]],
    variables: Mapping[str, Any],
    **options: Any,
) -> str:
    try:
        rendered = render_chat(tokenizer, messages, variables, **options)
    except Exception as error:  # a template may raise anything
        raise PromptError(
            f"the chat template refuses these messages: {shorten(error)}"
        ) from error
    _check_unicode(rendered)  # it also contains other fields of messages
    return rendered


def check_messages(
    messages: Sequence[Any],
    limit: PromptLimit = NO_CONTEXT,
    pictures: list[Image] | None = None,
) -> list[Mapping[str, Any]]:
    """Chat messages; each has one text as its content, or parts if it has images.

    Args:
        pictures: gets the images, in order; ``None``: images stay as they are, to be
            decoded when the prompt is encoded.
    """
    limit.check_count(len(messages), "messages")  # each takes a token or more
    messages = [_with_text(message, limit, pictures) for message in messages]
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(_text_of(message), str)
        ):
            raise PromptError(
                'a chat message is {"role": "user", "content": "..."}, '
                f"not {quoted(message)}"
            )
        _check_unicode(message["role"])
        # A tool may return nothing, and a model may say nothing.
        if message["role"] in ("assistant", "tool") or _has_images(message):
            _check_unicode(_text_of(message))
        else:
            check_text(_text_of(message))
    limit.check(*map(_text_of, messages))
    return list(messages)


def _with_text(message: Any, limit: PromptLimit, pictures: list[Image] | None) -> Any:
    """The message, with content in parts (OpenAI's form) joined to one text.

    One that calls tools may have no content; its text is empty then.

    Parts stay if an image is among them: ``{"type": "image"}`` then says where, if
    images are appended to ``pictures``.
    """
    parts = message.get("content") if isinstance(message, Mapping) else None
    if parts is None and isinstance(message, Mapping) and message.get("tool_calls"):
        # Templates join texts; mlx-lm's server gives them an empty one, too.
        return {**message, "content": ""}
    if not isinstance(parts, list) or not parts:
        return message
    content: list[Mapping[str, Any]] = []
    for part in parts:
        is_part = isinstance(part, Mapping)
        if is_part and part.get("type") == "text" and isinstance(part.get("text"), str):
            content.append({"type": "text", "text": part["text"]})
            continue
        if not is_part or not holds_image(part):
            raise PromptError(
                'a part of a message is {"type": "text", "text": "..."} or an image, '
                f"not {quoted(part)}"
            )
        if pictures is None:
            content.append(part)
            continue
        if isinstance(limit.images, str):
            raise PromptError(limit.images)
        if len(pictures) == MAX_IMAGES:
            raise PromptError(f"it has more than {MAX_IMAGES} images: leave some out")
        try:
            pictures.append(image_in(part))
        except PromptError as error:
            raise PromptError(f"image {len(pictures) + 1}: {error}") from error
        if sum(each.width * each.height for each in pictures) > MAX_ALL_PIXELS:
            raise PromptError(
                f"its images have more than {MAX_ALL_PIXELS} pixels: make them smaller"
            )
        content.append({"type": "image"})
    if any(part["type"] != "text" for part in content):
        return {**message, "content": content}
    return {**message, "content": "".join(part["text"] for part in content)}


def _has_images(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), list)


def _text_of(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content


def _check_token_ids(token_ids: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    for token in token_ids:
        try:
            valid = not isinstance(token, bool) and (
                0 <= operator.index(token) < vocabulary
            )
        except TypeError:
            valid = False
        if not valid:
            raise PromptError(
                f"a token id is a whole number from 0 to {vocabulary - 1}, "
                f"not {quoted(token)}"
            )
    return tuple(operator.index(token) for token in token_ids)
