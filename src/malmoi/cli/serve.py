"""`malmoi serve`: models behind an OpenAI-compatible API, and the studio page."""

import logging
from pathlib import Path
from typing import Annotated

from malmoi.cli import options as opt
from malmoi.cli.inputs import load_torch
from malmoi.cli.options import count, described, option, seconds

KEY = "MALMOI_API_KEY"


def serve_command(
    model: Annotated[
        list[str],
        described(
            "Model folder; repeatable, the first is the default.", "--model", "-m", metavar="DIR"
        ),
    ],
    host: str = option("127.0.0.1", "Address to bind; 0.0.0.0 accepts other machines."),
    port: int = option(8000, "0 picks a free port."),
    api_key: str | None = option(
        None, "API key that clients must send.", envvar=KEY, show_envvar=True
    ),
    cors: list[str] | None = option(None, "An allowed CORS origin."),
    slots: int = option(16, "Sequences decoded at the same time."),
    queue: int = count(256, "Requests that may queue; more are rejected with 429."),
    timeout: float = option(
        300, "Timeout of one request: 300, 90s, 5m.", parser=seconds, metavar="SECONDS"
    ),
    max_tokens: int = count(4096, "Maximum new tokens per request."),
    max_read_tokens: int = count(
        300_000, "Maximum tokens a model reads for one request: texts × labels."
    ),
    runs: Path | None = option(None, "Folder of runs for the studio to show.", metavar="DIR"),
    pairs: list[Path] | None = option(
        None, "Minimal pairs (BLiMP, Kontrast) for the studio; repeatable.", metavar="FILE"
    ),
    served_model_name: list[str] | None = option(
        None, "Name in the API instead of the folder's; repeatable: aliases, or one per model."
    ),
    log_level: str = option("info", "debug (with every request), info, warning or error."),
    access_log: bool = option(False, "Write a line for each request to stderr.", "--access-log"),
    open: bool = option(False, "Open the studio in a browser.", "--open"),
    device: opt.Device = None,
    dtype: opt.Dtype = None,
) -> None:
    """Serve models: OpenAI's API under /v1, the studio page at /.

    Example: malmoi serve --model runs/tiny-gpt --model runs/tiny-bert
    """
    options = dict(locals())
    import webbrowser

    load_torch()
    from malmoi.server.config import ServeConfig
    from malmoi.studio.serve import serve_models

    names = [name for name in ServeConfig.__dataclass_fields__ if name in options]
    repeated = {"cors": cors, "served_model_name": served_model_name, "pairs": pairs}
    lists = {name: tuple(given or ()) for name, given in repeated.items()}
    settings = ServeConfig(**{name: options[name] for name in names} | lists)
    logging.getLogger("malmoi").setLevel(log_level.upper())
    if access_log or log_level == "debug":
        _log_requests()
    show = webbrowser.open if open else lambda address: None
    serve_models(model, settings, device=device, dtype=dtype, on_ready=show)


def _log_requests() -> None:
    """Logs time, client, path, status, duration and request id of each request; never a body."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("malmoi.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
