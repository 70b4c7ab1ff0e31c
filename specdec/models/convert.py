"""GGUF files to folders that mlx-lm loads."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import save_config, save_model

from ..errors import ConfigError, ModelError
from .gguf import load_gguf
from .gguf_weights import WeightFormat

_BITS = (4, 8, 16)
_GROUP_SIZES = (32, 64, 128)


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
        out_dir: the folder; it may exist when it is empty.
        bits: 4 or 8 quantizes every matrix; 16 writes 16-bit floats; ``None``
            keeps what MLX can keep packed, the rest as 16-bit floats.
        group_size: columns that share a scale, for ``bits`` 4 and 8.

    Returns:
        The folder.

    Raises:
        ConfigError: ``bits`` or ``group_size`` has another value.
        ModelError: ``out_dir`` is taken or cannot be written, or the file
            cannot be read (see :func:`specdec.models.load`).
    """
    if bits is not None and bits not in _BITS:
        raise ConfigError(f"bits is {bits!r}: it must be 4, 8 or 16")
    if group_size not in _GROUP_SIZES:
        raise ConfigError(f"group_size is {group_size!r}: it must be 32, 64 or 128")
    out = Path(out_dir)
    _refuse_taken(out)
    form = WeightFormat(bits=bits if bits in (4, 8) else None, group_size=group_size)
    if bits == 16:
        form = WeightFormat(floats=True)
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
        work.chmod(0o755)  # mkdtemp's folders are private
        work.replace(out)
    except (OSError, RuntimeError) as error:  # MLX raises the latter
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    mx.clear_cache()
    return out


def _refuse_taken(out: Path) -> None:
    if out.is_dir():
        if any(out.iterdir()):
            raise ModelError(f"{out} is not empty: remove it or name another folder")
    elif out.exists():
        raise ModelError(f"{out} is a file: name a folder")


def _unwritable(out: Path, error: Exception) -> ModelError:
    reason = (getattr(error, "strerror", None) or " ".join(str(error).split()))[:200]
    return ModelError(f"cannot write {out} ({reason}): name another folder")
