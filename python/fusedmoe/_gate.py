"""Which activation an experts module of transformers has: told by its values, since families override
their gate freely and give it no name. The plans are in transformers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .config import ActivationConfig
from .errors import Unsupported

REMEDY = "use experts_implementation='grouped_mm' for this model"

# The library's formulas: include/fusedmoe/config.h. g = gate, u = up.
_Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _formula(config: ActivationConfig, clamp_limit: float | None) -> _Formula:
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    alpha, limit = config.alpha, config.limit
    formulas: dict[str, _Formula] = {
        "silu": lambda g, u: silu(g) * u,
        "gelu": lambda g, u: gelu(g) * u,
        "gelu_tanh": lambda g, u: gelu(g, approximate="tanh") * u,
        "swigluoai": lambda g, u: ((u.clamp(-limit, limit) + 1) * g.clamp(max=limit)
                                   * torch.sigmoid(alpha * g.clamp(max=limit))),
        "swiglustep": lambda g, u: silu(g).clamp(max=limit) * u.clamp(-limit, limit),
        "relu2": lambda g, u: torch.relu(g).square(),
    }
    chosen = formulas[config.kind]
    if clamp_limit is None:
        return chosen
    return lambda g, u: chosen(g.clamp(max=clamp_limit), u.clamp(-clamp_limit, clamp_limit))


def _probe() -> tuple[torch.Tensor, torch.Tensor]:
    """256 gates and as many ups, f32: dense where activations bend, and out to 1e4, where only a
    clamp can."""
    near = torch.linspace(-6, 6, 128, device="cpu")
    far = torch.logspace(0.78, 4, 64, device="cpu")
    gate = torch.cat((near, far, -far))
    # 97 is coprime to 256: each gate meets an up from elsewhere, of any size and sign.
    return gate, gate[(torch.arange(256, device="cpu") * 97 + 31) % 256]


def _candidates(module: Any) -> Iterator[tuple[ActivationConfig, float | None]]:
    """Activation and clamp_limit, the plainest first."""
    if not module.has_gate:
        yield ActivationConfig(kind="relu2"), None
        return

    def numbers(*names: str) -> list[float]:
        found = (getattr(module, name, None) for name in names)
        return list(dict.fromkeys(float(x) for x in found if x is not None))

    limits = [x for x in numbers("limit", "swiglu_limit") if 0 < x < float("inf")]
    for clamp in (None, *limits):
        for kind in ("silu", "gelu", "gelu_tanh"):
            yield ActivationConfig(kind=kind), clamp
    for limit in (*limits, float("inf")):
        for alpha in dict.fromkeys((*numbers("alpha", "swiglu_alpha"), 1.702)):
            yield ActivationConfig(kind="swigluoai", alpha=alpha, limit=limit), None
        yield ActivationConfig(kind="swiglustep", limit=limit), None


def _equal(got: torch.Tensor, expected: torch.Tensor, up: torch.Tensor) -> bool:
    """But for rounding: 1e-5 of the value or, where act(g) has cancelled, of u. gelu and gelu_tanh
    differ by 5e-4 of u."""
    return bool(((got - expected).abs() <= 1e-5 * (expected.abs() + up.abs().clamp(min=1))).all())


@torch.no_grad()
def activation_of(module: Any) -> tuple[ActivationConfig, float | None]:
    """Activation and clamp_limit of an experts module, told by their values: families override
    ``_apply_gate`` freely and give it no name. Raises Unsupported for what matches none."""
    gate, up = _probe()
    name = type(module).__name__
    try:
        if not module.has_gate:
            got = module.act_fn(gate)
        elif module.is_concatenated:
            got = module._apply_gate(torch.cat((gate, up))[None])[0]
        else:
            got = module._apply_gate(torch.stack((gate, up), -1).reshape(1, -1))[0]
    except Exception as error:
        raise Unsupported(f"{name}: expected a gate that can be asked for 512 values, got "
                          f"{type(error).__name__}: {error}; {REMEDY}") from error
    for config, clamp in _candidates(module):
        expected = _formula(config, clamp)(gate, up)
        if got.shape == expected.shape and _equal(got.float(), expected, up):
            return config, clamp
    kinds = "silu, gelu, gelu_tanh, swigluoai or swiglustep" if module.has_gate else "relu2"
    raise Unsupported(f"{name}: expected a gate that computes {kinds}, got "
                      f"{_gate_name(module)}, which gives other values; {REMEDY}")


def _gate_name(module: Any) -> str:
    act = getattr(module, "act_fn", None)
    act_name = getattr(act, "__name__", type(act).__name__)
    return f"_apply_gate with {act_name}" if module.has_gate else act_name
