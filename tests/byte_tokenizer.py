"""A small byte-level tokenizer that llguidance takes, for models without files."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.models.tokenizer import ExactTokenizerWrapper

MERGES = ('{"', '":', '",', "tr", "true", "al", "se", '"}', "10", "name", '{"name')


def byte_tokenizer() -> TokenizerWrapper:
    """256 bytes, some longer tokens (the spellings of JSON overlap), and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for text in MERGES:
        whole = text[0]
        for letter in text[1:]:
            if whole + letter not in vocabulary:
                merges.append((whole, letter))
                vocabulary[whole + letter] = len(vocabulary)
            whole += letter
    return _wrapped(vocabulary, merges)


def character_tokenizer(end: int) -> TokenizerWrapper:
    """ASCII, 97 tokens of which ``end`` is the end of a text."""
    letters = ["\u0120", "\u010a", *map(chr, range(ord("!"), ord("~") + 1))]
    letters.insert(end, "<end>")
    return _wrapped({letter: i for i, letter in enumerate(letters)}, [])


def _wrapped(
    vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> TokenizerWrapper:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    return ExactTokenizerWrapper(fast, eos_token_ids={fast.eos_token_id})
