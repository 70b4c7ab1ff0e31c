"""A model's tokenizer: exact streamed text, and setting another chat template."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..errors import ConfigError, is_panic
from .tokenizer_check import LimitedEncoder


class ExactStreamingDetokenizer(StreamingDetokenizer):
    """Streams the text of tokens, for any tokenizer, in linear time.

    New tokens are decoded after those of the last piece. So what a decoder does at the
    start of a text (dropping a space) happens only there; mlx-lm's own classes drop a
    leading space that ``decode`` keeps. Text is held back while it ends inside a
    character. Nothing is decoded until text is asked for.

    The whole text equals ``tokenizer.decode``, with one exception. If a run of byte
    tokens is cut inside a character, a tokenizer with byte fallback (Llama 2's,
    Gemma's) decodes all of its bytes, also those of whole characters before the cut, to
    one replacement character each. Whole characters were shown already, and stay.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self.offset = 0
        self.tokens: list[int] = []
        self._text = ""
        # tokens[:_start] are done. tokens[_start:_read] are the context of the rest.
        # _context is the part of the text of tokens[_start:] that is in _text.
        self._start = 0
        self._read = 0
        self._context = ""

    def add_token(self, token: int) -> None:
        """Append one token id."""
        self.tokens.append(token)

    def finalize(self) -> None:
        """Emit text that was held back, even if it ends inside a character."""
        self._advance(force=True)

    @property
    def text(self) -> str:  # type: ignore[override]
        """The text so far, up to the last complete character."""
        self._advance(force=False)
        return self._text

    def _advance(self, *, force: bool) -> None:
        if self._read == len(self.tokens):
            return
        text = self._decode(self.tokens[self._start :])
        if not force and text.endswith("\ufffd"):
            # What comes before the unfinished character is settled.
            text = text.rstrip("\ufffd")
            self._text += text[len(self._context) :]
            self._context = max(self._context, text, key=len)
            return
        self._text += text[len(self._context) :]
        self._start, self._read = self._read, len(self.tokens)
        self._context = self._decode(self.tokens[self._start :])

    def _decode(self, tokens: list[int]) -> str:
        try:
            return str(self._tokenizer.decode(tokens))
        except BaseException as error:
            if not is_panic(error):
                raise
            return "\ufffd" * len(tokens)  # as of bytes that are no character


class ExactTokenizerWrapper(TokenizerWrapper):
    """mlx-lm's wrapper around a tokenizer, with the exact detokenizer.

    Texts that might take a tokenizer's expressions long are encoded within limits.
    """

    _limited: LimitedEncoder | None = None

    @classmethod
    def like(cls, wrapper: TokenizerWrapper) -> ExactTokenizerWrapper:
        """The same tokenizer, with everything that mlx-lm found out about it."""
        exact = cls.__new__(cls)
        vars(exact).update(vars(wrapper))
        exact._limited = LimitedEncoder.of(wrapper)
        return exact

    def encode(self, text: Any, **options: Any) -> Any:
        """Token ids of a text, as transformers' tokenizer has it.

        Raises:
            PromptError: it takes too long.
        """
        if self._limited is None or not isinstance(text, str):
            return self._tokenizer.encode(text, **options)
        return self._limited.encode(text, **options)

    @property
    def detokenizer(self) -> ExactStreamingDetokenizer:
        """A new streaming detokenizer."""
        return ExactStreamingDetokenizer(self)


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Let ``tokenizer`` render ``template`` instead of its own.

    Raises:
        ConfigError: it is empty, or the tokenizer's own template is code of mlx-lm.
    """
    if not isinstance(template, str) or not template.strip():
        raise ConfigError("chat_template is empty: give a template in Jinja")
    if getattr(tokenizer, "init_kwargs", {}).get("chat_template_type"):
        raise ConfigError(
            "chat_template does not go with this tokenizer, whose template is code of "
            "mlx-lm's: leave it out"
        )
    tokenizer.chat_template = template
    tokenizer.has_chat_template = True
