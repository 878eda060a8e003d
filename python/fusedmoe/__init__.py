"""fusedmoe: one fused mixture-of-experts (MoE) layer as a plan.

A plan (:class:`FusedMoe`) is built once from fixed expert weights and applied many times to
whatever tokens arrive, in scratch memory that the caller owns and that all layers of a model share.

Submodules, imported where they are needed: ``fusedmoe.torch`` (an operator for torch.compile, and
plans that watch their tensors), ``fusedmoe.transformers`` (``experts_implementation="fusedmoe"``),
``fusedmoe.xpu`` (``XpuFusedMoe``, the interface of vllm-xpu-kernels).
"""

from __future__ import annotations

from typing import Any

from . import errors
from ._core import (
    Checkpoint,
    CheckpointLayer,
    CheckpointWeights,
    ExpertMap,
    FusedMoe,
    WeightsVersion,
    WorkspaceBuffer,
    WorkspacePool,
    __version__,
    grouped_topk,
    list_devices,
    load_checkpoint,
    route,
    topk_sigmoid,
    topk_softmax,
    topk_softplus_sqrt,
)
from ._quantize import dequantize, quantize
from .config import (
    ActivationConfig,
    Counters,
    ExpertWeights,
    MoeConfig,
    PlanOptions,
    RoutingConfig,
    Support,
    TensorView,
    WeightScales,
    WeightTensor,
    WorkspaceFormula,
    WorkspaceSize,
)
from .errors import Error

supports = FusedMoe.supports

__all__ = [
    "ActivationConfig",
    "Checkpoint",
    "CheckpointLayer",
    "CheckpointWeights",
    "Counters",
    "Error",
    "ExpertMap",
    "ExpertWeights",
    "FusedMoe",
    "MoeConfig",
    "PlanOptions",
    "RoutingConfig",
    "Support",
    "TensorView",
    "WeightScales",
    "WeightTensor",
    "WeightsVersion",
    "WorkspaceBuffer",
    "WorkspaceFormula",
    "WorkspacePool",
    "WorkspaceSize",
    "__version__",
    "dequantize",
    "errors",
    "grouped_topk",
    "info",
    "list_devices",
    "load_checkpoint",
    "quantize",
    "route",
    "supports",
    "topk_sigmoid",
    "topk_softmax",
    "topk_softplus_sqrt",
]


def info() -> dict[str, Any]:
    """What this installation is: version, devices and why one is missing, and which operator
    torch calls (which imports torch, where it is installed)."""
    try:
        from . import torch as binding
    except (ImportError, OSError, RuntimeError) as error:
        operator = f"none: {error}"
    else:
        operator = binding.OPERATOR
    return {"version": __version__, "devices": list_devices(), "torch_operator": operator}
