"""vLLM's ``XPUExperts`` and its classes for quantised weights, on plans that are built when the
weights are there and run in vLLM's own workspace. Importing this module needs vLLM, and raises
Unsupported with one line where the installed one calls experts in another way than these take it.

:func:`install` puts the classes where vLLM looks for its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import xpu_moe
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms import current_platform

from . import _core, _xpu_install, xpu
from ._fork import ForkLock
from .errors import InvalidArgument, Unsupported
from .torch import translate

__all__ = ["FusedMoeXpuExperts", "FusedMoeXpuExpertsBlockFp8", "FusedMoeXpuExpertsFp8",
           "FusedMoeXpuExpertsMxFp4", "FusedMoeXpuExpertsMxFp8", "FusedMoeXpuExpertsWNA16",
           "install", "uninstall"]

Tensor = torch.Tensor

# vLLM's schemes of weights that its classes take, and what each is here.
_SCHEMES = {
    None: "bf16",
    quant_utils.kFp8StaticTensorSym: "fp8",
    quant_utils.kFp8Static128BlockSym: "fp8_block",
    quant_utils.kMxfp8Static: "mxfp8",
    quant_utils.kMxfp4Static: "mxfp4",
    quant_utils.kInt4Static: "int4",
    quant_utils.kInt4Static32: "int4",
}
_XPU_EXPERTS: Any = xpu_moe.XPUExperts


class FusedMoeXpuExperts(_XPU_EXPERTS):  # type: ignore[misc]
    """XPUExperts with a plan from ``process_weights_after_loading`` on, with real workspace sizes,
    and without staleness: weights that vLLM changes are read again, into the same memory.

    Runs on every device that has a backend, and under torch.compile. Methods of vLLM that do not
    call ``process_weights_after_loading``, as that of fp8, get their plan at the first call.
    """

    _peer: Any = _XPU_EXPERTS  # whose schemes of quantisation these are

    def __init__(self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None,
                 num_dispatchers: int | None = None) -> None:
        # Not XPUExperts': it asks for an architecture. Ours is asked for by the plan's device.
        super(_XPU_EXPERTS, self).__init__(moe_config, quant_config, max_num_tokens,
                                           num_dispatchers)
        self.gemm1_clamp_limit = self.activation_config.clamp_limit
        self.fused_moe_impl: xpu.XpuFusedMoe | None = None
        self._lock = ForkLock()  # building
        self._built_in_call = False
        self._expects_unquantized_inputs = True

    # --- What it does ---

    @staticmethod
    def _supports_current_device() -> bool:
        device = current_platform.device_type
        return any(one["available"] for one in _core.list_devices() if one["name"] == device)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return _XPU_EXPERTS._supports_activation(activation) or activation in (
            MoEActivation.SITU, MoEActivation.SWIGLUSTEP)

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return (cls._peer._supports_quant_scheme(weight_key, activation_key)
                and weight_key in _SCHEMES
                and bool(xpu.supports_format(_SCHEMES[weight_key],
                                             current_platform.device_type)))

    # --- Sizes ---

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
                         ) -> tuple[int, int, int, int, int]:
        """E, M, N, K, top_k. N comes from the config: w1 may be [E, K, N]. vLLM asks before it asks
        for workspaces."""
        if self.fused_moe_impl is None:
            self._build_in_call(w1, w2)
        n = self.moe_config.w13_num_shards * self.moe_config.intermediate_size_per_partition
        return w1.shape[0], a1.size(0), n, a1.size(-1), topk_ids.size(1)

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, global_num_experts: int,
                         local_num_experts: int, expert_tokens_meta: Any,
                         activation: MoEActivation
                         ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """In elements of the activations' dtype. All scratch is in workspace2, since vLLM may place
        the output at the start of workspace13. M may be a symbol."""
        formula = self._plan().workspace_formula
        element = self.workspace_dtype(self.moe_config.in_dtype).itemsize
        return (0,), ((formula.fixed + formula.per_token * M + element - 1) // element,), (M, K)

    # --- Weights ---

    def _plan(self) -> xpu.XpuFusedMoe:
        if self.fused_moe_impl is None:
            raise InvalidArgument("weights: expected a layer that has been loaded, got one before "
                                  "process_weights_after_loading(); load the model first")
        return self.fused_moe_impl

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build from the layer's parameters, which are as vLLM's kernels want them by now. Later
        changes are seen by the plan itself, vLLM's reload included."""
        if self.fused_moe_impl is not None:
            self.fused_moe_impl.refresh(
                w13=layer.w13_weight, w13_scales=self.w1_scale, w13_bias=self.w1_bias,
                w2=layer.w2_weight, w2_scales=self.w2_scale, w2_bias=self.w2_bias)
            return
        self.fused_moe_impl = self._build(layer.w13_weight, layer.w2_weight,
                                          getattr(layer, "expert_map", None))

    def _build_in_call(self, w1: Tensor, w2: Tensor) -> None:
        if torch.compiler.is_compiling():
            self._plan()  # raises: a plan cannot be built while a call is being traced
        config = self.moe_config
        expert_map = None
        if config.ep_size > 1:  # of the right numbers; the map itself comes with each call
            local, total = w1.shape[0], config.num_experts
            expert_map = torch.tensor([*range(local), *[-1] * (total - local)], dtype=torch.int32)
        with self._lock:
            if self.fused_moe_impl is None:
                self._built_in_call = True
                self.fused_moe_impl = self._build(w1, w2, expert_map)

    def _build(self, w1: Tensor, w2: Tensor, expert_map: Tensor | None) -> xpu.XpuFusedMoe:
        self._refuse_other_constants()
        config, activation = self.moe_config, self.activation_config
        mxfp4 = self.quant_config is not None and self.quant_config.weight_quant_dtype == "mxfp4"
        return xpu.EngineXpuFusedMoe(
            w13=w1, w13_scales=self.w1_scale, w13_bias=self.w1_bias,
            w2=w2, w2_scales=self.w2_scale, w2_bias=self.w2_bias,
            n_experts_per_token=config.experts_per_token, activation=config.activation.value,
            num_experts=w1.shape[0], ep_rank=config.ep_rank, ep_size=config.ep_size,
            expert_map=expert_map, gemm1_clamp_limit=self.gemm1_clamp_limit,
            activation_situ_beta=activation.activation_situ_beta,
            activation_situ_linear_beta=activation.activation_situ_linear_beta,
            is_mxfp4=mxfp4 and w1.dtype == torch.uint8 or None, dtype=config.in_dtype)

    def _refuse_other_constants(self) -> None:
        """swigluoai is one function here; a model that says otherwise must not run as it."""
        quant = self.quant_config
        if self.moe_config.activation != MoEActivation.SWIGLUOAI:
            return
        for name, expected in (("gemm1_alpha", 1.702), ("gemm1_beta", 1.0)):
            got = getattr(quant, name, None)
            if got is not None and abs(got - expected) > 1e-6:
                raise Unsupported(f"{name}: expected {expected} for swigluoai, got {got}; other "
                                  "constants are not built")

    # --- Calls ---

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor | None,
        workspace2: Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        plan = self._plan()
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)  # hidden_states carry them already
        own_map = not self._built_in_call and not self.moe_config.moe_parallel_config.enable_eplb
        if a1q_scale is not None or not own_map:
            # EPLB changes the map between steps: this call's counts.
            plan.apply(output, hidden_states, topk_weights, topk_ids, expert_map, a1q_scale,
                       workspace2=workspace2)
            return
        # With the tensors that vLLM holds: others than those that the plan has read are read first,
        # so that not even a compiled graph from another process can pair them with a wrong plan.
        beside = self.w1_bias, self.w2_bias, self.w1_scale, self.w2_scale
        weights = [w1, w2, *(tensor for tensor in beside if tensor is not None)]
        arguments = (output, hidden_states, topk_weights, topk_ids, workspace2, weights,
                     plan.plan.handle)
        if torch.compiler.is_compiling():
            torch.ops.fusedmoe.apply_weights(*arguments)
            return
        try:
            torch.ops.fusedmoe.apply_weights(*arguments)
        except RuntimeError as error:
            raise translate(error) from None


