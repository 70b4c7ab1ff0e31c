"""What loading would refuse of two tokenizers, reported before weights are read."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from ..errors import SpecdecError
from .folder import has_weights
from .gguf.header import read_header
from .gguf.tokenizer import build_tokenizer
from .loaded import LoadedModel
from .loading import explain
from .model_outline import ModelOutline
from .trust import tokenizer_config
from .vocabulary import VocabularyMap, map_vocabulary


def check_tokenizers(
    target: ModelOutline, draft: ModelOutline, *, trust_remote_code: bool = False
) -> VocabularyMap | None:
    """What a draft's vocabulary shares with the target's.

    Where one is a configuration without weights there is nothing to compare. A
    vocabulary takes some seconds, so that of a target alone is not looked at.

    Returns:
        ``None`` where it is the same, or nothing is known of it.

    Raises:
        VocabularyMismatchError: see
            :func:`~specdec.models.vocabulary.map_vocabulary`.
        UnsupportedModelError: the kind of tokenizer is not supported.
        ModelError: a tokenizer cannot be loaded.
    """
    if draft.tokens == target.tokens:
        return None
    own = _loaded(target, trust_remote_code)
    other = _loaded(draft, trust_remote_code)
    if own is None or other is None:
        return None
    return map_vocabulary(own, other)


def _loaded(outline: ModelOutline, trust_remote_code: bool) -> LoadedModel | None:
    """The outline with its tokenizer; ``None`` for a configuration alone."""
    path = outline.tokens
    tokenizer: TokenizerWrapper | None = None
    try:
        if path.is_dir() and has_weights(path):
            tokenizer = load_tokenizer(path, tokenizer_config(trust_remote_code))
        elif path.suffix.lower() == ".gguf":
            tokenizer = build_tokenizer(read_header(path))
    except SpecdecError:
        raise
    except Exception as error:  # a folder's files can be wrong in any way
        raise explain(outline.name, error) from error
    if tokenizer is None:
        return None
    return LoadedModel(outline.model, tokenizer, outline.config, outline.name)
