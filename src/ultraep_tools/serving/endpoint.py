"""The same load for servers with the OpenAI protocol: streamed completions of one token.

Every prompt is sent at its arrival time, whether or not earlier prompts are answered. Errors are
counted by name. A server that cannot be reached several times in a row is dropped.
httpx: pip install '.[bench]' in the clone of ultraep.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from ultraep.errors import BackendUnavailable, CommunicationError, ConfigError
from ultraep.supported import install_extra
from ultraep_tools.serving.load import LONGEST_TURN, LoadOptions, Prompt
from ultraep_tools.serving.measure import Turn

try:
    import httpx
except ImportError as missing:
    raise BackendUnavailable(
        f"--endpoint needs httpx ({missing}): {install_extra('bench')}"
    ) from None

BYTES_PER_TOKEN = 4  # of English text, roughly; servers count with their own tokenizer
MOST_UNREACHED = 8  # prompts in a row that may fail to reach a server
FIRST_ANSWER = 10.0  # seconds to list the models of a server
TIMEOUT, UNREACHABLE = "no answer in time", "cannot be reached"
UNSENT = "not sent, the server was dropped"
SAMPLE = re.compile(r"(ultraep_imbalance_(?:before|after)_(?:sum|count))(?:\{.*\})? (\S+)")


@dataclass(frozen=True)
class Endpoint:
    """A server: its name in tables, its URL without "/v1", and its model (None: the first)."""

    name: str
    url: str
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Servers to compare under the same load. timeout: seconds per prompt."""

    load: LoadOptions
    endpoints: tuple[Endpoint, ...]
    timeout: float = 30.0

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"endpoints need different names, got {', '.join(names)}; use NAME=URL"
            )
        if not self.load.known_rates():
            raise ConfigError("servers are not calibrated: pass --rate or --arrivals")
        if not 0 < self.timeout <= LONGEST_TURN:
            raise ConfigError(f"--timeout must lie in 0 to {LONGEST_TURN:g}, got {self.timeout:g}")


