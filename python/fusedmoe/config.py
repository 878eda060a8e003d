"""What a layer is and how a plan runs it: the structs of the C++ headers as dataclasses.

Enumerators are strings, spelled as in C++. Values are checked by the library when they are used,
not here, so that both languages give the same message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Union

from ._core import ExpertMap, WeightsVersion

__all__ = [
    "ActivationConfig",
    "Counters",
    "ExpertWeights",
    "MoeConfig",
    "PlanOptions",
    "RoutingConfig",
    "Support",
    "TensorView",
    "WeightScales",
    "WeightTensor",
    "WorkspaceFormula",
    "WorkspaceSize",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ", "relu2"]
DType = Literal["f32", "f16", "bf16"]
WeightFormat = Literal["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4",
                       "int8", "int4", "q4_k", "q5_k", "q6_k"]
GateUpLayout = Literal["halves", "interleaved"]
WeightLayout = Literal["nk", "kn"]
ScaleLayout = Literal["none", "tensor", "channel", "group", "block"]
ScaleType = Literal["f32", "f16", "bf16", "e8m0", "e4m3"]
ScaleParts = Literal["one", "halves", "interleaved"]
StalePolicy = Literal["raise", "refresh"]
# A NumPy array, a torch tensor, anything with __dlpack__, or a TensorView.
Array = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """The function between the two projections, evaluated in fp32 (g = gate, u = up).

    ``silu``, ``gelu`` (erf) and ``gelu_tanh``: act(g) * u. ``swigluoai``: g' = min(g, limit),
    u' = clamp(u, -limit, limit), then (u' + 1) * g' * sigmoid(alpha * g'). ``swiglustep``:
    min(silu(g), limit) * clamp(u, -limit, limit). ``situ``: beta * tanh(g / beta) * sigmoid(g) *
    (linear_beta * tanh(u / linear_beta), or u). ``relu2``: max(x, 0)^2 without a gate.
    """

    kind: Activation = "silu"
    alpha: float = 1.702
    """swigluoai."""
    limit: float = 7.0
    """swigluoai and swiglustep; > 0, infinity is none."""
    beta: float = 0.0
    """situ: required there, finite and > 0."""
    linear_beta: float = 0.0
    """situ: 0 leaves u as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The logical layer. Sizes count elements; any positive value is legal."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    """Global, also under expert parallelism."""
    top_k: int
    """Experts per token, at most ``num_experts``."""
    activation: ActivationConfig | Activation = "silu"
    dtype: Any = "bf16"
    """Of hidden: f32, f16 or bf16, or torch's or NumPy's name of one of them."""
    output_dtype: Any = None
    """Of output; None = ``dtype``."""
    gate_up_layout: GateUpLayout = "halves"
    """How gate and up rows lie in w13; gpt-oss interleaves."""
    gate_up_order: Literal["gate_up", "up_gate"] = "gate_up"
    clamp_limit: float | None = None
    """Before silu and the gelus: g = min(g, limit), u = clamp(u, -limit, limit)."""
    apply_router_weight_on_input: bool = False
    """The router's weight multiplies gemm1's result instead of the expert's output (Llama 4)."""


