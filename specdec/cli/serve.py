"""``specdec serve``: an HTTP server for the clients of OpenAI and Anthropic."""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..config import DEFAULT_BATCH_SIZE, DEFAULT_PREFIX_CACHE_MEMORY, EngineConfig
from ..errors import ConfigError, RankError, ServerError, reason_of
from ..parallel import launched_rank
from ..prompts import templates
from ..server.config import ServerConfig
from ..utils.printable import counted
from . import options, ranks
from .models_file import read_models
from .output import check_extra, note, share_text, show, show_error, show_warnings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..server.replicas import ReplicaCommand


#: Seconds that answers have to end once a rank of the target has ended.
_ANSWERING = 1.0


_field = partial(options.field, ServerConfig)


@click.command(
    cls=options.Command, short_help="Serve a model to OpenAI and Anthropic clients."
)
@options.models()
@options.engine(
    options.batch(default=DEFAULT_BATCH_SIZE, help="Requests that decode together."),
    options.num_draft_tokens(
        "Tokens that the draft proposes in a round. auto chooses the number.", low=0
    ),
    options.draft_corpus(),
    options.prefill_step_size(
        help="Prompt tokens per row in one forward. Running requests wait for one "
        "forward at most."
    ),
    options.max_kv_size(),
    options.kv_bits(
        help="Store keys and values of target and draft quantized. [default: not "
        "quantized]"
    ),
    options.kv_group_size(),
    *options.prefix_cache,
    options.load_vision(),
    options.memory_limit(),
    prefix_cache_memory=DEFAULT_PREFIX_CACHE_MEMORY,
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. 0.0.0.0 lets other machines in; set a key as well.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@_field(
    "api_keys",
    "--api-key",
    "api_keys",
    metavar="KEY",
    envvar="SPECDEC_API_KEY",
    show_envvar=True,
)
@_field("cors", metavar="ORIGIN")
@_field("names", "--name", "names", metavar="NAME")
@_field("max_waiting")
@_field("max_tokens")
@_field("max_output_tokens")
@_field("max_prompt_tokens")
@options.size(
    "--max-body",
    default="16MiB",
    show_default=True,
    help="Largest body of an HTTP request.",
)
@_field("temperature", "--temp", "temp")
@_field("request_timeout", metavar="SECONDS")
@_field("stop_timeout", metavar="SECONDS")
@options.positive(
    "--replicas",
    help="Serve the model with N processes behind this port, one for each device. A "
    "process that ends is started again. [default: this process serves]",
)
@click.option(
    "--models",
    "models_file",
    type=click.Path(),
    metavar="FILE",
    help="Serve the models of this TOML file instead of --target. Each is loaded when "
    "it is first asked for, within --memory-limit.",
)
@options.chat_template_config()
@_field("prefix_sharing")
@_field("strict", is_flag=True, show_default=False)
@_field("log_requests", is_flag=True, show_default=False)
@ranks.tensor_parallel()
@options.quiet(help="No notes, only errors.")
def serve(
    *,
    models: options.Models,
    config: EngineConfig,
    host: str,
    port: int,
    max_body: int,
    replicas: int | None,
    models_file: str | None,
    temp: float,
    chat_template_config: dict[str, Any] | None,
    tensor_parallel: int | None,
    quiet: bool,
    **limits: Any,
) -> None:
    """Serve a model over HTTP, with a draft and with batching.

    For clients of OpenAI's and Anthropic's protocols there are /v1/chat/completions,
    /v1/completions, /v1/responses and /v1/messages; for a browser, / is a page to
    chat. What prompts have in common is computed once, unless --prefix-cache-memory
    is 0. Ctrl-C waits until answers end; a second Ctrl-C does not.

    \b
      specdec serve --target MODEL --draft MODEL --batch 8
      SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0 --port 8000
      specdec serve --target MODEL --replicas 8
    """  # noqa: D301 - click's mark for lines to keep
    launched = launched_rank() is not None
    if replicas is not None and (launched or tensor_parallel is not None):
        other = "mlx.launch" if launched else "--tensor-parallel"
        raise click.UsageError(
            f"--replicas and {other} are two ways to use several devices: take one"
        )
    modules = ("starlette", "uvicorn", "prometheus_client", "httpx")
    check_extra("specdec serve", "server", *modules)
    server = ServerConfig(
        temperature=temp,
        max_body_bytes=max_body,
        chat_template_config=chat_template_config or {},
        **limits,
    )
    loading = models.arguments(config)
    offers = None
    if models_file is not None:
        if replicas is not None or tensor_parallel is not None or launched:
            raise click.UsageError(
                "--models serves each model with one process: leave --replicas and "
                "--tensor-parallel out"
            )
        if models.target is not None or models.draft is not None or server.names:
            raise click.UsageError(
                "--models and --target, --draft or --name: name models in the file"
            )
        offers = read_models(models_file, loading)
    show_warnings(notes=not quiet)
    from ..server.running import bind

    with bind(host, port) as listener:
        if not (server.api_keys or _is_loopback(host) or quiet):
            note("everyone who reaches this port is served: set --api-key")
        if offers is not None:
            _serve_models(offers, config.memory_limit, server, listener, quiet=quiet)
        elif replicas is None:
            _serve_here(loading, server, listener, tensor_parallel, quiet=quiet)
        else:
            _serve_by(replicas, loading, server, listener, quiet=quiet)


def _serve_here(
    loading: dict[str, Any],
    config: ServerConfig,
    listener: socket.socket,
    tensor_parallel: int | None,
    *,
    quiet: bool,
) -> None:
    """Load the model, and serve it."""
    from ..server.app import make_app
    from ..server.running import run, url_of

    templates.start()
    decoder, leader = ranks.load(tensor_parallel, quiet=quiet, **loading)

    def started() -> None:
        if not quiet:
            show(f"specdec: {described(decoder)} at {url_of(listener)}", err=True)

    stopping = partial(_show_stopping, config, quiet=quiet)
    app = make_app(decoder, config)
    ranks.report_loss(leader, partial(_answer, app))
    failure = run(app, config.stop_timeout, listener, started, stopping)
    if failure is not None:
        raise engine_failed(failure) from failure


def _answer(app: Starlette, *, lost: RankError) -> None:
    """Answer open requests with the error, as the engine waits for a lost rank."""
    if (service := getattr(app.state, "service", None)) is not None:
        service.engine.fail(lost)
        time.sleep(_ANSWERING)
    show_error(str(lost))


def _serve_by(
    count: int,
    loading: dict[str, Any],
    config: ServerConfig,
    listener: socket.socket,
    *,
    quiet: bool,
) -> None:
    """Serve with replicas."""
    from ..server.replicas import FirstReplicaError, Replicas
    from ..server.router import make_router
    from ..server.running import run, url_of
    from .replica import command, environments

    places = environments(count)
    if len(set(map(str, places))) < count and not quiet:
        note("replicas share a device: a larger --batch uses it better")
    start = partial(command, loading, config, places, quiet=quiet)
    replicas = Replicas(count, start, config.request_timeout)
    if not quiet:
        how = ": the first loads the model, then the others do" if count > 1 else ""
        show(f"specdec: starting {counted(count, 'replica')}{how}", err=True)

    def started() -> None:
        if not quiet:
            what = f"{replicas.all[0].described}, {count} replicas"
            show(f"specdec: {what} at {url_of(listener)}", err=True)

    stopping = partial(_show_stopping, config, quiet=quiet)
    app = make_router(replicas, config)
    failure = run(app, config.stop_timeout, listener, started, stopping, descriptors=2)
    if isinstance(failure, FirstReplicaError) and failure.code is not None:
        sys.exit(failure.code)  # the replica has said why
    if failure is not None:
        raise failure


def _serve_models(
    offers: Mapping[str, dict[str, Any]],
    limit: int | None,
    config: ServerConfig,
    listener: socket.socket,
    *,
    quiet: bool,
) -> None:
    """Serve several models, each with a process that starts at its first request."""
    from .. import backend
    from ..models.model_outline import context_of
    from ..server.models import Models, Offer, make_models
    from ..server.running import run, url_of
    from .replica import command, environments

    place = environments(1)
    names = list(offers)

    def start(index: int, path: str) -> ReplicaCommand:
        name = names[index]
        named, loading = replace(config, names=(name,)), dict(offers[name])
        limited = replace(loading["config"], memory_limit=each[index].nbytes)
        loading |= {"config": limited, "name": name}
        return command(loading, named, place, 0, path, quiet=quiet, waits=True)

    limits = [each["config"].memory_limit for each in offers.values()]
    total = limit or backend.memory_size() or sum(filter(None, limits))
    each = [
        Offer(
            name,
            limit_of_model or total,
            context_of(offer["target"], offer.get("revision")),
        )
        for (name, offer), limit_of_model in zip(offers.items(), limits, strict=True)
    ]
    if (largest := max(each, key=lambda offer: offer.nbytes)).nbytes > total:
        raise ConfigError(
            f"{largest.name} may use {largest.nbytes} bytes, and all models together "
            f"{total}: raise --memory-limit, or lower memory_limit in the file"
        )
    models = Models(each, start, total, config.request_timeout)
    if not quiet:
        listed = ", ".join(names)
        show(f"specdec: {listed}, each loaded when asked for, at {url_of(listener)}",
             err=True)  # fmt: skip
    stopping = partial(_show_stopping, config, quiet=quiet)
    app = make_models(models, config)
    failure = run(app, config.stop_timeout, listener, stopping=stopping, descriptors=2)
    if failure is not None:
        raise failure


def _show_stopping(config: ServerConfig, running: int, *, quiet: bool) -> None:
    if not running and not quiet:
        show("specdec: stopping", err=True)
    if running and not quiet:
        answers = "1 answer has" if running == 1 else f"{running} answers have"
        most = f"{config.stop_timeout:g} seconds"
        again = "Ctrl-C again ends at once"
        show(f"specdec: stopping: {answers} up to {most}; {again}", err=True)


def engine_failed(failure: BaseException) -> ServerError:
    """The error that ends a server whose engine failed."""
    return ServerError(
        f"the engine failed ({reason_of(failure)}): start the server again"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def described(decoder: Any) -> str:
    """A line that says what a decoder serves."""
    from ..model_names import short

    draft = short(decoder.draft_name) if decoder.draft_name else "no draft"
    shared = share_text(decoder.stats.vocabulary_share)
    return f"{short(decoder.target_name)} with {draft}{shared}"
