"""Several processes that run one model: started here, or by ``mlx.launch``.

Rank 0 is the command that the user sees: it reads options, prompts and standard input,
and prints. The others take everything from it, also the names of the models. Whatever
their command line says, they only follow.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ..model_names import draft_for, pair_name
from ..parallel import LINK, Follower, Leader, Ranks, launched_rank
from ..utils.blas import free_cores, own_threads, use_threads
from ..utils.child import module_process
from ..utils.process import cuda_devices
from . import options
from .output import FAILURE, note, noted_if_slow

if TYPE_CHECKING:
    from ..decoder import SpecDecoder

_LOCAL = "127.0.0.1"


def tensor_parallel() -> options.Option:
    """``--tensor-parallel``."""
    return click.option(
        "--tensor-parallel",
        type=click.IntRange(min=1),
        metavar="N",
        help="Divide the target between N devices of this machine, and start a process "
        "for each; mlx.launch does it for several machines. [default: 1]",
    )


def load(
    tensor_parallel: int | None,
    *,
    quiet: bool,
    name: str | None = None,
    **settings: Any,
) -> tuple[SpecDecoder, Leader | None]:
    """Load the decoder of rank 0, or of the only process; other ranks load theirs.

    Notes say what makes a model slow on this machine.

    Args:
        quiet: leave the notes out.
        name: what notes call the models; ``None``: as ``settings`` name them.
        settings: arguments of :meth:`specdec.SpecDecoder.from_pretrained`.

    Returns:
        The decoder, and rank 0's view of the ranks if there are others.

    Raises:
        click.UsageError: there are too few ranks or devices.
        SpecdecError: see :meth:`specdec.SpecDecoder.from_pretrained`, and
            :func:`~specdec.backend.check_compiler`.
    """
    target = settings.get("target")
    name = name or pair_name(target, draft_for(target, settings.get("draft")))
    with noted_if_slow(f"loading {name}", quiet=quiet):
        return _load(tensor_parallel, quiet=quiet, **settings)


def _load(
    tensor_parallel: int | None, *, quiet: bool, **settings: Any
) -> tuple[SpecDecoder, Leader | None]:
    from .. import backend
    from ..decoder import SpecDecoder

    missing = backend.check_compiler()
    if missing and not quiet:
        note(missing)
    ranks = _join(tensor_parallel)
    leader = ranks if isinstance(ranks, Leader) else None
    if leader is not None:
        signal.signal(signal.SIGTERM, partial(_hear, leader))
        leader.decide("models", lambda: settings)
    decoder = SpecDecoder.from_pretrained(**settings, ranks=leader)
    if not quiet:
        fixed = decoder.config.num_draft_tokens != "auto"
        fixed = fixed and decoder.draft_name is not None
        float32 = settings.get("dtype") == "float32" or decoder.target.in_float32
        for text in backend.product_notes(float32=float32, fixed_draft=fixed):
            note(text)
    return decoder, leader


def _hear(leader: Leader, number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C; mlx.launch sends it when another rank has ended."""
    if leader.failure is None:
        raise KeyboardInterrupt


def report_loss(leader: Leader | None, say: Callable[..., None]) -> None:
    """Set the report for a rank that ends while the main thread waits for it.

    Args:
        say: called in another thread, with the error as ``lost``.
    """
    if leader is not None:
        leader.last_words = lambda error: say(lost=error)


def follow() -> NoReturn:
    """On a rank other than 0, do what rank 0 does; nothing is printed."""
    # A Ctrl-C ends rank 0, which ends this rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ..decoder import SpecDecoder

    ranks = Ranks.join()
    if not isinstance(ranks, Follower):
        sys.exit(FAILURE)
    try:
        with ranks.reporting():
            settings: dict[str, Any] = ranks.decide("models", dict)
            decoder = SpecDecoder.from_pretrained(**settings, ranks=ranks)
        decoder.follow()
    except Exception:  # rank 0 reports it
        sys.exit(FAILURE)
    sys.exit()


def _join(wanted: int | None) -> Ranks | None:
    """Join the ranks of this run, and start them if needed; ``None``: no others."""
    if launched_rank() is None:
        return None if wanted in (None, 1) else _start(wanted)
    ranks = Ranks.join()
    size = 1 if ranks is None else ranks.size
    if wanted not in (None, size):
        raise click.UsageError(
            f"--tensor-parallel is {wanted}, and {size} ranks were launched: leave it "
            "out"
        )
    return ranks


def _start(size: int) -> Ranks | None:
    """Start the other ranks on this machine, one per device, and join them."""
    from ..backend import defaults

    environment: dict[str, str] = {}
    devices: list[str] | None = None
    kind = defaults().name
    if kind == "cuda":
        devices = cuda_devices()
        environment = {
            "NCCL_HOST_IP": _LOCAL,
            "NCCL_PORT": str(_free_ports(1)[0]),
            "MLX_WORLD_SIZE": str(size),
        }
    elif kind == "metal":
        devices = ["0"]
    if devices is not None and len(devices) < size:
        raise click.UsageError(
            f"--tensor-parallel is {size}, and this machine has {len(devices)} of "
            "MLX's devices: take fewer, or mlx.launch --hosts for several machines"
        )
    with ExitStack() as at_end, ExitStack() as if_failed:
        if devices is None:
            hosts = [[f"{_LOCAL}:{port}"] for port in _free_ports(size)]
            number, path = tempfile.mkstemp(prefix="specdec-ranks-", suffix=".json")
            at_end.callback(os.remove, path)
            with open(number, "w", encoding="utf-8") as file:
                json.dump(hosts, file)
            environment = {"MLX_HOSTFILE": path}
        threads = own_threads(size)
        use_threads(free_cores(size))
        links: dict[int, socket.socket] = {}
        for rank in range(1, size):
            links[rank], theirs = socket.socketpair()
            if_failed.callback(links[rank].close)
            program, variables = module_process("specdec")
            variables |= {**environment, **threads, "MLX_RANK": str(rank)}
            variables[LINK] = str(theirs.fileno())
            if devices is not None:
                variables["CUDA_VISIBLE_DEVICES"] = devices[rank]
            with theirs:
                process = subprocess.Popen(
                    program,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C must reach only rank 0
                )
            if_failed.callback(process.kill)
        os.environ.update(environment, MLX_RANK="0")
        ranks = Ranks.join(links)
        if_failed.pop_all()
    return ranks


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_together:
        sockets = [
            open_together.enter_context(socket.create_server((_LOCAL, 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]