@dataclasses.dataclass(frozen=True)
class TensorView:
    """An array whose elements are something that NumPy has no name for.

    ``TensorView(bits, "bf16")`` reads a uint16 array as bf16; ``"fp8_e4m3"``, ``"fp8_e5m2"`` and
    ``"e8m0"`` read uint8. Nothing is copied.
    """

    data: Array
    dtype: Literal["bf16", "f16", "fp8_e4m3", "fp8_e5m2", "e8m0"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightScales:
    """What the elements of a quantised tensor are multiplied by.

    ``data`` for E experts, N outputs and K inputs: ``tensor`` [E], ``channel`` [E, N], ``group``
    [E, N, ceil(K / group_size)], ``block`` [E, ceil(N / block_n), ceil(K / block_k)]. Dimensions of
    one may be there or not; a view of the last two transposed is read as what it is. Other shapes
    and dtypes are refused with the shape that is due.
    """

    data: Array = None
    layout: ScaleLayout = "none"
    """What one scale covers."""
    type: ScaleType | None = None
    """None = as the dtype of ``data`` says; uint8 is e8m0 for mxfp8 and mxfp4, e4m3 for nvfp4."""
    group_size: int = 0
    """Elements along K, for ``group``."""
    block_n: int = 0
    block_k: int = 0
    transposed: bool = False
    """Group and block: [E, along K, along N]."""
    parts: ScaleParts = "one"
    """Gate and up in one w13, quantised apart: ``tensor`` and ``global_scales`` are [E, 2], and
    ``block`` has ceil(N / 2 / block_n) rows for each."""
    zero_points: Array = None
    """int4: uint8, shape of the scales, one in a byte; None = 8. True states, for a source, that
    there are some."""
    global_scales: Array = None
    """nvfp4: f32 [E], or [E, 2] when there are two parts."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightTensor:
    """One stack of matrices: [experts, outputs, inputs] (nk) or [experts, inputs, outputs] (kn).

    ``data`` by format: f32, f16 and bf16 are themselves; fp8_e4m3, mxfp8 and fp8_e5m2 torch's
    float8_e4m3fn and float8_e5m2, or uint8; int8 is int8. mxfp4 and nvfp4 (float4_e2m1fn_x2 or
    uint8) and int4 (uint8) are [E, N, ceil(K / 2)], the even k in the low half. q4_k, q5_k and q6_k
    are uint8 [E, N, K / 256 * 144, 176 or 210], the blocks of GGUF. The last dimension of packed
    formats may be two, as [..., K / 32, 16]. bf16 and f16 may be uint16 of their bits.
    """

    data: Array = None
    format: WeightFormat | None = None
    """None = as the dtype of ``data`` says: f32, f16, bf16, fp8_e4m3 or fp8_e5m2."""
    layout: WeightLayout = "nk"
    """N = outputs, K = inputs; nk is checkpoint order."""
    shape: tuple[int, int, int] | None = None
    """Logical (experts, outputs, inputs); None = as the shape of ``data`` says. For tensors
    without data (sizes, sources), and for formats of 4 bits whose K is odd."""
    scales: WeightScales | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of all local experts, in order of their local id. Views: nothing is copied.

    Each tensor is an array in [E, N, K] order or a :class:`WeightTensor`. An array that is a
    transposed view is read as what it is. Arrays are kept alive by the plan that may read them
    again: one that borrows, or that refreshes by itself.
    """

    w13: Array | WeightTensor = None
    """[E, 2I, H], rows by ``gate_up_layout`` and ``gate_up_order`` ([E, I, H] without a gate)."""
    w2: Array | WeightTensor = None
    """[E, H, I]."""
    w13_up: Array | WeightTensor = None
    """[E, I, H], optional: then w13 is [E, I, H] with the gate rows alone."""
    w13_bias: Array = None
    """[E, 2I], order as the rows of w13; f32, f16 or bf16; optional."""
    w2_bias: Array = None
    """[E, H]; optional; under tensor parallelism for one rank only, or it is added by each."""
    source: Callable[[int], "ExpertWeights"] | None = None
    """Instead of stacks, one local expert at a time: called with its local id, in ascending
    order; the tensors above then state shapes without data. An exception of it passes through.
    A plan with on_stale="refresh" keeps it: a method of the plan's own owner keeps both alive."""
    version: WeightsVersion | None = None
    """A counter that the owner of the memory bumps after changing it."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanOptions:
    """How a plan runs a layer. The same object goes to create, supports and
    packed_weights_size."""

    device: str = "cpu"
    """"cpu", "cuda:1", "xpu:0"."""
    expert_map: Union[ExpertMap, Sequence[int], Array, None] = None
    """Which experts are local; None = all. A sequence or array maps global to local id or -1."""
    mode: Literal["a16", "a8"] = "a16"
    """``a16``: activations as they are. ``a8``: as int8, one scale per token, for int8 and int4 weights;
    less exact, see docs/formats.md. Refused, not replaced, where a machine or format lacks it."""
    batch_invariant: bool | None = None
    """A token's bits do not depend on what else is in the batch. None = the device's default."""
    isa: str = ""
    """The best instruction set to use, as ``info()`` prints it; empty = the machine's best."""
    max_threads: int = 0
    """CPU threads; 0 = the runner's, or the process's affinity mask and cgroup limit."""
    weight_storage: Literal["own", "borrowed", "caller", "adopt"] = "own"
    """``own``: packed into memory of the plan. ``borrowed``: read in place at every call.
    ``caller``: packed into ``storage``. ``adopt``: ``storage`` holds what an equal plan packed."""
    storage: Array = None
    """A writable contiguous array or tensor of ``packed_weights_size().bytes``, for ``caller`` and
    ``adopt``; its dtype does not matter."""
    on_stale: StalePolicy = "raise"
    """What apply does when the weights have changed since the plan read them."""
    counters: bool = False
    """Count calls, and tokens per local expert: see ``FusedMoe.counters()``."""
    runner: int = 0
    """Address of a C++ ThreadRunner (``fusedmoe.torch.thread_runner()``): an engine's own threads.
    The plan then starts none. 0 = the library's own."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RoutingConfig:
    """From router logits to experts. See routing.h for the values of each family of models."""

    top_k: int
    score_function: Literal["softmax", "softmax_of_chosen", "sigmoid", "softplus_sqrt"] | None = None
    """``route()`` needs it; the other functions imply it."""
    selection_bias: Array = None
    """[num_experts], f32, f16 or bf16: added to the scores while choosing, never in a weight."""
    renormalise: Literal["none", "sum", "sum_epsilon", "max_sum_epsilon"] = "none"
    epsilon: float = 1e-20
    num_groups: int = 1
    topk_group: int = 1
    group_score: Literal["sum_of_two_best", "best"] = "sum_of_two_best"
    scaling_factor: float = 1.0
    """Multiplies the weights, last."""


class Support(NamedTuple):
    """Whether ``create`` would accept a layer, and if not, why."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class WorkspaceSize(NamedTuple):
    """``bytes`` of scratch, the first at a multiple of ``alignment``."""

    bytes: int
    alignment: int


class WorkspaceFormula(NamedTuple):
    """bytes(n) = fixed + per_token * n, exactly; for sizes that are symbols."""

    fixed: int
    per_token: int
    alignment: int


class Counters(NamedTuple):
    """Since the plan was built or ``reset_counters()`` was called."""

    calls: int
    tokens: int
    rows_per_expert: list[int]
