"""Asks a Prometheus over HTTP: whether it answers, which targets it has, which alerts fire."""

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from ddpctl.errors import UnavailableError

TIMEOUT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Scraped:
    """A target of ours as Prometheus sees it."""

    run: str
    node: str
    address: str
    up: bool
    error: str


@dataclass(frozen=True, kw_only=True)
class Firing:
    """An alert that fires or is about to."""

    alert: str
    state: str  # firing or pending
    severity: str
    run: str
    summary: str


def answers(url: str) -> bool:
    """Whether a server speaks HTTP there, whatever it says."""
    try:
        _open(url).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def targets(url: str, job: str) -> tuple[Scraped, ...]:
    """The targets of that scrape job. Raises UnavailableError."""
    found = _get(url, "/api/v1/targets?state=active")["activeTargets"]
    scraped = (
        Scraped(
            run=one["labels"].get("job_id", ""),
            node=one["labels"].get("node", ""),
            address=one["labels"]["instance"],
            up=one["health"] == "up",
            error=one["lastError"],
        )
        for one in found
        if one["labels"]["job"] == job
    )
    return tuple(sorted(scraped, key=lambda one: (one.run, one.node.zfill(5), one.address)))


def alerts(url: str) -> tuple[Firing, ...]:
    """The alerts of ours that are not silent. Raises UnavailableError."""
    found = _get(url, "/api/v1/alerts")["alerts"]
    return tuple(
        Firing(
            alert=one["labels"]["alertname"],
            state=one["state"],
            severity=one["labels"].get("severity", ""),
            run=one["labels"].get("job_id", ""),
            summary=one["annotations"].get("summary", ""),
        )
        for one in found
        if one["labels"]["alertname"].startswith("Ddp")
    )


def _get(url: str, path: str) -> Any:
    try:
        with _open(url.rstrip("/") + path) as answer:
            return json.load(answer)["data"]
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"no Prometheus answers at {url}: {reason}") from None


def _open(url: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("an address begins with http:// or https://")
    direct = urllib.parse.urlsplit(url).hostname in _LOOPBACK
    handlers = [urllib.request.ProxyHandler({})] if direct else []  # a proxy has another loopback
    return urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S)
