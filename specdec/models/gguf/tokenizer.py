"""A Hugging Face fast tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from ...errors import ModelError, UnsupportedModelError
from ...utils.printable import shorten
from ..tokenizer import ExactTokenizerWrapper
from .header import GGUFFile

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# The most characters of a SentencePiece piece. The time to find its merges grows with
# their square.
_LONGEST_PIECE = 512

_SPACE = "\u2581"  # SentencePiece's spelling of a space

# Tokens that end a turn or a text, in addition to those that the metadata names. Some
# files have them as user-defined tokens, and no text contains them by accident.
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)
# "</s>" ends a text only as a control token: Gemma has it, user-defined, as HTML's tag.
_CONTROL_END_TOKENS = (*_END_TOKENS, "</s>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _modern_split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The split of Llama 3 and Qwen 2, which group digits in different ways."""
    pattern = (
        _CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level(pre: str, file: GGUFFile) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that ``tokenizer.ggml.pre`` names."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2", "olmo"):
        return gpt2
    if pre in ("smollm", "refact", "starcoder"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    if pre in _LLAMA3 | _CL100K:
        return _modern_split(r"\p{N}{1,3}")
    if pre in _QWEN2:
        return _modern_split(r"\p{N}")
    raise UnsupportedModelError(
        f"{file.path} uses the pre-tokenizer {pre!r:.60}, which is not supported: "
        "use a file with smollm, qwen2, llama-bpe or gpt-2, or an MLX folder"
    )


_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe"})
# The same split; without a BOS token unless the file says so.
_CL100K = frozenset({"dbrx"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})


def build_tokenizer(file: GGUFFile) -> TokenizerWrapper:
    """The file's tokenizer in mlx-lm's wrapper.

    ``eos_token_ids`` has every token that ends a turn or a text: the tokens that the
    metadata names, and the usual ones of the vocabulary. Tokens that only pad the
    vocabulary to the size of the embedding are left out.

    Raises:
        UnsupportedModelError: the kind of tokenizer is not supported.
        ModelError: the file has no tokenizer, has metadata of a wrong type, or does
            not name its pre-tokenizer (Qwen's files need not).
    """
    metadata = _TokenizerMetadata(file)
    if metadata.model == "gpt2":
        tokenizer = _build_byte_level_bpe(metadata)
    elif metadata.model == "llama":
        tokenizer = _build_sentencepiece_bpe(metadata)
    else:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of kind {metadata.model!r:.60}, which is not "
            "supported: use a file with gpt2 or llama, or an MLX folder"
        )
    _add_special_tokens(tokenizer, metadata)
    _add_bos(tokenizer, metadata)
    names = {
        f"{role}_token": metadata.tokens[token]
        for role, token in metadata.roles.items()
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.chat_template,
        **names,
    )
    return ExactTokenizerWrapper(fast, eos_token_ids=metadata.end_tokens())


