"""Log-likelihoods of multiple-choice items: specdec against ``mlx_lm.evaluate``.

Both score the same pairs of a context and a continuation in one process, in turns.

    python -m benchmarks.loglikelihood MODEL_FOLDER --out RESULT.json

It needs ``lm_eval``, which ``mlx_lm.evaluate`` imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import mlx.core as mx
from mlx_lm.evaluate import MLXLM

from specdec import EngineConfig, SamplingParams, SpecDecoder

CHOICES, CONTEXT_WORDS, CONTINUATION_WORDS = 4, 8, 2
TEXT = Path(__file__).parents[1] / "docs" / "caches.md"


def items(count: int) -> list[tuple[str, str]]:
    """``count`` pairs of a context and a continuation, four for each context."""
    words = re.findall(r"[A-Za-z]+[,.]?", TEXT.read_text("utf-8"))
    pairs = []
    for i in range(count):
        at = i // CHOICES * CONTEXT_WORDS
        end = at + CONTEXT_WORDS * (1 + i % CHOICES * 2)
        context = words[at : at + CONTEXT_WORDS]
        continuation = words[end : end + CONTINUATION_WORDS]
        pairs.append((" ".join(context), " " + " ".join(continuation)))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    pairs = items(args.items)
    theirs = MLXLM(args.model, use_chat_template=False, batch_size=args.batch)
    theirs._model.set_dtype(mx.float32)
    config = EngineConfig(batch_size=args.batch)
    decoder = SpecDecoder(theirs._model, theirs.tokenizer, config=config)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def specdec() -> list[float]:
        encode = theirs.tokenizer.encode
        prompts = [encode(a + b, add_special_tokens=False) for a, b in pairs]
        starts = [len(encode(a, add_special_tokens=False)) for a, _ in pairs]
        return [
            sum(e.logprob for e in (result.prompt_logprobs or [])[start:] if e)
            for result, start in zip(
                decoder.generate(prompts, params), starts, strict=True
            )
        ]

    def mlx_lm() -> list[float]:
        asked = [SimpleNamespace(args=pair) for pair in pairs]
        return [float(score) for score, _ in theirs.loglikelihood(asked)]

    seconds: dict[str, list[float]] = {"specdec": [], "mlx_lm.evaluate": []}
    difference, load = 0.0, []
    for _ in range(args.rounds):
        scores = []
        load.append(round(os.getloadavg()[0], 1))
        for name, score in zip(seconds, (specdec, mlx_lm), strict=True):
            begin = time.perf_counter()
            scores.append(score())
            seconds[name].append(round(time.perf_counter() - begin, 2))
        far = max(abs(a - b) for a, b in zip(*scores, strict=True))
        difference = max(difference, far)
    names = ("mlx", "mlx-lm", "lm_eval")
    result = {
        "model": Path(args.model).name,
        "items": len(pairs),
        "batch": args.batch,
        "tokens": sum(len(theirs.tokenizer.encode(a + b)) for a, b in pairs),
        "seconds": seconds,
        "median": {name: median(each) for name, each in seconds.items()},
        "largest_difference": difference,
        "load_average": load,
        "cores": os.cpu_count(),
        "machine": f"{platform.machine()} {mx.default_device()}",
        "versions": {name: version(name) for name in names},
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result["median"]))


if __name__ == "__main__":
    main()
