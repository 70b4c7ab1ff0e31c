"""What every benchmark shares: machine, models, order of runs, spread, reports."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from specdec import backend
from specdec.errors import ConfigError, PromptError, SpecdecError
from specdec.models import LoadedModel, load, load_draft
from specdec.prompts import encode_all, read_prompts

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
T = TypeVar("T")

DTYPES = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}


class Script(click.Command):
    """A command whose errors are one line: ``error: ...``, and exit code 1 or 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            # SystemExit, not a click error: that one would bring the usage along.
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


# -- machine and versions --------------------------------------------------


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found.group(1).strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        query = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return platform.processor() or "unknown"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The machine and the versions that a result belongs to."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    described: dict[str, Any] = {
        **backend.describe(),
        "transformers": _version("transformers"),
        "cpu": _cpu_name(),
        "cores": _cores(),
        "memory_gib": round(memory / 2**30, 1),
    }
    if backend.defaults().name != "cpu":
        size = mx.device_info().get("memory_size")
        if size:
            described["device_memory_gib"] = round(int(size) / 2**30, 1)
    return described


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """The commit measured; ``SPECDEC_COMMIT`` where there is no repository."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", "specdec", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SPECDEC_COMMIT", "unknown")
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def command_line() -> str:
    """The command, with absolute paths cut to their last part."""
    words = map(short, sys.argv[1:])
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])


def short(source: str) -> str:
    """A model or file as reports name it: of an absolute path, the last part."""
    return Path(source).name if os.path.isabs(source) else source


# -- models and prompts ----------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    },
}


def random_model(
    shape: str, dtype: str = "bfloat16", *, num_layers: int | None = None, seed: int = 0
) -> nn.Module:
    """A Llama of a real size with random weights, drawn on the device.

    A weight depends on its name and the seed alone: a model of fewer layers has
    the first layers of the deeper one.

    Args:
        shape: a key of ``SHAPES``.
        num_layers: another number of layers.
    """
    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        **SHAPES[shape],
    }
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    model = llama.Model(llama.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    for name, array in parameters:
        # The arrays that the layers made are lazy: replaced, they never exist.
        # Uniform rather than normal, whose tails overflow in half precision.
        if array.ndim == 1:
            drawn = mx.ones(array.shape, DTYPES[dtype])
        else:
            bound = (3 / array.shape[-1]) ** 0.5
            key = mx.random.key(zlib.crc32(name.encode()) ^ seed)
            drawn = mx.random.uniform(
                -bound, bound, array.shape, dtype=DTYPES[dtype], key=key
            )
        mx.eval(drawn)
        model.update(tree_unflatten([(name, drawn)]))
    mx.clear_cache()
    return model.eval()


def load_model(
    source: str, dtype: str | None, target: LoadedModel | None = None
) -> LoadedModel:
    """A model by name, or ``random:SHAPE[:LAYERS]``, which has no tokenizer.

    Args:
        target: given when the model is to be its draft (``self:4bit`` and so on).
    """
    if source.startswith("random:"):
        shape, num_layers = random_shape(source)
        model = random_model(shape, dtype or "bfloat16", num_layers=num_layers)
        no_tokenizer: Any = None
        return LoadedModel(model, no_tokenizer, {}, source)
    if target is not None:
        return load_draft(source, target, dtype=dtype)
    return load(source, dtype=dtype)


def random_shape(source: str) -> tuple[str, int | None]:
    """Shape and number of layers of ``random:SHAPE[:LAYERS]``.

    Raises:
        ConfigError: there is no such shape, or no such number.
    """
    shape, colon, layers = source.removeprefix("random:").partition(":")
    if shape not in SHAPES:
        raise ConfigError(
            f"{source}: no shape {shape!r}; shapes are {', '.join(SHAPES)}"
        )
    if not colon:
        return shape, None
    if not re.fullmatch("0*[1-9][0-9]*", layers):
        raise ConfigError(
            f"{source}: {layers!r} is no number of layers: write random:{shape}:4, "
            f"or random:{shape} for all; shapes are {', '.join(SHAPES)}"
        )
    return shape, int(layers)


class TokenIds:
    """Stands in for a tokenizer where text plays no part and costs nothing."""

    has_chat_template = False
    last_segment = text = ""

    def __init__(self, eos_token_ids: Iterable[int] = ()):
        self.eos_token_ids = set(eos_token_ids)

    @property
    def detokenizer(self) -> TokenIds:
        return self

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __len__(self) -> int:
        return 2**31


def token_level(model: nn.Module, eos_token_ids: Iterable[int] = ()) -> LoadedModel:
    """A model to be driven with token ids alone."""
    tokenizer: Any = TokenIds(eos_token_ids)
    return LoadedModel(model, tokenizer, {}, "model")


def encode_prompts(
    tokenizer: Any, path: str, number: int, *, ignore_chat_template: bool = False
) -> list[list[int]]:
    """The first ``number`` prompts of a file, as token ids."""
    prompts = read_prompts(path)[:number]
    if len(prompts) < number:
        raise PromptError(
            f"{path} has {len(prompts)} prompts, {number} were asked for: "
            f"choose --num-prompts {len(prompts)} or less"
        )
    encoded = encode_all(tokenizer, prompts, ignore_chat_template=ignore_chat_template)
    return [list(e.token_ids) for e in encoded]


def random_prompts(number: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, of ``length`` down to ``length - 7`` tokens."""
    draw = np.random.default_rng(0)
    lengths = [max(1, length - i % 8) for i in range(number)]
    return [draw.integers(0, vocab_size, n).tolist() for n in lengths]