def endpoint_of(text: str, model: str | None = None) -> Endpoint:
    """Parse NAME=URL or URL from the command line.

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
    except ValueError:  # invalid port or bracket
        valid = False
    if not valid:
        raise ConfigError(f"--endpoint must be [NAME=]http://HOST:PORT, got {text!r}")
    return Endpoint(name or parts.netloc, url.rstrip("/").removesuffix("/v1"), model)


def run(options: EndpointOptions, report: Callable[[Turn], None]) -> None:
    """Call `report` with every turn. Raises before the first turn if a server does not answer."""
    asyncio.run(_all_turns(options, report))


async def _all_turns(options: EndpointOptions, report: Callable[[Turn], None]) -> None:
    load, limits = options.load, httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=options.timeout, limits=limits, trust_env=False) as client:
        servers = [
            Server(client, endpoint, await _model_of(client, endpoint))
            for endpoint in options.endpoints
        ]
        for server, rate, number in load.turns(servers, load.known_rates()):
            if not server.dead:
                prompts = load.prompts(rate, number, BYTES_PER_TOKEN)
                report(await server.turn(prompts, rate, number, options.timeout))
    dead = [server.endpoint.url for server in servers if server.dead]
    if dead:
        raise CommunicationError(
            f"{', '.join(dead)}: dropped after {MOST_UNREACHED} prompts in a row without an answer"
        )


async def _model_of(client: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """The model to use; raises if the server does not answer or does not have it."""
    address = f"{endpoint.url}/v1/models"
    try:
        async with asyncio.timeout(FIRST_ANSWER):
            response = await client.get(address)
        response.raise_for_status()
        models = [str(model["id"]) for model in response.json()["data"]]
    except (TimeoutError, httpx.TimeoutException):
        raise CommunicationError(f"{address}: no answer within {FIRST_ANSWER:g} s") from None
    except httpx.HTTPError as error:
        raise CommunicationError(f"{address}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CommunicationError(f"{address}: the answer is not a list of models") from None
    if not models:
        raise CommunicationError(f"{address}: the list of models is empty")
    if endpoint.model not in (None, *models):
        raise ConfigError(f"{endpoint.url} serves {', '.join(models)}, not {endpoint.model!r}")
    return endpoint.model or models[0]


class InvalidAnswer(Exception):
    """The answer does not follow the protocol."""


class Server:
    """One server under load. dead: whether it was dropped."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, model: str) -> None:
        self.client, self.endpoint, self.model, self.dead = client, endpoint, model, False
        self._unreached = 0  # prompts in a row

    async def turn(self, prompts: Sequence[Prompt], rate: float, number: int, limit: float) -> Turn:
        """Send all prompts at their arrival times and wait for their first tokens."""
        errors: Counter[str] = Counter()
        counters = await self._counters()
        begin = time.monotonic()
        ends = await asyncio.gather(*(self._send(p, begin, limit, errors) for p in prompts))
        seconds = time.monotonic() - begin
        return Turn.of(
            prompts,
            ends,
            variant=self.endpoint.name,
            rate=rate,
            number=number,
            seconds=max((end for end in ends if end is not None), default=seconds),
            errors=dict(errors),
            **imbalances_between(counters, await self._counters()),
        )

    async def _send(
        self, prompt: Prompt, begin: float, limit: float, errors: Counter[str]
    ) -> float | None:
        """Send a prompt at its arrival time; return the second of its first token, or None."""
        await asyncio.sleep(begin + prompt.arrival - time.monotonic())
        if self.dead:
            errors[UNSENT] += 1
            return None
        try:
            async with asyncio.timeout(limit):
                end = await self._stream(prompt)
        except (TimeoutError, httpx.HTTPError, InvalidAnswer) as error:
            name = _name_of(error)
            errors[name] += 1
            self._unreached = self._unreached + 1 if name in (TIMEOUT, UNREACHABLE) else 0
            self.dead = self.dead or self._unreached >= MOST_UNREACHED
            return None
        self._unreached = 0
        return end - begin

    async def _stream(self, prompt: Prompt) -> float:
        """Read the stream of one completion to its end; return the time of its first token."""
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
        """Counters from the server's metrics page; all zero without such a page."""
        page = ""
        if not self.dead:
            with suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(FIRST_ANSWER):
                    response = await self.client.get(f"{self.endpoint.url}/metrics")
                page = response.text if response.is_success else ""
        return sums_of(page)


def _name_of(error: Exception) -> str:
    if isinstance(error, (TimeoutError, httpx.TimeoutException)):
        return TIMEOUT
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    if isinstance(error, httpx.ConnectError):
        return UNREACHABLE
    return "invalid answer" if isinstance(error, InvalidAnswer) else "broken stream"


def _has_token(data: str) -> bool:
    if data == "[DONE]":
        return False
    try:
        choices = json.loads(data)["choices"]
        return bool(choices) and isinstance(choices[0]["text"], str)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise InvalidAnswer from None


def sums_of(page: str) -> Mapping[str, float]:
    """Sums and counts on a page of Prometheus, over all labels; 0 for missing names.

    >>> dict(sums_of('ultraep_imbalance_after_sum{policy="ultraep"} 2.5'))
    {'ultraep_imbalance_after_sum': 2.5}
    """
    sums: dict[str, float] = defaultdict(float)
    for name, value in SAMPLE.findall(page):
        with suppress(ValueError):
            sums[name] += float(value)
    return sums


def imbalances_between(
    earlier: Mapping[str, float], later: Mapping[str, float]
) -> dict[str, float | None]:
    """Mean imbalance before and after balancing between two pages; None if not counted."""
    means: dict[str, float | None] = {}
    for name in ("before", "after"):
        total, count = (
            later[counter] - earlier[counter]
            for counter in (f"ultraep_imbalance_{name}_sum", f"ultraep_imbalance_{name}_count")
        )
        means[name] = total / count if count > 0 else None
    return means
