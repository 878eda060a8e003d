"""``XpuFusedMoe`` where ``vllm_xpu_kernels.fused_moe_interface`` had it: the same constructor and
the same ``apply``, on a plan.

:func:`install` puts it where vLLM imports it from. ``workspace13`` and ``workspace2`` lend
``apply`` its scratch, whose size is known exactly; without them it allocates for the call.
``xpu_fused_moe`` is the older function with the same purpose, in all of its signatures. The
caller's tensors are never modified.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from . import _xpu_install
from ._fork import ForkLock
from ._xpu_formats import (
    FLAGS,
    TENSORS,
    Tensors,
    supports_format,
    weight_format,
    weights_of,
)
from ._xpu_function import xpu_fused_moe
from ._xpu_install import handshake, uninstall
from ._xpu_layer import (
    ACTIVATIONS,
    activation_name,
    describe,
    in_words_of_apply,
    in_words_of_constructor,
)
from .config import PlanOptions, StalePolicy, WorkspaceFormula, WorkspaceSize
from .errors import Error, InvalidArgument, StaleWeights, Unsupported
from .torch import FusedMoe

__all__ = [
    "ACTIVATIONS",
    "EngineXpuFusedMoe",
    "XpuFusedMoe",
    "handshake",
    "install",
    "shared_workspace",
    "supports_format",
    "uninstall",
    "weight_format",
    "xpu_fused_moe",
]

Tensor = torch.Tensor


class XpuFusedMoe:
    """One fused mixture-of-experts layer, built once from its weights.

    w13          [E, K, N] for f32, f16, bf16 and fp8, [E, N, K / 2] for 4 bits, with N = 2 * I
                 (I for relu2_no_mul), K = hidden_size, E = num_experts
    w2           [E, I, hidden_size], or [E, hidden_size, I / 2] for 4 bits
    w13_scales   None, or by :func:`weight_format`; w2_scales likewise:
                 fp8        [E], f32
                 fp8_block  [E, K / 128, N / 128], f32; gate and up start blocks of their own
                 mxfp8      [E, K / 32, N], uint8 or float8_e8m0fnu
                 mxfp4      [E, N, K / 32], the same
                 int4       [E, N, K / group], f32, f16 or bf16; zero points are 8
                 Quotients are rounded up: the last block or group may be partial
    w13_bias     [E, N] or None, f32, f16 or bf16; w2_bias [E, hidden_size] or None

    n_experts_per_token  top_k
    activation   one of ``ACTIVATIONS``, or an enumerator with such a value
    num_experts  local experts
    ep_rank, ep_size  without expert_map: experts lie in equal, contiguous ranges
    expert_map   int32 [global experts], local id or -1
    gemm1_clamp_limit  before silu and the gelus: gate = min(gate, limit), up = clamp(up, +-limit)
    activation_situ_beta, activation_situ_linear_beta  of situ; beta is required there

    Beyond the peers: ``dtype``, of hidden_states (None = that of the weights); ``on_stale``,
    "raise" (as None) or "refresh", when the weights have changed since they were read;
    ``options``, a PlanOptions whose device, expert_map and on_stale are set here. ``is_fp8`` and
    its like are taken from older callers; the dtypes say the same.

    The plan runs on the device of w13 and watches the tensors: see ``fusedmoe.torch.FusedMoe``.
    Any number of threads may build and apply, each call with its own workspace. Raises
    InvalidArgument (a ValueError) or Unsupported (a NotImplementedError) with the reason.
    """

    _on_stale: StalePolicy = "raise"

    def __init__(
        self,
        w13: Tensor,
        w13_scales: Tensor | None,
        w13_bias: Tensor | None,
        w2: Tensor,
        w2_scales: Tensor | None,
        w2_bias: Tensor | None,
        n_experts_per_token: int,
        activation: Any,
        num_experts: int,
        ep_rank: int = 0,
        ep_size: int = 1,
        expert_map: Any = None,
        gemm1_clamp_limit: float | None = None,
        activation_situ_beta: float | None = None,
        activation_situ_linear_beta: float | None = None,
        *older: Any,
        is_fp8: bool | None = None,
        is_int4: bool | None = None,
        is_mxfp4: bool | None = None,
        is_mxfp8: bool | None = None,
        is_block_fp8: bool | None = None,
        dtype: torch.dtype | None = None,
        on_stale: StalePolicy | None = None,
        options: PlanOptions | None = None,
    ) -> None:
        self._before_building()
        flags = {"is_fp8": is_fp8, "is_int4": is_int4, "is_mxfp4": is_mxfp4, "is_mxfp8": is_mxfp8,
                 "is_block_fp8": is_block_fp8}
        if isinstance(gemm1_clamp_limit, bool) or older:
            # Where the limits are now, five flags were, and in one version the limits after them.
            given = [gemm1_clamp_limit, activation_situ_beta, activation_situ_linear_beta, *older]
            if not all(isinstance(value, bool | None) for value in given[:5]) or len(given) > 8:
                raise TypeError(f"XpuFusedMoe: expected at most 15 positional arguments, got "
                                f"{12 + len(given)}; pass the last by name")
            flags.update(zip(FLAGS, given[:5]))
            rest = [*given[5:], None, None, None]
            gemm1_clamp_limit, activation_situ_beta, activation_situ_linear_beta = rest[:3]
        tensors = Tensors(w13, w13_scales, w13_bias, w2, w2_scales, w2_bias)
        options = dataclasses.replace(options or PlanOptions(),
                                      on_stale=on_stale or self._on_stale)
        marked = hasattr(w13, "xpu_fused_moe")  # may be int4_signed
        prints = _prints_of(tensors) if marked else ()  # before they are read
        try:
            layer = describe(tensors, n_experts_per_token, activation, num_experts, ep_rank,
                             ep_size, expert_map, gemm1_clamp_limit, activation_situ_beta,
                             activation_situ_linear_beta, flags, dtype, None, options)
            self.plan = FusedMoe.create(layer.config, layer.weights, layer.options)
        except Error as error:
            raise in_words_of_constructor(error) from None
        self._kind = layer.kind
        # The plan watches its tensors; those of int4_signed are converted copies of these.
        self._prints = prints if layer.kind.format == "int4_signed" else None
        self._read = _aliases_of(tensors) if self._prints is not None else []
        self._refreshes = options.on_stale == "refresh"
        self._flags = flags
        self.activation = activation_name(activation)
        self.n_experts_per_token = n_experts_per_token
        self.num_experts = num_experts
        self.ep_rank, self.ep_size = ep_rank, ep_size
        self.device = w13.device
        self._num_global = layer.config.num_experts
        self._expert_map = expert_map
        self._lock = ForkLock()  # refreshes: which tensors are held is what the plan has read
        self._tensors: Tensors | None = tensors

    def _before_building(self) -> None:
        pass

    # Read-only: tensors come in through refresh(), which reads them.

    @property
    def w13(self) -> Tensor | None:
        return None if self._tensors is None else self._tensors.w13

    @property
    def w2(self) -> Tensor | None:
        return None if self._tensors is None else self._tensors.w2

    @property
    def w13_scales(self) -> Tensor | None:
        return None if self._tensors is None else self._tensors.w13_scales

    @property
    def w2_scales(self) -> Tensor | None:
        return None if self._tensors is None else self._tensors.w2_scales

    @property
    def w13_bias(self) -> Tensor | None:
        return None if self._tensors is None else self._tensors.w13_bias

    @property
    def w2_bias(self) -> Tensor | None:
        return None if self._tensors is None else self._tensors.w2_bias

    @property
    def expert_map(self) -> Any:
        return self._expert_map

    # What the tensors are: see weight_format().

    @property
    def format(self) -> str:
        return self._kind.format

    @property
    def is_fp8(self) -> bool:
        return self.format == "fp8"

    @property
    def is_int4(self) -> bool:
        return self.format in ("int4", "int4_signed")

    @property
    def is_mxfp4(self) -> bool:
        return self.format == "mxfp4"

    @property
    def is_mxfp8(self) -> bool:
        return self.format == "mxfp8"

    @property
    def is_block_fp8(self) -> bool:
        return self.format == "fp8_block"

    # --- Calls ---

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        a1q_scale: Tensor | None = None,
        *,
        workspace13: Tensor | None = None,
        workspace2: Tensor | None = None,
    ) -> None:
        """output[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(hidden_states[t]).

        output         [num_tokens, hidden_size]; what it held does not matter
        hidden_states  [num_tokens, hidden_size]
        topk_weights   [num_tokens, top_k], f32, f16 or bf16
        topk_ids       [num_tokens, top_k], int32 or int64, global ids; -1 skips the slot, and a
                       row of -1 gives zeros
        expert_map     int32 or int64 [global experts], wins over the constructor's for this call
        workspace13, workspace2  contiguous tensors of any dtype on the same device: both, of
                       ``workspace_sizes(num_tokens)`` bytes, or either alone, of
                       ``workspace_size(num_tokens).bytes``. With less, down to the sizes for one
                       token, the tokens go in chunks, with the same bits. Empty counts as None;
                       with neither, the call allocates. Contents never matter.

        Raises InvalidArgument, WorkspaceTooSmall, Busy (another call uses the workspace) or
        StaleWeights; nothing has been written then. a1q_scale: None, or Unsupported.
        """
        if a1q_scale is not None:
            raise Unsupported("a1q_scale: expected None, got a tensor: activations that were "
                              "quantised before the call are not read; pass hidden_states in "
                              "f32, f16 or bf16")
        if workspace13 is not None and workspace13.numel() == 0:
            workspace13 = None
        if workspace2 is not None and workspace2.numel() == 0:
            workspace2 = None
        if expert_map is not None:
            expert_map = self._map_of_call(expert_map)
        if torch.compiler.is_compiling():
            self.plan.apply(output, hidden_states, topk_weights, topk_ids, workspace2,
                            workspace13=workspace13, expert_map=expert_map)
            return
        if self._prints is not None:
            self._follow()
        try:
            self.plan.apply(output, hidden_states, topk_weights, topk_ids, workspace2,
                            workspace13=workspace13, expert_map=expert_map)
        except Error as error:
            raise in_words_of_apply(error, workspace13, workspace2) from None

    def _follow(self) -> None:
        """What the plan's watch does, for tensors that it has read converted copies of."""
        tensors = self._tensors
        if tensors is None or _prints_of(tensors) == self._prints:
            return  # released: the plan says so
        if not self._refreshes:
            raise StaleWeights("weights: expected the tensors that the plan was made from, "
                               "unchanged, got others or changed ones; call refresh(), or build "
                               "it with on_stale='refresh'")
        self.refresh()

    def _map_of_call(self, expert_map: Tensor) -> Tensor:
        if expert_map.dtype == torch.int64:
            expert_map = expert_map.to(torch.int32)
        if expert_map.dtype != torch.int32 or expert_map.shape != (self._num_global,):
            raise InvalidArgument(
                f"expert_map: expected int32 [{self._num_global}], got "
                f"{str(expert_map.dtype).removeprefix('torch.')} {list(expert_map.shape)}; the "
                "constructor's expert_map or ep_size say how many experts there are")
        return expert_map

    # --- Workspace ---

    def workspace_size(self, num_tokens: int) -> WorkspaceSize:
        """Scratch for one call, as one tensor: exact, and never less for more tokens."""
        return self.plan.workspace_size(num_tokens)

    def workspace_sizes(self, num_tokens: int) -> tuple[int, int]:
        """Bytes of workspace13 and of workspace2, for callers that lend both."""
        first, second = self.plan.workspace_sizes_13_2(num_tokens)
        return first.bytes, second.bytes

    def min_workspace_size(self) -> WorkspaceSize:
        """Enough for any number of tokens, in chunks."""
        return self.plan.min_workspace_size()

    @property
    def workspace_formula(self) -> WorkspaceFormula:
        """workspace_size(n).bytes = fixed + per_token * n, for sizes that are symbols."""
        return self.plan.workspace_formula

    def workspace(self, num_tokens: int) -> Tensor:
        """A new workspace for that many tokens: see also :func:`shared_workspace`."""
        return torch.empty(self.workspace_size(num_tokens).bytes, dtype=torch.uint8,
                           device=self.device)

    # --- Weights ---

    def refresh(self, w13: Tensor | None = None, w13_scales: Tensor | None = None,
                w13_bias: Tensor | None = None, w2: Tensor | None = None,
                w2_scales: Tensor | None = None, w2_bias: Tensor | None = None) -> None:
        """Read the weights again, into the same memory: those given in place of the ones held, and
        the others as they are now. Needed after ``tensor.data.copy_()``, which PyTorch does not
        count, after a StaleWeights, and after :meth:`release_weights`, with all of them.

        Raises InvalidArgument for other shapes, formats or a missing tensor; nothing changes then.
        """
        given = {name: value for name, value in zip(
            TENSORS, (w13, w13_scales, w13_bias, w2, w2_scales, w2_bias)) if value is not None}
        with self._lock:
            held = vars(self._tensors) if self._tensors else dict.fromkeys(TENSORS)
            tensors = Tensors(**{**held, **given})
            if tensors.w13 is None or tensors.w2 is None:
                raise InvalidArgument("w13, w2: expected tensors after release_weights(), got "
                                      f"{', '.join(given) or 'none'}; pass all of the layer")
            format = weight_format(tensors.w13, tensors.w13_scales, **self._flags)
            if format != self.format:
                raise InvalidArgument(f"w13: expected weights in {self.format} as at the start, "
                                      f"got {format}; build another XpuFusedMoe for them")
            prints = _prints_of(tensors)
            try:
                self.plan.refresh(weights_of(tensors, self._kind))
            except Error as error:
                raise in_words_of_constructor(error) from None
            self._tensors = tensors
            if self._prints is not None:
                self._prints, self._read = prints, _aliases_of(tensors)

    def release_weights(self) -> None:
        """Give the memory of packed weights back and let go of the tensors (sleep). Until
        ``refresh(w13=..., w2=..., ...)``, calls raise StaleWeights."""
        with self._lock:
            self.plan.release_weights()
            self._tensors, self._read = None, []

    @property
    def weights_version(self) -> int:
        """Starts at 1 and counts successful refreshes."""
        return self.plan.weights_version

    # --- Telling ---

    def describe(self) -> str:
        """What runs and why, one line per stage."""
        return self.plan.describe()

    # --- Copies ---

    def __deepcopy__(self, memo: dict[int, Any]) -> "XpuFusedMoe":
        """A plan of the copied tensors: the copy of a model must not follow the original."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            other.__dict__[name] = (ForkLock() if name == "_lock" else [] if name == "_read"
                                    else copy.deepcopy(value, memo))
        if self._prints is not None and self._tensors is not None:
            fresh = _prints_of(self._tensors) == self._prints
            other._prints = _prints_of(other._tensors) if fresh else ()
            other._read = _aliases_of(other._tensors)
        return other


def _aliases_of(tensors: Tensors | None) -> list[Tensor]:
    """Held, so that nothing new can lie where what was read lies."""
    return [] if tensors is None else [tensors.w13.detach(), tensors.w2.detach()]


def _prints_of(tensors: Tensors | None) -> tuple[Any, ...]:
    """Where w13 and w2 lie, and PyTorch's counts of their changes."""
    if tensors is None:
        return ()
    return tuple((w.data_ptr(), None if w.is_inference() else w._version)
                 for w in (tensors.w13, tensors.w2))


def shared_workspace(layers: Iterable[XpuFusedMoe], num_tokens: int) -> Tensor:
    """One workspace that serves each of these layers at up to ``num_tokens`` tokens, one call at a
    time; a longer batch goes through it in chunks."""
    layers = list(layers)
    if not layers:
        raise InvalidArgument("layers: expected at least one, got none; pass the model's layers")
    size = max(layer.workspace_size(num_tokens).bytes for layer in layers)
    return torch.empty(size, dtype=torch.uint8, device=layers[0].device)


class EngineXpuFusedMoe(XpuFusedMoe):
    """What engines get: ``on_stale="refresh"``, since they change weights and call no refresh()."""

    _on_stale: StalePolicy = "refresh"

    def _before_building(self) -> None:
        _xpu_install.count_copies_of_reloads()


def install() -> list[str]:
    """Put ``XpuFusedMoe`` and ``xpu_fused_moe`` where engines import them from: into
    ``vllm_xpu_kernels.fused_moe_interface``, which is made where that package is not installed, and
    into vLLM's ``xpu_moe`` module where it has been imported already. Before or after vLLM is
    imported, in each process; again does nothing more. Returns the names of the modules.

    What is put there is EngineXpuFusedMoe. vLLM's reload_weights copies past PyTorch's counters:
    from the first object on it counts. Raises Unsupported with one line, before anything is
    replaced, when the parts of this installation or the installed vLLM's calls do not fit, or when
    there is an Intel GPU that this build cannot use.
    """
    return _xpu_install.install(EngineXpuFusedMoe, xpu_fused_moe)
