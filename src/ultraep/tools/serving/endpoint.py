"""Servers of the OpenAI protocol under the same load: streamed completions, one token each.

Nobody waits: every prompt is sent when it arrives, whatever became of those before. What goes wrong
is counted by kind. A server that cannot be reached several times in a row is given up.
httpx: pip install 'ultraep[bench]'.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ultraep.errors import BackendUnavailable, CommunicationError, ConfigError
from ultraep.tools.serving.load import LONGEST_TURN, LoadOptions, Prompt
from ultraep.tools.serving.measure import Turn, waits

if TYPE_CHECKING:
    import httpx

BYTES_PER_TOKEN = 4  # of English text, roughly; servers count their own
GIVEN_UP = 8  # prompts in a row that did not reach the server
FIRST_WORD = 10.0  # seconds to tell which models there are
UNREACHED = ("cannot be reached", "no answer in time")
UNSENT = "not sent, the server was given up"
SAMPLE = re.compile(r"(ultraep_imbalance_(?:before|after)_(?:sum|count))(?:\{.*\})? (\S+)")


@dataclass(frozen=True)
class Endpoint:
    """A server: the name of its line, its address up to "/v1", and its model (None: its first)."""

    name: str
    url: str
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Servers to compare, under the same load. timeout: seconds that a prompt may take in all."""

    load: LoadOptions
    endpoints: tuple[Endpoint, ...]
    timeout: float = 30.0

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) < len(names):
            raise ConfigError(f"endpoints need names that differ: NAME=URL, got {', '.join(names)}")
        if not self.load.known_rates():
            raise ConfigError("a server is not calibrated: give --rate, or --arrivals with times")
        if not 0 < self.timeout <= LONGEST_TURN:
            raise ConfigError(f"--timeout must lie in 0 to {LONGEST_TURN:g}, got {self.timeout:g}")


def endpoint_of(text: str, model: str | None = None) -> Endpoint:
    """An endpoint as it is named on the command line, NAME=URL or URL.

    >>> endpoint_of("eplb=http://127.0.0.1:8000/v1/").url
    'http://127.0.0.1:8000'
    >>> endpoint_of("http://127.0.0.1:8000").name
    '127.0.0.1:8000'
    """
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        name, url = "", text
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket that is open
        valid = False
    if not valid:
        raise ConfigError(f"--endpoint is [NAME=]http://HOST:PORT, got {text!r}")
    return Endpoint(name or parts.netloc, url.rstrip("/").removesuffix("/v1"), model)


def run(options: EndpointOptions, tell: Callable[[Turn], None]) -> None:
    """All turns; `tell` hears each. Servers that are not there are an error before the first."""
    asyncio.run(_all_turns(options, tell))


async def _all_turns(options: EndpointOptions, tell: Callable[[Turn], None]) -> None:
    async with _client(options.timeout) as client:
        servers = [Server(client, one, await _model_of(client, one)) for one in options.endpoints]
        for server, rate, number in options.load.turns(servers, options.load.known_rates()):
            prompts = options.load.prompts(rate, number, BYTES_PER_TOKEN)
            if not server.dead:
                tell(await server.turn(prompts, rate, number, options.timeout))
    dead = [server.endpoint.url for server in servers if server.dead]
    if dead:
        raise CommunicationError(
            f"{', '.join(dead)}: given up after {GIVEN_UP} prompts in a row without an answer"
        )


class Nonsense(Exception):
    """An answer that is none of this protocol."""