class _TokenizerMetadata:
    """The tokenizer's metadata, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.model = str(file.metadata.get("tokenizer.ggml.model"))
        tokens = self._list("ggml.tokens", str)
        if not tokens:
            raise ModelError(
                f"{file.path} has no tokenizer: use a file that llama.cpp can run"
            )
        types = self._list("ggml.token_type", int) or [1] * len(tokens)
        if len(types) != len(tokens):
            raise ModelError(
                f"{file.path} has {len(tokens)} tokens and {len(types)} token types: "
                "download it again"
            )
        size = len(tokens)
        # Padding is named after its index; converters give it different types.
        while size and tokens[size - 1] == f"[PAD{size - 1}]":
            size -= 1
        self.tokens: list[str] = tokens[:size]
        self.types: list[int] = types[:size]
        self.scores: list[float] = self._list("ggml.scores", float)[:size]
        self.merges: list[str] = self._list("ggml.merges", str)
        self.pre: str = self._value("ggml.pre", str) or self._default_pre()
        self.chat_template: str | None = self._value("chat_template", str)
        spm = self.model == "llama"
        self.add_space_prefix: bool = self._value("ggml.add_space_prefix", bool, spm)
        default_bos = spm or self.pre in _LLAMA3
        self.add_bos: bool = self._value("ggml.add_bos_token", bool, default_bos)
        self.roles: dict[str, int] = {
            role: token
            for role, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (token := self._value(f"ggml.{key}_token_id", int)) is not None
            and 0 <= token < size
        }

    def _default_pre(self) -> str:
        """The pre-tokenizer of an old file that does not name one.

        Qwen's files use Qwen 2's. Byte-level llama files may be Llama 3's or others':
        a wrong guess would split texts in a way that the model was not trained on.
        """
        architecture = self.file.metadata.get("general.architecture")
        if self.model != "gpt2":
            return "default"  # it is not used
        if architecture in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
            return "qwen2"
        raise ModelError(
            f"{self.file.path} does not name its pre-tokenizer, without which texts "
            "split wrongly: convert it again with a current llama.cpp"
        )

    def _value(self, key: str, kind: type, default: Any = None) -> Any:
        """The value under ``tokenizer.<key>``, of that type, or ``default``."""
        value = self.file.metadata.get(f"tokenizer.{key}")
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._confused(key)
        return value

    def _list(self, key: str, kind: type) -> list[Any]:
        """The list under ``tokenizer.<key>``, of that type; empty if there is none."""
        values = self._value(key, list, [])
        if not all(isinstance(value, kind) for value in values):
            raise self._confused(key)
        return list(values)

    def _confused(self, key: str) -> ModelError:
        return ModelError(
            f"{self.file.path} has metadata of the wrong type under tokenizer.{key}: "
            "convert it again with a current llama.cpp"
        )

    def end_tokens(self) -> set[int]:
        """Ids of the tokens that end a turn or a text."""
        keys = ("eos", "eot", "eom")
        named = (self._value(f"ggml.{key}_token_id", int) for key in keys)
        ends = {token for token in named if token is not None}
        names = {_CONTROL: _CONTROL_END_TOKENS, _USER_DEFINED: _END_TOKENS}
        ends.update(
            index
            for index, (token, kind) in enumerate(
                zip(self.tokens, self.types, strict=True)
            )
            if token in names.get(kind, ())
        )
        return ends


def _build_byte_level_bpe(metadata: _TokenizerMetadata) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.merges]
    vocabulary = {token: index for index, token in enumerate(metadata.tokens)}
    tokenizer = Tokenizer(
        _bpe(
            metadata,
            vocab=vocabulary,
            merges=merges,
            ignore_merges=metadata.pre in _LLAMA3,
        )
    )
    tokenizer.pre_tokenizer = _byte_level(metadata.pre, metadata.file)
    if metadata.pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece_bpe(metadata: _TokenizerMetadata) -> Tokenizer:
    if len(metadata.scores) != len(metadata.tokens):
        raise ModelError(
            f"{metadata.file.path} has a SentencePiece tokenizer without scores: "
            "convert it again with a current llama.cpp"
        )
    longest = max(map(len, metadata.tokens))
    if longest > _LONGEST_PIECE:
        raise ModelError(
            f"{metadata.file.path} has a SentencePiece token of {longest} characters, "
            f"and none has more than {_LONGEST_PIECE}: download it again"
        )
    # Converters write user-defined runs of spaces as spaces. As pieces, they need
    # SentencePiece's spelling, like all others.
    metadata.tokens = [token.replace(" ", _SPACE) for token in metadata.tokens]
    vocabulary = {token: index for index, token in enumerate(metadata.tokens)}
    unknown = metadata.roles.get("unk")
    tokenizer = Tokenizer(
        _bpe(
            metadata,
            vocab=vocabulary,
            merges=_merges_by_score(metadata, vocabulary),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else metadata.tokens[unknown],
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), spaces]
        )
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _bpe(metadata: _TokenizerMetadata, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(
            f"{metadata.file.path} has a tokenizer that does not fit together "
            f"({shorten(error)}): download it again"
        ) from error


def _merges_by_score(
    metadata: _TokenizerMetadata, vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """All ways to split a piece into two pieces, best first.

    SentencePiece merges the neighbours whose join has the highest score.
    """
    ranked = sorted(
        (i for i, kind in enumerate(metadata.types) if kind == 1),
        key=lambda i: -metadata.scores[i],
    )
    tokens = metadata.tokens
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in ranked)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _add_special_tokens(tokenizer: Tokenizer, metadata: _TokenizerMetadata) -> None:
    control, user_defined = [], []
    for token, kind in zip(metadata.tokens, metadata.types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            # A run of spaces is matched in the text after spaces were replaced. A
            # normalizer that adds a space would lengthen the token too.
            spaced = _SPACE in token and not metadata.add_space_prefix
            user_defined.append(AddedToken(token, special=False, normalized=spaced))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _add_bos(tokenizer: Tokenizer, metadata: _TokenizerMetadata) -> None:
    if not metadata.add_bos or "bos" not in metadata.roles:
        return
    index = metadata.roles["bos"]
    token = metadata.tokens[index]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, index)],
    )
