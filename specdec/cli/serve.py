"""``specdec serve``: an HTTP server for the clients of OpenAI and Anthropic."""

from __future__ import annotations

import importlib.util
import ipaddress
from typing import Any

import click

from .. import templates
from ..config import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_PREFILL_STEP_SIZE,
    DEFAULT_PREFIX_CACHE_MEMORY,
    EngineConfig,
    NumDraftTokens,
)
from ..server.config import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_WAITING,
    DEFAULT_PORT,
    PREFIX_SHARING,
)
from ..utils.sizes import parse_size
from . import options
from .output import show, show_warnings, silence_third_parties


def _seconds(
    name: str, text: str, *, default: float, low: float = 0
) -> options.Option[Any]:
    return click.option(
        name,
        type=click.FloatRange(min=low),
        metavar="SECONDS",
        default=default,
        show_default=True,
        help=text,
    )


@click.command(
    cls=options.Command, short_help="Serve a model to OpenAI and Anthropic clients."
)
@options.target()
@options.draft()
@options.batch("Requests that decode together.", default=DEFAULT_BATCH_SIZE)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. 0.0.0.0 lets other machines in: set a key, too.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    envvar="SPECDEC_API_KEY",
    show_envvar=True,
    help="Key that clients have to send; repeat it for more, any of which is good. "
    "[default: none]",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose pages may call the server from a browser, or '*'; repeat it "
    "for more. [default: none]",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="What clients call the model; repeat it for more. '*' accepts any name. "
    "[default: the target's]",
)
@options.positive(
    "--max-waiting",
    default=DEFAULT_MAX_WAITING,
    low=0,
    text="Requests that may wait for a place; more are refused with 429.",
)
@options.positive(
    "--max-tokens",
    default=DEFAULT_MAX_TOKENS,
    text="Tokens to generate where a request does not say.",
)
@options.positive(
    "--max-output-tokens",
    text="Most tokens that a request may ask for. [default: what the context leaves]",
)
@options.positive(
    "--max-prompt-tokens", text="Longest prompt. [default: what the context leaves]"
)
@click.option(
    "--max-body",
    metavar="SIZE",
    default="16MiB",
    show_default=True,
    help="Largest body of a request.",
)
@click.option(
    "--temp",
    type=click.FloatRange(min=0),
    metavar="T",
    default=1.0,
    show_default=True,
    help="Sampling temperature where a request does not say; 0 is greedy.",
)
@_seconds(
    "--request-timeout",
    "After this an answer is cut where it is, waiting included.",
    default=600,
    low=0.001,
)
@_seconds(
    "--stop-timeout",
    "Time that running requests have to end when the server stops.",
    default=30,
)
@options.chat_template_config()
@options.num_draft_tokens(
    "Tokens that the draft proposes in a round. auto: as many as are worth it.", low=0
)
@options.prefill_step_size(
    "Prompt tokens per row in one forward: running requests wait for one at most.",
    default=DEFAULT_PREFILL_STEP_SIZE,
)
@options.max_kv_size(
    "Full-attention layers see a row's first 4 tokens and its newest N - 4. "
    "[default: all]"
)
@options.kv_bits(
    "Keep keys and values of target and draft quantized. [default: as they are]"
)
@options.kv_group_size()
@options.prefix_cache
@click.option(
    "--prefix-sharing",
    type=click.Choice(PREFIX_SHARING),
    default="all",
    show_default=True,
    help="Whose prompts begin with what is kept of one: all clients', or those of the "
    "same client (its key, else its address, and the user that it names).",
)
@options.loading()
@options.memory_limit(
    "Most memory to use, such as 8GB or 6.5GiB. [default: all that the device has]"
)
@options.quiet("No notes, only errors.")
def serve(
    *,
    target: str | None,
    draft: str | None,
    batch_size: int,
    host: str,
    port: int,
    names: tuple[str, ...],
    max_body: str,
    temp: float,
    chat_template_config: str | None,
    num_draft_tokens: NumDraftTokens,
    prefill_step_size: int,
    max_kv_size: int | None,
    kv_bits: int | None,
    kv_group_size: str,
    prefix_cache: str | None,
    prefix_cache_size: str | None,
    prefix_cache_memory: str | None,
    loading: dict[str, Any],
    memory_limit: str | None,
    quiet: bool,
    **limits: Any,
) -> None:
    """Serve a model over HTTP, with a draft and with batching.

    Clients of OpenAI's and Anthropic's protocols find /v1/chat/completions,
    /v1/completions, /v1/responses and /v1/messages; a browser finds a page to chat
    at /. A common beginning of prompts is computed once; --prefix-cache-memory 0
    keeps none. Ctrl-C lets answers end, a second one does not.

    \b
      specdec serve --target MODEL --draft MODEL --batch 8
      SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0 --port 8000
    """  # noqa: D301 - click's mark for lines to keep
    drafts = options.check_pair(target, draft) is not None
    options.check_num_draft_tokens(draft, drafts=drafts)
    options.check_kv_options(kv_bits)
    check_extra("starlette", "uvicorn", "prometheus_client")
    options.check_loading(loading, drafts=drafts)
    prefixes = options.prefix_config(
        prefix_cache=prefix_cache,
        prefix_cache_size=prefix_cache_size,
        prefix_cache_memory=prefix_cache_memory,
    )
    prefixes.setdefault("prefix_cache_memory", DEFAULT_PREFIX_CACHE_MEMORY)
    engine = EngineConfig(
        batch_size=batch_size,
        num_draft_tokens=num_draft_tokens,
        prefill_step_size=prefill_step_size,
        max_kv_size=max_kv_size,
        kv_bits=kv_bits,
        kv_group_size=int(kv_group_size),
        memory_limit=None if memory_limit is None else parse_size(memory_limit),
        **prefixes,
    )
    from ..server.config import ServerConfig

    config = ServerConfig(
        names=names,
        temperature=temp,
        max_body_bytes=parse_size(max_body),
        chat_template_config=options.template_variables(chat_template_config),
        **limits,
    )
    silence_third_parties()
    show_warnings()
    from ..server.running import bind, serve, url_of

    with bind(host, port) as listener:
        from ..backend import check_compiler
        from ..decoder import SpecDecoder

        notes = [check_compiler()]
        if not config.api_keys and not _is_loopback(host):
            notes.append("everyone who reaches this port is served: set --api-key")
        for note in notes:
            if note and not quiet:
                show(f"specdec: note: {note}", err=True)
        templates.start()
        decoder = SpecDecoder.from_pretrained(target, draft, config=engine, **loading)

        def started() -> None:
            if not quiet:
                show(f"specdec: {_described(decoder)} at {url_of(listener)}", err=True)

        def stopping(running: int) -> None:
            if running and not quiet:
                answers = "1 answer has" if running == 1 else f"{running} answers have"
                most = f"{config.stop_timeout:g} seconds"
                again = "Ctrl-C again ends at once"
                show(f"specdec: stopping: {answers} up to {most}; {again}", err=True)

        serve(decoder, config, listener, started, stopping)


def check_extra(*modules: str) -> None:
    """Refuse to go on where the extra ``server`` is not installed."""
    if all(importlib.util.find_spec(module) for module in modules):
        return
    raise click.ClickException(
        "specdec serve needs more packages: pip install '.[server]' in a checkout"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _described(decoder: Any) -> str:
    from ..model_names import short

    draft = short(decoder.draft_name) if decoder.draft_name else "no draft"
    return f"{short(decoder.target_name)} with {draft}"
