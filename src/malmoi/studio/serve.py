"""Models behind an OpenAI-compatible API and the studio page, until the server is stopped."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from malmoi.inference import Model
from malmoi.messages import msg
from malmoi.server.config import ServeConfig

logger = logging.getLogger(__name__)


def serve_models(
    models: Sequence[Model | str | Path],
    settings: ServeConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    on_ready: Callable[[str], object] = lambda address: None,
) -> None:
    """Listens, loads the models and answers; `on_ready` gets the server's address."""
    from malmoi.server.app import Server, address, listen
    from malmoi.server.model_registry import ModelRegistry
    from malmoi.studio.app import create_studio
    from malmoi.studio.pair_view import pair_examples

    for file in settings.pairs:
        pair_examples(file)  # report a bad file now, not in the studio
    with listen(settings) as where:
        registry = ModelRegistry.open(models, settings, device=device, dtype=dtype)
        for note in registry.notes:
            logger.warning(note)
        if not settings.local and settings.api_key is None:
            logger.warning(
                "Other machines can reach this server, and no API key is set: anyone there may use "
                "it."
            )
        for one in registry:
            if one.engine is not None:
                slots = one.engine.batch.slots
                logger.info(
                    msg(
                        "{name}: at most {max_bytes:,.0f} MiB of KV cache for {slots} "
                        "sequences of {capacity:,} tokens (--slots)",
                        name=one.name,
                        max_bytes=slots.max_bytes / 2**20,
                        slots=settings.slots,
                        capacity=slots.capacity,
                    )
                )
        names = ", ".join(registry.names)
        logger.info(
            msg(
                "{names} at {address} (the studio) and {address}/v1 (the API)",
                names=names,
                address=address(where),
            )
        )
        on_ready(address(where))
        Server(create_studio(registry, settings), settings).run(sockets=[where])
