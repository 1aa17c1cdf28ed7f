"""Server settings: address, access, limits."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, get_args

from malmoi.errors import UsageError, nearest

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS = get_args(LogLevel)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Safe by default: reachable from this machine only, and not readable by other origins."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: str | None = None
    cors: tuple[str, ...] = ()  # allowed CORS origins; "*": all
    slots: int = 16  # continuations that a model generates at the same time
    queue: int = 256  # requests that may wait for a slot
    timeout: float = 300.0  # seconds that one request may take
    max_tokens: int = 4096  # new tokens per request
    # tokens read per request, as for OpenAI's embeddings
    max_read_tokens: int = 300_000
    max_body: int = 4 * 2**20  # bytes of a request
    body_timeout: float = 30.0  # seconds for a request body to arrive
    stall_timeout: float = 30.0  # beyond `timeout`, for a client that reads slowly
    time_slice: float = 0.05  # seconds of computation before another client's turn
    runs: Path | None = None  # training runs for the studio to show
    pairs: tuple[Path, ...] = ()  # files of minimal pairs that it scores their snapshots on
    # instead of the folders' names: one for each model, or for a single model any number
    served_model_name: tuple[str, ...] = ()
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        limits = ("slots", "queue", "max_tokens", "max_read_tokens", "max_body")
        for name in (*limits, "timeout", "body_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    "{name} must be above 0, not {value}.", name=name, value=getattr(self, name)
                )
        if not 0 <= self.port < 2**16:
            raise UsageError("port must be between 0 and 65535, not {port}.", port=self.port)
        if self.log_level not in LOG_LEVELS:
            hint = nearest(self.log_level, LOG_LEVELS)
            raise UsageError(
                "There is no log level {log_level!r}.{hint}", log_level=self.log_level, hint=hint
            )
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise UsageError(
                "The API key must be one or more ASCII characters: it travels in a header."
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
