"""Networks that are about to be filled, or only measured: built without drawing weights that
nobody reads.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _SkipInit(TorchFunctionMode):
    """Leaves out every call of torch.nn.init.

    On the meta device there is nothing to draw into, yet torch would go through its Python
    reference of each distribution, whose first use imports the compiler: 2 s of every start.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def without_weights() -> Iterator[None]:
    """What is built in here has shapes and no weights: modules are on the meta device, and not
    initialised.
    """
    with torch.device("meta"), _SkipInit():
        yield
