"""Checks model folders before mlx-lm opens them.

mlx-lm reads each file that has the right name, and builds all layers before it compares
them with the weights. So this module checks that the files are plain, and that the
configuration asks for no more than the weights can fill.

mlx-lm and transformers can import Python files from a model's folder. Every call that
could do so gets the user's answer, so that none of them asks on standard input.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import (
    ModelError,
    ModelNotFoundError,
    SpecdecError,
    UnsupportedModelError,
    is_panic,
)
from ..utils.data_files import DataError, read_json, read_table
from ..utils.files import MOST_BYTES, NOT_PLAIN
from ..utils.printable import first_line, quoted, shorten
from ..utils.validation import check, table
from .tokenizer_check import check_tokenizer_file

# The largest values of a configuration, by the end of a key. Known models have a
# hundredth of these at most. For each of them mlx-lm makes Python objects.
_MOST = (
    (re.compile(r"(layers?|blocks|depth|loops|inputs|embedders)$"), 1 << 12),
    (re.compile(r"(experts|heads|groups|codebooks)$"), 1 << 16),
    (re.compile(r"(dims?|rank|embd|width)$"), 1 << 20),
    (re.compile(r"size$"), 1 << 24),
    (re.compile(r"(position_embeddings|window)$"), 1 << 31),
)
# Keys of the number of layers. Each layer stores at least one tensor.
_LAYERS = re.compile(r"(n|num)(_hidden)?_layers?")
_WEIGHTS = "model*.safetensors"
_INDEX = "model.safetensors.index.json"
# mlx-lm's message for an architecture that it does not know.
_UNKNOWN_TYPE = re.compile(r"Model type .* not supported")
# Packages whose errors mean that the hub did not deliver the model.
_HUB_PACKAGES = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
# Fields of an added token. The tokenizers library prints any other field unchanged to
# standard output, and goes on.
_TOKEN_FIELDS = {
    "__type", "content", "id", "lstrip", "normalized", "rstrip", "single_word",
    "special",
}  # fmt: skip
#: The most added tokens of a file. Speech models have 65,536.
_MOST_ADDED = 1 << 17
#: The most special tokens under names or in lists: transformers compares each with all.
_MOST_NAMED = 10_000


def check_folder(path: Path) -> None:
    """Refuse a folder that mlx-lm cannot load, or only with too much time or memory.

    Raises:
        ModelError: a file in it must not be read; there is no usable ``config.json``;
            the configuration names sizes that no model has or that the weights do not
            fill; or the tokenizer fails, takes too much, or has an added token with an
            unknown field.
        RuntimeError: the weights are damaged.
    """
    if not path.is_dir():
        raise ModelError(f"{path} is a file: give a .gguf file or a model folder")
    check_files(path)
    file = path / "config.json"
    try:
        config = read_config(file)
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} has no config.json: give the folder of an MLX model"
        ) from error
    check_sizes(config, file)
    _check_added_tokens(path)
    check_tokenizer_file(path / "tokenizer.json")
    if has_weights(path):
        tensors = len(read_arrays(weight_files(path), str(path)))  # headers only
        _check_layers(config, file, tensors)


def has_weights(path: Path) -> bool:
    """Whether there are weights under the name that mlx-lm expects."""
    return any(path.glob(_WEIGHTS))


def weight_files(path: Path) -> list[Path]:
    """The files of a model's weights, sorted by name.

    If the folder has an index and all files that it names, these are the files: others
    are older, or a draft head's. Without an index, all files are but those of heads.

    Raises:
        ModelError: the index cannot be read.
    """
    every = sorted(path.glob(_WEIGHTS))
    index = path / _INDEX
    try:
        kind = table({"weight_map": dict})
        listed = {*check(kind, read_json(index))["weight_map"].values()}
    except FileNotFoundError:
        listed = set()
    except (DataError, TypeError) as error:
        raise ModelError(f"{index} cannot be read ({error}): download it again") from (
            error
        )
    if listed and listed <= {each.name for each in every}:
        return [each for each in every if each.name in listed]
    return [each for each in every if not is_mtp_file(each.name)]


def is_mtp_file(name: str) -> bool:
    """Whether files of that name hold an MTP head beside a target."""
    return re.match(r"(model-)?mtp\b", name) is not None


def read_arrays(files: Iterable[Path], source: str) -> dict[str, mx.array]:
    """The arrays of some ``.safetensors`` files, which are not computed yet.

    Raises:
        ModelError: two files hold an array of the same name.
    """
    arrays: dict[str, mx.array] = {}
    for file in files:
        stored: Any = mx.load(str(file))
        for name in arrays.keys() & stored.keys():
            raise ModelError(
                f"{source} has {shorten(name)} in two files, one of them {file.name}: "
                "remove the file that is no part of it"
            )
        arrays |= stored
    return arrays


@contextmanager
def plain_folder(path: Path) -> Iterator[Path]:
    """A folder for mlx-lm, which reads every file that is named like weights.

    It is the folder itself, or one of links that leaves out what is not the model's.
    Arrays keep their files open, so that it may vanish before they are computed.
    """
    strays = {*path.glob(_WEIGHTS)} - {*weight_files(path)}
    if not strays:
        yield path
        return
    with tempfile.TemporaryDirectory() as links:
        for entry in path.iterdir():
            if entry not in strays:
                Path(links, entry.name).symlink_to(entry.absolute())
        yield Path(links)


def check_files(path: Path) -> None:
    """Refuse a folder with files that are not plain or too large.

    Raises:
        ModelError: a file in it is not plain, or is a text file of more than
            ``MOST_BYTES`` bytes.
    """
    try:
        for entry in path.iterdir():
            if not entry.exists():  # a link that leads nowhere
                continue
            status = entry.stat()
            kind = stat.S_IFMT(status.st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise ModelError(f"{entry}: {NOT_PLAIN}: remove it from the folder")
            text = entry.suffix in (".json", ".jinja", ".txt", ".jsonl", ".tiktoken")
            if text and status.st_size > MOST_BYTES:
                raise ModelError(
                    f"{entry} has {status.st_size} bytes, more than {MOST_BYTES}: "
                    "download it again"
                )
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def read_config(file: Path) -> dict[str, Any]:
    """The configuration in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: the file cannot be read, or names no architecture.
    """
    try:
        config = read_json(file)
    except DataError as error:
        raise ModelError(f"{file} cannot be read ({error}): download it again") from (
            error
        )
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ModelError(
            f"{file} names no model_type: give the config.json of an MLX model"
        )
    return config


def check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Refuse sizes that no model has, before arrays of these sizes are made.

    Raises:
        ModelError: a size is too large; the message names it.
    """
    for key, value in _numbers(config):
        most = next((most for end, most in _MOST if end.search(key)), None)
        if most is not None and value > most:
            raise ModelError(
                f"{file} says {shorten(key)} is {shorten(value)}, and no model has "
                f"more than {most}: download it again"
            )


