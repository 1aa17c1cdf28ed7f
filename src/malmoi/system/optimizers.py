"""torch's optimizers without its compiler, which takes two to six seconds to load."""

from inspect import unwrap
from typing import TypeVar

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def lean(kind: type[Kind]) -> type[Kind]:
    """An optimizer that does not load torch's compiler.

    torch loads it with an optimizer's first call and first step, to keep them out of compiled code;
    no optimizer is compiled here.
    """
    optimizer = torch.optim.Optimizer
    for method in (optimizer.add_param_group, optimizer.zero_grad, optimizer.load_state_dict):
        plain = unwrap(method)
        if not hasattr(plain, "__dynamo_disable"):
            setattr(plain, "__dynamo_disable", plain)  # torch's name
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(unwrap(kind.step))})
