"""``specdec estimate``: what a run would hold in memory; loads no weights."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..config import DEFAULT_PREFILL_STEP_SIZE, EngineConfig, NumDraftTokens
from ..errors import UnsupportedModelError
from ..utils.data_files import json_text
from ..utils.sizes import parse_size
from . import options
from .output import FAILURE, share_text, show, silence_third_parties


@click.command(
    cls=options.Command, short_help="Report how much memory a run needs, and what fits."
)
@options.target(
    "MLX model folder, .gguf file, config.json, or a hub id that is downloaded."
)
@options.draft()
@options.context("Tokens of a row, prompt and output together, such as 8192 or 8k.")
@options.batch("Rows that decode together.", default=1)
@options.num_draft_tokens(
    "Tokens that the draft proposes in a round; auto counts the most it chooses.", low=1
)
@options.prefill_step_size(
    "Prompt tokens per row in one forward.", default=DEFAULT_PREFILL_STEP_SIZE
)
@options.max_kv_size(
    "Full-attention layers keep this many tokens of a row. [default: all]"
)
@options.kv_bits("Keep keys and values quantized. [default: as they are]")
@options.kv_group_size()
@options.loading("As the run would load the weights. [default: as they are stored]")
@options.temp("Above 0, count what drawing tokens takes, filters included.")
@options.memory_limit(
    "Memory available, such as 8GB or 6.5GiB. [default: all that the device has]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def estimate(
    *,
    target: str | None,
    draft: str | None,
    context: int,
    batch_size: int,
    num_draft_tokens: NumDraftTokens,
    prefill_step_size: int,
    max_kv_size: int | None,
    kv_bits: int | None,
    kv_group_size: str,
    loading: dict[str, Any],
    temp: float,
    memory_limit: str | None,
    as_json: bool,
) -> None:
    """Report how much memory a run would hold at most, and what fits.

    Reads headers and configurations; loads no weights. The exit code is 1 where it
    does not fit, and 0 where it does.

    \b
      specdec estimate --target MODEL --context 8k --batch 8
      specdec estimate --target config.json --context 128k --memory-limit 24GB
    """  # noqa: D301 - click's mark for lines to keep
    spec = options.check_pair(target, draft)
    options.check_num_draft_tokens(draft, drafts=spec is not None)
    options.check_kv_options(kv_bits)
    options.check_loading(loading, drafts=spec is not None)
    limit = None if memory_limit is None else parse_size(memory_limit)
    silence_third_parties()
    from .. import backend
    from ..memory import MemoryPlan
    from ..memory.estimate import Estimate
    from ..memory.planning import plan_memory
    from ..memory.sampling_memory import FILTERED, GREEDY
    from ..model_names import target_name
    from ..models import context_length
    from ..models.model_outline import check_tokenizers, outline, outline_draft
    from ..spec_decode.factory import ngram_of

    target_outline = outline(
        target_name(target),
        dtype=loading["dtype"],
        trust_remote_code=loading["trust_remote_code"],
        adapter_path=loading.get("adapter_path"),
        revision=loading.get("revision"),
    )
    own_context = context_length(target_outline.config)
    if spec is not None and "draft_adapter_path" in loading:
        spec = spec.with_adapter(loading["draft_adapter_path"])
    draft_outline = vocabulary = None
    if spec is not None and spec.model is not None:
        draft_outline = outline_draft(
            spec.model,
            target_outline,
            dtype=loading["dtype"],
            trust_remote_code=loading["trust_remote_code"],
        )
        vocabulary = check_tokenizers(
            target_outline,
            draft_outline,
            trust_remote_code=loading["trust_remote_code"],
        )
    ngram = None if spec is None else ngram_of(spec)

    def plan_with(bits: int | None) -> MemoryPlan:
        config = EngineConfig(
            batch_size=batch_size,
            num_draft_tokens=num_draft_tokens,
            prefill_step_size=prefill_step_size,
            max_kv_size=max_kv_size,
            kv_bits=bits,
            kv_group_size=int(kv_group_size),
        )
        return plan_memory(
            target_outline,
            draft_outline,
            config,
            backend.defaults(),
            drafts=spec is not None,
            lookup_bytes=0 if ngram is None else ngram.nbytes(batch_size),
        )

    def plan_if_supported(bits: int | None) -> MemoryPlan | None:
        try:
            return plan_with(bits)
        except UnsupportedModelError:
            return None

    found = Estimate(
        plan=plan_with(kv_bits),
        kv_bits=kv_bits,
        context=context,
        batch=batch_size,
        limit=backend.memory_size() if limit is None else limit,
        plan_with_bits=plan_if_supported,
        choosing=FILTERED if temp > 0 else GREEDY,
        context_length=own_context,
    )
    show(json_text(found.as_dict(), indent=2) if as_json else found.table())
    if vocabulary is not None:
        shared = share_text(vocabulary.share)
        show(f"specdec: note: the draft has another vocabulary{shared}", err=True)
    if own_context is not None and context > own_context:
        show(
            f"specdec: note: the target's context is {own_context} tokens: a run "
            f"refuses longer prompts and ends rows there, so {context} are never held",
            err=True,
        )
    if found.fits is False:
        sys.exit(FAILURE)