def _check_layers(config: Mapping[str, Any], file: Path, tensors: int) -> None:
    for key, value in _numbers(config):
        if _LAYERS.fullmatch(key) and value > tensors:
            raise ModelError(
                f"{file} says {key} is {shorten(value)}, and the weights beside it "
                f"have {tensors} tensors: download it again"
            )


def _check_added_tokens(path: Path) -> None:
    """Check the files that transformers reads."""
    settings = _table(path / "tokenizer_config.json")
    _check_named(settings, path / "tokenizer_config.json")
    tokens_by_file = {"tokenizer_config.json": [*_marked(settings)]}
    if "added_tokens_decoder" in settings:
        tokens_by_file["tokenizer_config.json"] += _members(
            settings["added_tokens_decoder"]
        )
    else:
        special = _table(path / "special_tokens_map.json")
        _check_named(special, path / "special_tokens_map.json")
        extra = special.pop("extra_special_tokens", None)
        tokens = _table(path / "tokenizer.json").get("added_tokens")
        tokens_by_file["special_tokens_map.json"] = [
            *special.values(),
            *_members(extra),
        ]
        tokens_by_file["tokenizer.json"] = _members(tokens)
    for name, tokens in tokens_by_file.items():
        _check_count(len(tokens), _MOST_ADDED, "added", path / name)
        for token in tokens:
            unknown = token.keys() - _TOKEN_FIELDS if isinstance(token, dict) else ()
            for field in unknown:
                raise ModelError(
                    f"{path / name} has an added token with the field "
                    f"{quoted(field)}, which does not exist: download it again"
                )


