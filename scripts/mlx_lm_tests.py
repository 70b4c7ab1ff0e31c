#!/usr/bin/env python3
"""Run mlx-lm's own tests of batch caches and of BatchGenerator over these caches.

Usage: scripts/mlx_lm_tests.py [SDIST.tar.gz]

mlx-lm's source release contains its tests. Without an argument, pip downloads the
release of the installed version; it is deleted at the end. Tests of batch caches run
with this project's classes in place of mlx-lm's, and BatchGenerator gets this project's
caches. A test that loads a model from the hub gets a small random model with the
tokenizer of the default model.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import unittest
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from specdec.cache import BatchKVCache, BatchRotatingKVCache
from specdec.model_names import DEFAULT_TARGET
from specdec.models import load

CACHE_TESTS = (
    "test_extend_with_empty_and_nonempty_batch_caches",
    "test_extend_with_empty_batch_cache_preserves_dtype",
)
GENERATOR_TESTS = (
    "test_batch_matches_single",
    "test_many_batches",
    "test_batch_unique_max_toks",
    "test_batch_sliding_window",
    "test_batch_generate_with_logits_processors",
    "test_batch_generate_processor_tokens_match_prompt_on_first_step",
    "test_batch_processor_survive_a_request_without_it",
    "test_batch_generate_with_samplers",
    "test_batch_generate_with_stop_sequences",
    "test_batch_continued_generation",
    "test_remove_prompt_batch_updates_currently_processing",
    "test_batch_mixes_sequences_with_and_without_processors",
)
# Some tests are not run: tests of left padding, which these caches do not have (masks,
# filter's left shift, files of batch caches), of the class that max_kv_size makes, of
# recurrent layers, and tests that use no cache (statistics, logprobs).


KINDS: dict[type[Any], Any] = {
    KVCache: BatchKVCache,
    RotatingKVCache: BatchRotatingKVCache,
}
handed_over = 0


class Generator(BatchGenerator):
    """BatchGenerator that uses this project's caches, also for given earlier caches."""

    def insert_segments(
        self, segments: Any, max_tokens: Any = None, caches: Any = None, *more: Any
    ) -> Any:
        global handed_over
        given = caches or [None] * len(segments)
        ours = []
        for single in given:
            made = single or make_prompt_cache(self.model, self.max_kv_size)
            ours.append([KINDS[type(c)].merge([c]) for c in made])
            handed_over += len(made)
        return super().insert_segments(segments, max_tokens, ours, *more)


def load_tests(folder: Path, name: str) -> Any:
    """Load a test module of the source release."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model(path: str) -> tuple[Any, Any]:
    """A stand-in for ``mlx_lm.load``: a random model and a real tokenizer."""
    tokenizer = load(DEFAULT_TARGET).tokenizer
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=len(tokenizer),
        )
    )
    mx.eval(model.parameters())
    return model, tokenizer


def source_release(folder: Path) -> Path:
    """Download the source release of the installed version."""
    version = metadata.version("mlx-lm")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "-d", str(folder), f"mlx-lm=={version}"]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def suite_of(module: Any, case: str, names: tuple[str, ...]) -> unittest.TestSuite:
    """The named tests; raises an error if a test does not exist."""
    return unittest.TestSuite(getattr(module, case)(name) for name in names)


def main() -> int:
    """Run the tests; return exit status 0 if all pass."""
    with tempfile.TemporaryDirectory() as tmp:
        given = sys.argv[1:]
        archive = Path(given[0]) if given else source_release(Path(tmp))
        with tarfile.open(archive) as tar:
            tar.extractall(tmp, filter="data")
        (tests,) = Path(tmp).glob("*/tests")
        caches = load_tests(tests, "test_prompt_cache")
        caches.BatchKVCache = BatchKVCache
        caches.BatchRotatingKVCache = BatchRotatingKVCache
        caches.load = small_model
        generation = load_tests(tests, "test_generate")
        generation.BatchGenerator = Generator
        generation.load = small_model
        suite = unittest.TestSuite(
            [
                suite_of(caches, "TestPromptCache", CACHE_TESTS),
                suite_of(generation, "TestGenerate", GENERATOR_TESTS),
            ]
        )
        result = unittest.TextTestRunner(verbosity=2).run(suite)
    print(f"{handed_over} layer caches of this project were handed to BatchGenerator")
    return 0 if result.wasSuccessful() and handed_over else 1


if __name__ == "__main__":
    sys.exit(main())