class Server:
    """One server under load. dead: whether it was given up."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, model: str) -> None:
        self.client, self.endpoint, self.model, self.dead = client, endpoint, model, False
        self._unreached = 0  # prompts in a row

    async def turn(self, prompts: Sequence[Prompt], rate: float, number: int, limit: float) -> Turn:
        """Send all prompts at their seconds, and wait for their first tokens."""
        errors: Counter[str] = Counter()
        counted = await self._counters()
        begin = time.monotonic()
        found = await asyncio.gather(*(self._one(p, begin, limit, errors) for p in prompts))
        known, took = [end for end in found if end is not None], time.monotonic() - begin
        pages = counted, await self._counters()
        return Turn(
            variant=self.endpoint.name,
            rate=rate,
            number=number,
            waited=waits(prompts, found),
            tokens=[prompt.tokens for prompt in prompts],
            arrived=prompts[-1].arrival,
            seconds=max(known, default=took),
            errors=dict(errors),
            before=imbalance_between(*pages, "before"),
            after=imbalance_between(*pages, "after"),
        )

    async def _one(
        self, prompt: Prompt, begin: float, limit: float, errors: Counter[str]
    ) -> float | None:
        """The second of the first token of a prompt that is sent when it arrives."""
        await asyncio.sleep(begin + prompt.arrival - time.monotonic())
        if self.dead:
            errors[UNSENT] += 1
            return None
        end, wrong = await self._ask(prompt, limit)
        self._unreached = self._unreached + 1 if wrong in UNREACHED else 0
        self.dead = self.dead or self._unreached >= GIVEN_UP
        if wrong is not None:
            errors[wrong] += 1
        return end - begin if wrong is None else None

    async def _counters(self) -> Mapping[str, float]:
        """Its counters as they are; none where there is no such page."""
        import httpx

        if self.dead:
            return {}
        try:
            async with asyncio.timeout(FIRST_WORD):
                response = await self.client.get(f"{self.endpoint.url}/metrics")
        except (TimeoutError, httpx.HTTPError):
            return {}
        return sums_of(response.text) if response.is_success else {}

    async def _ask(self, prompt: Prompt, limit: float) -> tuple[float, str | None]:
        """Ask for one token: when it was there, or what went wrong."""
        import httpx

        end, wrong = 0.0, None
        try:
            async with asyncio.timeout(limit):
                end = await self._stream(prompt)
        except (TimeoutError, httpx.TimeoutException):
            wrong = UNREACHED[1]
        except httpx.HTTPStatusError as error:
            wrong = f"status {error.response.status_code}"
        except httpx.ConnectError:
            wrong = UNREACHED[0]
        except httpx.HTTPError:
            wrong = "broke off"
        except Nonsense:
            wrong = "nonsense"
        return end, wrong

    async def _stream(self, prompt: Prompt) -> float:
        """Read the stream of one completion to its end; when its first token came."""
        body = {
            "model": self.model,
            "prompt": prompt.text.decode("utf-8", "replace"),
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
        }
        address, end = f"{self.endpoint.url}/v1/completions", None
        async with self.client.stream("POST", address, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data:") and _has_token(line.removeprefix("data:").strip()):
                    end = end or time.monotonic()
        if end is None:
            raise Nonsense
        return end


def _has_token(data: str) -> bool:
    """Whether an event of a stream brings a token; errors and other things are nonsense."""
    if data == "[DONE]":
        return False
    try:
        event = json.loads(data)
        choices = event["choices"]
        return bool(choices) and isinstance(choices[0]["text"], str)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise Nonsense from None


@asynccontextmanager
async def _client(timeout: float) -> AsyncIterator[httpx.AsyncClient]:
    try:
        import httpx
    except ImportError as error:
        raise BackendUnavailable(
            f"--endpoint needs httpx ({error}): pip install 'ultraep[bench]'"
        ) from None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        yield client


async def _model_of(client: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """The model to ask for; the server must be there, and know it."""
    known = await _models(client, endpoint)
    if endpoint.model is None:
        return known[0]
    if endpoint.model not in known:
        raise ConfigError(f"{endpoint.url} serves {', '.join(known)}, not {endpoint.model!r}")
    return endpoint.model


async def _models(client: httpx.AsyncClient, endpoint: Endpoint) -> list[str]:
    import httpx

    address = f"{endpoint.url}/v1/models"
    try:
        async with asyncio.timeout(FIRST_WORD):
            response = await client.get(address)
        response.raise_for_status()
        found: list[str] = [str(one["id"]) for one in response.json()["data"]]
    except (TimeoutError, httpx.TimeoutException):
        raise CommunicationError(f"{address}: no answer in {FIRST_WORD:g} s") from None
    except httpx.HTTPError as error:
        raise CommunicationError(f"{address}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CommunicationError(f"{address}: not the answer of an OpenAI protocol") from None
    if not found:
        raise CommunicationError(f"{address}: it serves no model")
    return found


# -- counters of a server -------------------------------------------------------------------------


def sums_of(page: str) -> dict[str, float]:
    """Sums and counts of a page of Prometheus text, over all labels; empty if it has none.

    >>> sums_of('ultraep_imbalance_after_sum{policy="ultraep"} 2.5')
    {'ultraep_imbalance_after_sum': 2.5}
    """
    sums: dict[str, float] = {}
    for name, value in SAMPLE.findall(page):
        with suppress(ValueError):
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def imbalance_between(
    before: Mapping[str, float], after: Mapping[str, float], which: str
) -> float | None:
    """Mean imbalance, "before" or "after" copies, between two pages; None: not counted there."""
    name = f"ultraep_imbalance_{which}"
    total, count = (
        after.get(f"{name}_{part}", 0.0) - before.get(f"{name}_{part}", 0.0)
        for part in ("sum", "count")
    )
    return total / count if count > 0 else None