def _check_named(settings: Mapping[str, Any], file: Path) -> None:
    count = sum(
        len(_members(value)) if key.endswith("_tokens") else key.endswith("_token")
        for key, value in settings.items()
    )
    _check_count(count, _MOST_NAMED, "special", file)


def _check_count(count: int, most: int, kind: str, file: Path) -> None:
    if count > most:
        raise ModelError(
            f"{file} has {count} {kind} tokens, and {most} are allowed: use another "
            "model"
        )


def _members(holder: Any) -> list[Any]:
    if isinstance(holder, dict):
        return list(holder.values())
    return holder if isinstance(holder, list) else []


def _marked(holder: Any) -> Iterator[Any]:
    """The entries that are added tokens, at any depth."""
    if isinstance(holder, dict) and holder.get("__type") == "AddedToken":
        yield holder
    for each in _members(holder):
        yield from _marked(each)


def _table(file: Path) -> dict[str, Any]:
    """The table in a file; empty if it cannot be read, which loading will report."""
    try:
        return read_table(file)
    except (FileNotFoundError, DataError):
        return {}


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Every number with its key, also those in nested parts and lists."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend((str(k), v) for k, v in value.items())
        elif isinstance(value, list):
            waiting.extend((key, each) for each in value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def tokenizer_config(trust_remote_code: bool) -> dict[str, Any]:
    """Arguments that mlx-lm passes on to transformers."""
    return {"trust_remote_code": bool(trust_remote_code)}


def refused_code(source: str, error: Exception) -> UnsupportedModelError | None:
    """Our error, if ``error`` says that code was not run; else ``None``."""
    # Both libraries name this option in their messages.
    if not isinstance(error, ValueError) or "trust_remote_code" not in str(error):
        return None
    return UnsupportedModelError(
        f"{source} wants to run Python code from its folder: read that code, and if "
        "you trust it, add --trust-remote-code (trust_remote_code=True)"
    )


@contextmanager
def explained(source: str) -> Iterator[None]:
    """Within the context, whatever goes wrong is an error about ``source``.

    The files of models, heads and adapters can be wrong in more ways than can be
    checked before: mlx-lm, MLX and tokenizers each raise what they like.

    Raises:
        SpecdecError: as it was raised.
        ModelError: for any other error, see :func:`explain`.
    """
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        raise explain(source, error) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelError(
            f"{source} cannot be loaded (its tokenizer fails: {shorten(error)}): "
            "download it again"
        ) from error


def explain(source: str, error: Exception) -> ModelError:
    """The error to raise for an error of mlx-lm's loader."""
    text = first_line(error).rstrip(".: ")
    if (refused := refused_code(source, error)) is not None:
        return refused
    if isinstance(error, ValueError) and _UNKNOWN_TYPE.fullmatch(text):
        return UnsupportedModelError(
            f"{source}: {text}; mlx-lm has to know the architecture: "
            "use another model or a newer mlx-lm"
        )
    if text.startswith("Couldn't instantiate the backend tokenizer"):
        text = "no tokenizer can be made of its files: is tokenizer.json missing?"
        return ModelError(f"{source}: {text} download it again")
    package = type(error).__module__.partition(".")[0]
    of_hub = package.startswith(_HUB_PACKAGES) or isinstance(error, ConnectionError)
    # A package of the hub also checks the configuration of local folders.
    if of_hub and not os.path.exists(os.path.expanduser(source)):
        return ModelNotFoundError(_of_the_hub(source, error))
    return ModelError(
        f"{source} cannot be loaded ({type(error).__name__}: {text}): check the "
        "folder or download it again"
    )


def _of_the_hub(source: str, error: Exception) -> str:
    """Advice for an error of the hub's client, by its name."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{source} is given out under terms: accept them on its page of the hub, "
            "then log in with: hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{source} has no such revision: give a branch, a tag or a commit of it"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"no model {source}: there is no such folder, nor such a model on the hub: "
            "check the name (of a private one log in first: hf auth login)"
        )
    return (
        f"no model {source}: there is no such folder, it was not downloaded before, "
        "and the hub cannot be reached: while online, fetch it with: hf download "
        f"{source}"
    )
