"""Loads GGUF files as mlx-lm models with tokenizer and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...errors import ModelError
from ...utils.printable import shorten
from .config import build_config
from .header import read_header
from .tokenizer import build_tokenizer
from .weights import WeightFormat, build_model


def load_gguf(
    path: str | Path, form: WeightFormat | None = None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Read a GGUF file of a known architecture.

    Args:
        path: the file.
        form: the format of the weights; by default, what MLX can keep packed stays
            packed, and everything else becomes floats.

    Raises:
        ModelNotFoundError: there is no such file (ModelNameError), or it cannot be
            opened.
        UnsupportedModelError: something in the file is not supported; the message
            names it.
        ModelError: the file is cut short, corrupt or incomplete.
    """
    file = read_header(path)
    try:
        # The configuration first: it names an unsupported model, whose other parts may
        # be odd.
        config = build_config(file)
        tokenizer = build_tokenizer(file)
        model, config = build_model(file, config, form or WeightFormat())
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path} has metadata that no model fits ({type(error).__name__}: "
            f"{shorten(error)}): download it again"
        ) from error
    config["eos_token_id"] = sorted(tokenizer.eos_token_ids)
    return model, tokenizer, config
