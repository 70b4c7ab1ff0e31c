"""Small MLX model folders, as mlx-lm's own tools write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import save_config, save_model

from specdec.models.gguf.header import read_header
from specdec.models.gguf.tokenizer import build_tokenizer

from .gguf_files import (
    Vocabulary,
    arguments,
    byte_level,
    random_model,
    write_gguf,
)


def tokenizer_of(folder: Path, vocabulary: Vocabulary | None = None) -> Any:
    """A tokenizer of some vocabulary, by way of a file that is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_gguf(folder / "t.gguf", "llama", {}, {}, vocabulary or byte_level())
    return build_tokenizer(read_header(path))


def write_folder(
    path: Path,
    arch: str = "llama",
    *,
    bits: int | None = None,
    group_size: int = 32,
    vocabulary: Vocabulary | None = None,
    **changes: Any,
) -> nn.Module:
    """Write a random model as a folder, quantized when ``bits`` is given."""
    model = random_model(arch, **changes)
    config = arguments(arch, **changes) | {"eos_token_id": [276]}
    if bits:
        nn.quantize(model, group_size=group_size, bits=bits)
        config["quantization"] = {"group_size": group_size, "bits": bits}
    save_model(path, model)
    save_config(config, path / "config.json")
    tokenizer_of(path.with_name(f"{path.name}-tokenizer"), vocabulary).save_pretrained(
        path
    )
    return model
