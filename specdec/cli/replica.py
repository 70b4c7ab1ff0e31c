"""One replica of ``specdec serve --replicas``: ``python -m specdec.cli.replica``.

It reads from its standard input what to serve, serves it at a Unix socket, and ends
when its standard input closes: so no replica outlives the process that started it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..model_names import draft_for, target_name
from ..prompts import templates
from ..utils.blas import own_threads
from ..utils.child import module_process
from ..utils.process import cuda_devices, prepare_process
from .output import report, show_warnings, silence_third_parties
from .ranks import load
from .serve import described, engine_failed

if TYPE_CHECKING:
    from ..server.config import ServerConfig
    from ..server.replicas import ReplicaCommand


def environments(count: int) -> list[dict[str, str]]:
    """Environment variables that give ``count`` replicas their devices and cores.

    If there are fewer devices, several replicas share one. The cores are divided once:
    a replica that is started again would count those of the others as busy.
    """
    from ..backend import defaults

    if defaults().name != "cuda":
        return [own_threads(count)] * count
    names = cuda_devices()
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(count)]


def command(
    loading: Mapping[str, Any],
    config: ServerConfig,
    environments: Sequence[Mapping[str, str]],
    index: int,
    path: str,
    *,
    quiet: bool = False,
    waits: bool = False,
) -> ReplicaCommand:
    """The command that starts replica ``index``, which listens at ``path``.

    Replicas that share a device share its memory, unless a limit was named. Only the
    first one says what it notes, since the others would say the same.

    Args:
        loading: arguments of :meth:`~specdec.SpecDecoder.from_pretrained`.
        config: the server's config; the router checks its keys and origins.
        quiet: the first one says nothing, either.
        waits: it waits for a line once the models are known to be loadable.
    """
    from ..server.replicas import ReplicaCommand

    config = replace(config, api_keys=(), cors=())
    program, environment = module_process("specdec.cli.replica")
    sharing = environments.count(environments[index])
    quiet = quiet or index > 0
    greeting = pickle.dumps((path, dict(loading), config, quiet, sharing, waits))
    return ReplicaCommand(program, {**environment, **environments[index]}, greeting)


def main() -> int:
    """Serve until the parent or a signal ends the process; return the exit code."""
    # Output that a library prints must not reach the parent.
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare_process()  # a configuration's module imports MLX
    path, loading, config, quiet, sharing, waits = pickle.load(sys.stdin.buffer)
    room = threading.Event()
    threading.Thread(target=_end_with_parent, args=(room,), daemon=True).start()
    silence_third_parties()
    show_warnings(notes=not quiet)
    try:
        loading["config"] = within_share(loading.get("config"), sharing)
        if waits:
            from ..server.replicas import LOADABLE

            _check(**loading)
            print(LOADABLE, file=parent, flush=True)
            room.wait()
        _serve(path, loading, config, parent, quiet=quiet)
    except Exception as error:
        return report(error)
    return 0


def within_share(config: EngineConfig | None, sharing: int) -> EngineConfig:
    """The config of one of ``sharing`` replicas that share a device."""
    from .. import backend

    config = config or EngineConfig()
    if sharing == 1 or config.memory_limit is not None:
        return config
    return replace(config, memory_limit=backend.memory_size(sharing))


def _check(
    target: str,
    draft: str | None = None,
    *,
    config: EngineConfig,
    dtype: str | None = None,
    draft_adapter_path: str | None = None,
    **origin: Any,
) -> None:
    """Download the models, and refuse what can be seen not to load.

    Raises:
        SpecdecError: see :meth:`specdec.SpecDecoder.from_pretrained`.
    """
    from ..engine.build import check_before_loading

    spec = draft_for(target, draft)
    if spec is not None and draft_adapter_path is not None:
        spec = spec.with_adapter(draft_adapter_path)
    kinds = ("adapter_path", "revision", "trust_remote_code")
    named = {kind: origin[kind] for kind in kinds if kind in origin}
    check_before_loading(target_name(target), spec, dtype, config, fetch=True, **named)


def _serve(
    path: str,
    loading: dict[str, Any],
    config: ServerConfig,
    parent: Any,
    *,
    quiet: bool,
) -> None:
    from ..server.app import make_app
    from ..server.running import run

    templates.start()
    decoder, _ = load(None, quiet=quiet, **loading)

    def started() -> None:
        print(described(decoder), file=parent, flush=True)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        failure = run(make_app(decoder, config), config.stop_timeout, listener, started)
    if failure is not None:
        raise engine_failed(failure) from failure


def _end_with_parent(room: threading.Event) -> None:
    while os.read(0, 1):  # not sys.stdin, which could not be closed at exit
        room.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