class FusedMoeXpuExpertsFp8(FusedMoeXpuExperts):
    """fp8 weights with a scale per expert."""

    _peer = xpu_moe.XPUExpertsFp8


class FusedMoeXpuExpertsBlockFp8(FusedMoeXpuExperts):
    """fp8 weights in blocks of 128 x 128."""

    _peer = xpu_moe.XPUExpertsBlockFp8


class FusedMoeXpuExpertsMxFp8(FusedMoeXpuExperts):
    """mxfp8 weights."""

    _peer = xpu_moe.XPUExpertsMxFp8


class FusedMoeXpuExpertsMxFp4(FusedMoeXpuExperts):
    """mxfp4 weights, as the checkpoint has them."""

    _peer = xpu_moe.XPUExpertsMxFp4


class FusedMoeXpuExpertsWNA16(FusedMoeXpuExperts):
    """int4 weights in groups, zero points 8."""

    _peer = xpu_moe.XPUExpertsWNA16


# What takes the place of each of vLLM's classes.
_CLASSES = (FusedMoeXpuExperts, FusedMoeXpuExpertsFp8, FusedMoeXpuExpertsBlockFp8,
            FusedMoeXpuExpertsMxFp8, FusedMoeXpuExpertsMxFp4, FusedMoeXpuExpertsWNA16)
_NAMES = {cls: cls._peer.__name__ for cls in _CLASSES}


def _check() -> None:
    """The signatures that vLLM calls, against those above."""
    _xpu_install.handshake()
    base = modular_kernel.FusedMoEExpertsModular
    for name in ("__init__", "moe_problem_size", "workspace_shapes", "apply"):
        theirs = list(inspect.signature(getattr(base, name)).parameters)
        ours = list(inspect.signature(getattr(FusedMoeXpuExperts, name)).parameters)
        if theirs != ours:
            changed = sorted(set(theirs) ^ set(ours)) or ["their order"]
            raise Unsupported(f"vllm {vllm.__version__}: expected "
                              f"FusedMoEExpertsModular.{name}({', '.join(ours)}), got other "
                              f"arguments: {', '.join(changed)}; use a fusedmoe that knows this "
                              "vLLM")


_check()


def install() -> list[str]:
    """``fusedmoe.xpu.install()``, and these classes in place of vLLM's: layers on the XPU platform
    are then built with them. In each process, before the model is built. Returns what was replaced;
    raises as ``fusedmoe.xpu.install``."""
    where = xpu.install()
    for cls in _CLASSES:
        name = _NAMES[cls]
        _xpu_install.replace(xpu_moe, name, cls)
        where.append(f"{xpu_moe.__name__}.{name}")
    return where


uninstall = xpu.uninstall
