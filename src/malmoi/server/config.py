"""Server settings: address, access, limits."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, get_args

from malmoi.errors import require_known, require_that
from malmoi.settings import option, require_bounds, setting

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS = get_args(LogLevel)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Safe by default: reachable from this machine only, and not readable by other origins."""

    host: str = option("127.0.0.1", "Address to bind; 0.0.0.0 accepts other machines.")
    port: int = option(8000, "0 picks a free port.", ge=0, le=65535)
    api_key: str | None = option(None, "API key that clients must send.", env="MALMOI_API_KEY")
    cors: tuple[str, ...] = option((), "An allowed CORS origin.")
    workers: int | None = option(
        None,
        "Processes for HTTP beside the one with the models; 0: that one does both.",
        ge=0,
        le=64,
        shown="by GPU and cores",
    )
    slots: int = option(16, "Sequences decoded at the same time.", gt=0)
    queue: int = option(256, "Requests that may queue; more are rejected with 429.", gt=0)
    timeout: float = option(300.0, "Timeout of one request: 300, 90s, 5m.", gt=0, unit="seconds")
    max_tokens: int = option(4096, "Maximum new tokens per request.", gt=0)
    max_read_tokens: int = option(
        300_000, "Maximum tokens a model reads for one request: texts × labels.", gt=0
    )
    max_body: int = setting(4 * 2**20, "Maximum bytes of a request.", gt=0)
    body_timeout: float = setting(30.0, "Seconds for a request body to arrive.", gt=0)
    stall_timeout: float = setting(30.0, "Extra seconds for a client that reads slowly.", gt=0)
    time_slice: float = setting(0.05, "Seconds of computation before another client's turn.")
    runs: Path | None = option(None, "Folder of runs for the studio to show.", metavar="DIR")
    pairs: tuple[Path, ...] = option(
        (), "Minimal pairs (BLiMP, Kontrast) for the studio; repeatable.", metavar="FILE"
    )
    trace: bool = option(
        False, "Let other machines read the training text that a text matches (/v1/trace)."
    )
    served_model_name: tuple[str, ...] = option(
        (), "Name in the API instead of the folder's; repeatable: aliases, or one per model."
    )
    log_level: LogLevel = option("info", "debug (with every request), info, warning or error.")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_known(self.log_level, LOG_LEVELS, "There is no log level {name!r}.{hint}")
        require_that(
            self.api_key is None or (self.api_key.isascii() and self.api_key.strip()),
            "The API key must be one or more ASCII characters: it travels in a header.",
        )

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_local(self.host)


def is_local(host: str) -> bool:
    """Whether a host name or address always means this machine."""
    host = host.lower()  # RFC 9110 §4.2.3
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