# -- order and spread ------------------------------------------------------


def interleaved(
    systems: Mapping[str, Callable[[], T]], passes: int
) -> Iterator[tuple[int, str, T]]:
    """Run every system once a pass: A B C, then B C A, then C A B, ...

    What drifts in the machine meanwhile then falls on all of them alike.
    """
    names = list(systems)
    for number in range(passes):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            yield number, name, systems[name]()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def show_spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (min to max)``; the median alone for a single value."""
    s = spread(values)
    text = f"{s['median']:.{digits}f}"
    if len(values) > 1:
        text += f" ({s['min']:.{digits}f} to {s['max']:.{digits}f})"
    return text


# -- reports ---------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; columns but the first are aligned right."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|---|" + "---:|" * (len(header) - 1),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def header_of(title: str) -> dict[str, Any]:
    """The head of a raw result: what was run, where, when."""
    return {
        "title": title,
        "command": command_line(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
    }


def write_report(out: str | None, raw: dict[str, Any], body: str) -> None:
    """Print ``body``; write OUT.json and OUT.md when ``out`` is given.

    Args:
        raw: begins with :func:`header_of`.
        body: Markdown, what the raw numbers come to.
    """
    m = raw["machine"]
    place = f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB"
    if m["backend"] != "cpu":
        place = f"{m['device']} ({m['backend']}); {place}"
    text = (
        f"# {raw['title']}\n\n"
        f"    {raw['command']}\n\n"
        f"{place}; MLX {m['mlx']}, mlx-lm {m['mlx_lm']}, Python {m['python']}; "
        f"commit {raw['commit'][:12]}{'+changes' * raw['commit'].endswith('+changes')}"
        f", {raw['date']}.\n\n{body}"
    )
    print(text)
    if out is None:
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Appended, not with_suffix(): a name may hold a dot, as in "qwen2.5".
    Path(f"{path}.md").write_text(text, "utf-8")
    Path(f"{path}.json").write_text(_compact(raw), "utf-8")


def _compact(raw: dict[str, Any]) -> str:
    """Indented JSON, with lists of plain numbers on one line."""
    text = json.dumps(raw, indent=1, ensure_ascii=False)
    return (
        re.sub(
            r"\[[\s\d.,eE+-]*\]",
            lambda found: re.sub(r"\s+", " ", found.group()),
            text,
        )
        + "\n"
    )
