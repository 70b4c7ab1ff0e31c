"""Several models behind one port: each is a process, started when it is asked for.

No mlx here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .config import DEFAULT_NAME, ServerConfig
from .errors import RequestError
from .replicas import Replica, Replicas, Start
from .router import Router, app_of
from .routing import Question
from .web import PATHS, described, listed

log = logging.getLogger("specdec.server")

#: Seconds between two looks at whether a model has loaded, or has made room.
_LOOK = 0.05


@dataclass(frozen=True)
class Offer:
    """A model that is served.

    Args:
        name: by which requests ask for it.
        nbytes: the memory that its process may use.
        context: the tokens of its context; ``None``: not known before it is loaded.
    """

    name: str
    nbytes: int
    context: int | None = None


class Models(Replicas):
    """Starts a model's process at its first request, and ends others to make room.

    Args:
        offers: the models; the first answers requests that name none.
        start: gives the command for each.
        nbytes: the memory that processes may use together.
        answer_seconds: the longest time that an answer takes.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        start: Start,
        nbytes: int,
        answer_seconds: float = 600.0,
    ):
        super().__init__(len(offers), start, answer_seconds)
        self.offers = offers
        self._nbytes = nbytes
        self._uses = 0
        self._why: list[str] = [""] * len(offers)  # each could not be loaded
        self._asking: Counter[int] = Counter()  # requests that wait for each
        # Models that wait for memory, that have it, and that are about to free it.
        self._lacking: set[int] = set()
        self._holding: set[int] = set()
        self._ending: set[int] = set()
        for each, offer in zip(self.all, offers, strict=True):
            each.name = f"model {offer.name}"

    async def __aenter__(self) -> Self:
        self._make_folder()
        self._tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in self.all]
        return self

    def named(self, name: str | None) -> Replica:
        """The model that a request asks for.

        Raises:
            RequestError: there is none of that name.
        """
        names = [offer.name for offer in self.offers]
        if name in names:
            return self.all[names.index(name)]
        if name not in (None, DEFAULT_NAME):
            raise RequestError.no_model(name, names)
        return self.all[0]

    async def load(self, replica: Replica) -> None:
        """Start a model unless it runs; wait until it answers.

        Its process checks that it can be loaded, and then waits for room. A model with
        requests is never ended. Of the others, the one that was unused longest goes
        first.

        Raises:
            RequestError: it cannot be loaded.
        """
        self._uses += 1
        replica.last = self._uses
        index, starts = replica.index, replica.starts
        late = time.monotonic() + self._answer_seconds
        self._asking[index] += 1
        try:
            while replica.client is None:
                if self._stopping:
                    raise RequestError.stopping()
                if self._tasks[index].done():
                    if replica.starts > starts and self._why[index]:
                        raise RequestError(
                            f"the model cannot be loaded ({self._why[index]}): the "
                            "server's log says why",
                            status=500,
                            code="model_not_loaded",
                        )
                    self._tasks[index] = asyncio.create_task(self._once(replica))
                elif index in self._lacking and time.monotonic() > late:
                    text = "requests of other models leave no memory for this one"
                    raise RequestError.later("no_memory", f"{text}: try again later")
                await asyncio.sleep(_LOOK)
        finally:
            self._asking[index] -= 1

    async def _room(self, replica: Replica) -> None:
        self._lacking.add(replica.index)
        try:
            while not self._has_room(replica):
                if self._stopping or not self._asking[replica.index]:
                    replica.signal(signal.SIGKILL)
                    return
                await asyncio.sleep(_LOOK)
            self._holding.add(replica.index)
        finally:
            self._lacking.discard(replica.index)

    def _has_room(self, replica: Replica) -> bool:
        """Whether a model has room now; if not, idle ones are asked to end."""
        size = [offer.nbytes for offer in self.offers]
        needed = size[replica.index] - self._nbytes
        needed += sum(size[i] for i in self._holding)
        if needed <= 0:
            return True
        needed -= sum(size[i] for i in self._ending)
        for each in sorted(self.all, key=lambda each: each.last):
            if needed > 0 and each.client is not None and not each.running:
                each.client = None  # no request reaches it any more
                each.signal(signal.SIGTERM)
                self._ending.add(each.index)
                needed -= size[each.index]
        return False

    def _like(self, replica: Replica) -> Sequence[Replica]:
        return [replica]

    async def _once(self, replica: Replica) -> None:
        """Run a model's process until it ends."""
        index = replica.index
        self._why[index] = ""
        try:
            was_ready, code = await self._run(replica)
            if not was_ready:
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                self._why[index] = how
            elif not self._stopping and index not in self._ending:
                log.warning("%s ended: its next request starts it again", replica.name)
        except OSError as error:  # the system cannot start a process
            self._why[index] = str(error)
        finally:
            self._holding.discard(index)
            self._ending.discard(index)


class ModelsRouter(Router):
    """Passes each request to the model that it names."""

    replicas: Models

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        return not self._draining

    @asynccontextmanager
    async def replica(
        self, question: Question, tried: Sequence[Replica]
    ) -> AsyncIterator[Replica]:
        """The model that a request names, once it is loaded."""
        if self._draining:
            raise RequestError.stopping()
        chosen = self.replicas.named(question.model)
        with self.counted(chosen):
            if chosen in tried:  # it is ending
                await asyncio.sleep(_LOOK)
            await self.replicas.load(chosen)
            yield chosen

    def described(self, offer: Offer) -> dict[str, Any]:
        """A model, as ``/v1/models`` lists it."""
        return described(
            offer.name,
            self.created,
            max_model_len=offer.context,
            loaded=self.replicas.named(offer.name).client is not None,
        )


def make_models(models: Models, config: ServerConfig) -> Starlette:
    """A web application that passes each request to the model that it names."""
    routes = [Route("/v1/models", _list), Route("/v1/models/{name:path}", _one)]
    return app_of(ModelsRouter(models, config), routes, ("/", *PATHS))


def _router(request: Request) -> ModelsRouter:
    router: ModelsRouter = request.app.state.service
    return router


async def _list(request: Request) -> Response:
    router = _router(request)
    return listed([router.described(offer) for offer in router.replicas.offers])


async def _one(request: Request) -> Response:
    router = _router(request)
    replica = router.replicas.named(request.path_params["name"])
    return JSONResponse(router.described(router.replicas.offers[replica.index]))
