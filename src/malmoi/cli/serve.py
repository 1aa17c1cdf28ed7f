"""`malmoi serve`: models behind an OpenAI-compatible API, and the studio page."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from malmoi.cli.options import DeviceOption, DtypeOption, load_torch

KEY = "MALMOI_API_KEY"


def serve_command(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            "-m",
            help="Model folder; repeatable, the first is the default.",
            metavar="DIR",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to bind; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=KEY, show_envvar=True, help="API key that clients must send."),
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An allowed CORS origin.")] = None,
    slots: Annotated[int, typer.Option(help="Sequences decoded at the same time.")] = 16,
    queue: Annotated[
        int, typer.Option(help="Requests that may queue; more are rejected with 429.")
    ] = 256,
    timeout: Annotated[float, typer.Option(help="Timeout of one request, in seconds.")] = 300,
    max_tokens: Annotated[int, typer.Option(help="Maximum new tokens per request.")] = 4096,
    max_read_tokens: Annotated[
        int,
        typer.Option(help="Maximum tokens a model reads for one request: texts × labels."),
    ] = 300_000,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of runs for the studio to show.", metavar="DIR")
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Write a line for each request to stderr.")
    ] = False,
    open: Annotated[bool, typer.Option("--open", help="Show the studio in a browser.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Serve models: OpenAI's API under /v1, the studio page at /.

    Example: malmoi serve --model runs/tiny-gpt --model runs/tiny-bert
    """
    import webbrowser

    load_torch()
    from malmoi.server.config import ServeConfig
    from malmoi.server.serve import serve_models

    settings = ServeConfig(
        host=host,
        port=port,
        api_key=api_key,
        cors=tuple(cors or ()),
        slots=slots,
        queue=queue,
        timeout=timeout,
        max_tokens=max_tokens,
        max_read_tokens=max_read_tokens,
        runs=runs,
    )
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
