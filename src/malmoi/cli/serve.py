"""`malmoi serve`: models behind an OpenAI-compatible API, and the studio page."""

import logging
from typing import Annotated, Any

from malmoi.cli import shared as cli
from malmoi.pair import BERT, GPT
from malmoi.server.config import ServeConfig


def serve_command(
    model: Annotated[
        list[str] | None,
        cli.described(
            "Model folder; repeatable, the first is the default.",
            "--model",
            "-m",
            shown="malmoi-gpt and malmoi-bert",
            metavar="DIR",
        ),
    ] = None,
    settings: dict[str, Any] = cli.options_of(ServeConfig),
    access_log: bool = cli.option(
        False, "Write a line for each request to stderr.", "--access-log"
    ),
    open: bool = cli.option(False, "Open the studio in a browser.", "--open"),
    loading: dict[str, Any] = cli.LOADING,
) -> None:
    """Serve models: OpenAI's API under /v1, the studio page at /.

    Example: malmoi serve

    Example: malmoi serve --model runs/tiny-gpt --model runs/tiny-bert
    """
    import webbrowser

    config = ServeConfig(**settings)
    cli.load_torch()
    from malmoi.server.middleware import log_requests
    from malmoi.studio.serve import serve_models

    logging.getLogger("malmoi").setLevel(config.log_level.upper())
    if access_log or config.log_level == "debug":
        log_requests()
    show = webbrowser.open if open else lambda address: None
    serve_models(model or [GPT, BERT], config, **loading, on_ready=show)
