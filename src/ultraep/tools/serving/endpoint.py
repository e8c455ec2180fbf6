"""Servers of the OpenAI protocol under the same load: streamed completions, one token each.

Every prompt is sent when it arrives, whether or not earlier ones were answered. Errors are counted
by kind. A server that cannot be reached several times in a row is given up.
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
FIRST_ANSWER = 10.0  # seconds to list the models of a server
UNREACHED = ("cannot be reached", "no answer in time")
UNSENT = "not sent, the server was given up"
SAMPLE = re.compile(r"(ultraep_imbalance_(?:before|after)_(?:sum|count))(?:\{.*\})? (\S+)")


@dataclass(frozen=True)
class Endpoint:
    """A server: its name in tables, its address up to "/v1", and its model (None: its first)."""

    name: str
    url: str
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Servers to compare under the same load. timeout: seconds that a prompt may take in all."""

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
    """Parse an endpoint of the command line, NAME=URL or URL.

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
    """Call `tell` with every turn. A server that is not there is an error before the first."""
    asyncio.run(_all_turns(options, tell))


async def _all_turns(options: EndpointOptions, tell: Callable[[Turn], None]) -> None:
    load = options.load
    async with _client(options.timeout) as client:
        servers = [
            Server(client, endpoint, await _model_of(client, endpoint))
            for endpoint in options.endpoints
        ]
        for server, rate, number in load.turns(servers, load.known_rates()):
            if not server.dead:
                prompts = load.prompts(rate, number, BYTES_PER_TOKEN)
                tell(await server.turn(prompts, rate, number, options.timeout))
    dead = [server.endpoint.url for server in servers if server.dead]
    if dead:
        raise CommunicationError(
            f"{', '.join(dead)}: given up after {GIVEN_UP} prompts in a row without an answer"
        )


class InvalidAnswer(Exception):
    """An answer that does not follow the protocol."""


class Server:
    """One server under load. dead: whether it was given up."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, model: str) -> None:
        self.client, self.endpoint, self.model, self.dead = client, endpoint, model, False
        self._unreached = 0  # prompts in a row

    async def turn(self, prompts: Sequence[Prompt], rate: float, number: int, limit: float) -> Turn:
        """Send all prompts at their seconds, and wait for their first tokens."""
        errors: Counter[str] = Counter()
        counters = await self._counters()
        begin = time.monotonic()
        ends = await asyncio.gather(*(self._send(p, begin, limit, errors) for p in prompts))
        seconds = time.monotonic() - begin
        pages = counters, await self._counters()
        return Turn(
            variant=self.endpoint.name,
            rate=rate,
            number=number,
            waited=waits(prompts, ends),
            tokens=[prompt.tokens for prompt in prompts],
            arrived=prompts[-1].arrival,
            seconds=max((end for end in ends if end is not None), default=seconds),
            errors=dict(errors),
            before=imbalance_between(*pages, "before"),
            after=imbalance_between(*pages, "after"),
        )

    async def _send(
        self, prompt: Prompt, begin: float, limit: float, errors: Counter[str]
    ) -> float | None:
        """Send a prompt when it arrives; the second of its first token, or None."""
        await asyncio.sleep(begin + prompt.arrival - time.monotonic())
        if self.dead:
            errors[UNSENT] += 1
            return None
        end, error = await self._complete(prompt, limit)
        self._unreached = self._unreached + 1 if error in UNREACHED else 0
        self.dead = self.dead or self._unreached >= GIVEN_UP
        if error is not None:
            errors[error] += 1
            return None
        return end - begin

    async def _complete(self, prompt: Prompt, limit: float) -> tuple[float, str | None]:
        """The time of the first token, or the kind of error."""
        import httpx

        try:
            async with asyncio.timeout(limit):
                return await self._stream(prompt), None
        except (TimeoutError, httpx.TimeoutException):
            error = UNREACHED[1]
        except httpx.HTTPStatusError as status:
            error = f"status {status.response.status_code}"
        except httpx.ConnectError:
            error = UNREACHED[0]
        except httpx.HTTPError:
            error = "broke off"
        except InvalidAnswer:
            error = "nonsense"
        return 0.0, error

    async def _stream(self, prompt: Prompt) -> float:
        """Read the stream of one completion to its end; the time of its first token."""
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
            raise InvalidAnswer
        return end

    async def _counters(self) -> Mapping[str, float]:
        """The counters of its page of metrics; empty where there is no such page."""
        import httpx

        if self.dead:
            return {}
        try:
            async with asyncio.timeout(FIRST_ANSWER):
                response = await self.client.get(f"{self.endpoint.url}/metrics")
        except (TimeoutError, httpx.HTTPError):
            return {}
        return sums_of(response.text) if response.is_success else {}


def _has_token(data: str) -> bool:
    """Whether an event of a stream brings a token."""
    if data == "[DONE]":
        return False
    try:
        choices = json.loads(data)["choices"]
        return bool(choices) and isinstance(choices[0]["text"], str)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise InvalidAnswer from None


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
    """The model to use; the server must be there, and have it."""
    import httpx

    address = f"{endpoint.url}/v1/models"
    try:
        async with asyncio.timeout(FIRST_ANSWER):
            response = await client.get(address)
        response.raise_for_status()
        models = [str(model["id"]) for model in response.json()["data"]]
    except (TimeoutError, httpx.TimeoutException):
        raise CommunicationError(f"{address}: no answer in {FIRST_ANSWER:g} s") from None
    except httpx.HTTPError as error:
        raise CommunicationError(f"{address}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CommunicationError(f"{address}: not the answer of an OpenAI protocol") from None
    if not models:
        raise CommunicationError(f"{address}: it serves no model")
    if endpoint.model not in (None, *models):
        raise ConfigError(f"{endpoint.url} serves {', '.join(models)}, not {endpoint.model!r}")
    return endpoint.model or models[0]


# -- counters of a server ------------------------------------------------------------------------


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
