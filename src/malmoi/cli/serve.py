"""`malmoi serve`: models behind an OpenAI-compatible API, and the studio page."""

import logging
from pathlib import Path
from typing import Annotated

from malmoi.cli import options as opt
from malmoi.cli.inputs import load_torch
from malmoi.cli.options import option

KEY = "MALMOI_API_KEY"


def serve_command(
    model: Annotated[
        list[str],
        option(
            "Model folder; repeatable, the first is the default.", "--model", "-m", metavar="DIR"
        ),
    ],
    host: Annotated[str, option("Address to bind; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, option("0 picks a free port.")] = 8000,
    api_key: Annotated[
        str | None, option("API key that clients must send.", envvar=KEY, show_envvar=True)
    ] = None,
    cors: Annotated[list[str] | None, option("An allowed CORS origin.")] = None,
    slots: Annotated[int, option("Sequences decoded at the same time.")] = 16,
    queue: Annotated[int, option("Requests that may queue; more are rejected with 429.")] = 256,
    timeout: Annotated[float, option("Timeout of one request, in seconds.")] = 300,
    max_tokens: Annotated[int, option("Maximum new tokens per request.")] = 4096,
    max_read_tokens: Annotated[
        int, option("Maximum tokens a model reads for one request: texts × labels.")
    ] = 300_000,
    runs: Annotated[
        Path | None, option("Folder of runs for the studio to show.", metavar="DIR")
    ] = None,
    access_log: Annotated[
        bool, option("Write a line for each request to stderr.", "--access-log")
    ] = False,
    open: Annotated[bool, option("Show the studio in a browser.", "--open")] = False,
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
    from malmoi.server.serve import serve_models

    names = [name for name in ServeConfig.__dataclass_fields__ if name in options]
    settings = ServeConfig(**{name: options[name] for name in names} | {"cors": tuple(cors or ())})
    if access_log:
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
