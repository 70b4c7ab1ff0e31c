"""What was meant by an option that does not exist."""

from __future__ import annotations

import click

from ..model_names import nearest

# What is spelt otherwise elsewhere, and what it is called here: the first that the
# command has.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    # other commands of specdec, and what one tries first
    "--json": ("--output",),
    "--jsonl": ("--output",),
    "--out": ("--output", "--json"),
    "--output": ("--out", "--json"),
    "-o": ("--output", "--out", "--json"),
    "--prompt-file": ("--prompts",),
    # mlx-lm
    "--decode-concurrency": ("--batch",),
    "--extra-eos-token": ("--stop",),
    "--prompt-cache-file": ("--prefix-cache",),
    "--prompt-concurrency": ("--batch",),
    # transformers
    "--assistant-model": ("--draft",),
    "--do-sample": ("--temp",),
    "--max-new-tokens": ("--max-tokens",),
    "--num-assistant-tokens": ("--num-draft-tokens",),
    # vLLM
    "--enable-prefix-caching": ("--prefix-cache",),
    "--gpu-memory-utilization": ("--memory-limit",),
    "--input-file": ("--prompts",),
    "--kv-cache-dtype": ("--kv-bits",),
    "--max-model-len": ("--context",),
    "--max-num-seqs": ("--batch",),
    "--num-speculative-tokens": ("--num-draft-tokens",),
    "--speculative-model": ("--draft",),
    "--temperature": ("--temp",),
    # llama.cpp
    "--cache-type-k": ("--kv-bits",),
    "--cache-type-v": ("--kv-bits",),
    "--ctx-size": ("--context",),
    "--draft-max": ("--num-draft-tokens",),
    "--draft-n": ("--num-draft-tokens",),
    "--file": ("--prompts",),
    "--model-draft": ("--draft",),
    "--n-predict": ("--max-tokens",),
    "--parallel": ("--batch",),
    "--predict": ("--max-tokens",),
    "--repeat-penalty": ("--repetition-penalty",),
    "--reverse-prompt": ("--stop",),
}


def describe_unknown(error: click.NoSuchOption) -> str:
    """The error's message, with the option that is likely meant.

    click's own guess counts the dashes, which all have: of ``--json`` it makes
    ``--stop``.
    """
    message = f"No such option {error.option_name!r}."
    found = None if error.ctx is None else _meant(error.option_name, error.ctx)
    return message if found is None else f"{message} Did you mean {found!r}?"


def _meant(name: str, context: click.Context) -> str | None:
    name = name.lower().replace("_", "-")
    params = context.command.get_params(context)
    long = [opt for each in params for opt in each.opts if opt.startswith("--")]
    for known in (name, *ELSEWHERE.get(name, ())):
        if known in long:
            return known
    if name in ELSEWHERE:
        return None  # what is meant is known, and this command does not have it
    begun = [opt for opt in long if opt.startswith(name)]
    if len(begun) == 1 and name.startswith("--"):
        return begun[0]
    by_word = {opt.removeprefix("--"): opt for opt in long}
    found = nearest(name.lstrip("-"), by_word)
    return None if found is None else by_word[found]
