"""The target writes: many rows at once, through the engine's runner and caches.

There is no draft yet, so a step is one forward. Rows stay in lockstep, tokens on the
device, and the host looks at them every few steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np

from ...models.runner import ModelRunner
from .cancellation import Check, go_on

# Steps between two looks of the host.
_STRIDE = 32


def write(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    ends: Collection[int],
    temperature: float = 0.0,
    key: mx.array | None = None,
    check: Check = go_on,
) -> list[list[int]]:
    """Continue prompts.

    Args:
        runner: runs the target.
        prompts: token ids, none of them empty.
        max_tokens: most tokens to write after each.
        ends: tokens that end a row.
        temperature: 0 takes the likeliest token.
        key: of the draws, above 0.
        check: called between chunks of prompts, and as often as the host looks.

    Returns:
        What was written after each prompt, the token that ended it included.
    """
    if not prompts:
        return []
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    rows = runner.rows(
        [p[:-1] for p in prompts], max_round=1, max_length=longest + max_tokens
    )
    for _ in rows.prefill():
        check()
    token = mx.array([[p[-1]] for p in prompts], mx.int32)
    written: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))  # the prompt of each row
    done = 0
    while done < max_tokens:
        check()
        block = []
        for _ in range(min(_STRIDE, max_tokens - done)):
            done += 1
            logits = rows.forward(token)[:, -1]
            if temperature > 0:
                assert key is not None
                key, now = mx.random.split(key)
                noise = mx.random.gumbel(logits.shape, key=now)
                logits = logits.astype(mx.float32) + temperature * noise
            token = mx.argmax(logits, axis=-1)[:, None].astype(mx.int32)
            mx.async_eval(token)
            block.append(token)
            rows.note_lengths(longest + done, shortest + done)
        found = np.array(mx.concatenate(block, axis=1))
        running = []
        for row, index in enumerate(alive):
            if written[index] and written[index][-1] in ends:
                continue
            new = found[row].tolist()
            stop = next((i for i, t in enumerate(new) if t in ends), None)
            written[index] += new if stop is None else new[: stop + 1]
            if stop is None:
                running.append(row)
        if not running:
            break
        # A new number of rows is a new shape: only where it saves half of the work.
        if 2 * len(running) <= len(alive):
            rows.filter(running)
            token = token[mx.array(running)]
            alive = [alive[row] for row in running]
    return written
