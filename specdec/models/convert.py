"""Converts GGUF files to folders that mlx-lm loads."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer, save_config, save_model

from ..errors import ConfigError, ModelError, UnsupportedModelError
from ..utils.printable import shorten
from .folder import tokenizer_config
from .gguf import load_gguf
from .gguf.weights import WeightFormat

_BITS = (4, 8, 16)
_GROUP_SIZES = (32, 64, 128)
# Text on which tokenizers differ: digits, spaces, newlines, contractions, accents.
_PROBE = "In 12345 it's  DON'T\n\n\tnaïve e\u0301 日本語 🤗 x1  the ab\r\n cat."


def convert(
    gguf_file: str | Path,
    out_dir: str | Path,
    bits: int | None = None,
    *,
    group_size: int = 64,
) -> Path:
    """Write the model of a GGUF file as a folder that ``mlx_lm.load`` reads.

    The folder appears complete or not at all.

    Args:
        gguf_file: a file that :func:`specdec.models.load` accepts.
        out_dir: the folder; it may exist when it is empty and not the current one.
        bits: 4 or 8 quantizes every matrix; 16 writes 16-bit floats; ``None``
            keeps packed what MLX can keep packed, and writes the rest as 16-bit
            floats (32-bit floats if all matrices of the file are float32).
        group_size: columns that share a scale, for ``bits`` 4 and 8; 32 for a
            matrix that it does not divide.

    Returns:
        The folder, as an absolute path.

    Raises:
        ConfigError: ``bits`` or ``group_size`` has another value.
        ModelError: ``out_dir`` is taken or cannot be written, or the file
            cannot be read (see :func:`specdec.models.load`).
        UnsupportedModelError: mlx-lm would load a tokenizer other than the file's.
    """
    if bits is not None and bits not in _BITS:
        raise ConfigError(f"bits is {bits!r}: it must be 4, 8 or 16")
    if group_size not in _GROUP_SIZES:
        raise ConfigError(f"group_size is {group_size!r}: it must be 32, 64 or 128")
    out = _usable(out_dir)
    form = WeightFormat(bits=bits, group_size=group_size)
    model, tokenizer, config = load_gguf(gguf_file, form)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        save_model(work, model, donate_model=True)
        save_config(config, work / "config.json")
        tokenizer.save_pretrained(work)
        _check_tokenizer(work, tokenizer, gguf_file)
        work.chmod(0o755)  # mkdtemp's folders are private
        work.replace(out)
    except (OSError, RuntimeError) as error:  # MLX raises the latter
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    mx.clear_cache()
    return out


def _check_tokenizer(
    folder: Path, tokenizer: TokenizerWrapper, source: str | Path
) -> None:
    """Check that mlx-lm loads this tokenizer from the folder.

    For some model types, Qwen 2 among them, transformers uses its own tokenizer
    whatever the folder says. That is right for Qwen's models and wrong for others.
    """
    loaded = load_tokenizer(folder, tokenizer_config(trust_remote_code=False))
    same = loaded.get_vocab() == tokenizer.get_vocab()
    if not same or loaded.encode(_PROBE) != tokenizer.encode(_PROBE):
        raise UnsupportedModelError(
            f"{source} has a tokenizer that transformers replaces by another for "
            "models of its type, so no folder would work: use the GGUF file itself"
        )


def _usable(out_dir: str | Path) -> Path:
    """The folder as an absolute path, if it can probably be written.

    Checked before the model is loaded, because loading takes a while.
    """
    try:
        out = Path(out_dir).resolve()
        if out.is_dir():
            if any(out.iterdir()):
                raise ModelError(
                    f"{out} is not empty: remove it or name another folder"
                )
            if out.samefile("."):  # it would be replaced under the user's feet
                raise ModelError(f"{out} is the current folder: name another one")
        elif out.exists():
            raise ModelError(f"{out} is a file: name a folder")
        above = next(folder for folder in out.parents if folder.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is a file")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{above} is not writable")
    except (OSError, RuntimeError, ValueError) as error:  # loops, no path at all
        raise _unwritable(Path(out_dir), error) from error
    return out


def _unwritable(out: Path, error: Exception) -> ModelError:
    reason = getattr(error, "strerror", None) or shorten(error)
    return ModelError(f"cannot write {out} ({reason}): name another folder")
