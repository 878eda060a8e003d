"""What a call costs from Python besides the work: each way to call, on no tokens (nothing to compute)
and on one token of a tiny layer that stays in the caches.

    python bench/python/overhead.py [--json]

Times are the least of 30 batches, taken in turns, so that a disturbance hits all ways alike; the
line "a call of an empty Python function" is subtracted from the others.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import fusedmoe
from fusedmoe import ExpertWeights, MoeConfig, PlanOptions
from fusedmoe.torch import OPERATOR, FusedMoe


def layer(experts: int = 8, hidden: int = 256, intermediate: int = 128, top_k: int = 2):
    config = MoeConfig(hidden_size=hidden, intermediate_size=intermediate, num_experts=experts,
                       top_k=top_k)
    weights = ExpertWeights(w13=torch.randn(experts, 2 * intermediate, hidden).bfloat16(),
                            w2=torch.randn(experts, hidden, intermediate).bfloat16())
    return config, weights


def ways(tokens: int):
    config, weights = layer()
    biased = ExpertWeights(w13=weights.w13, w2=weights.w2, w13_bias=torch.zeros(8, 256),
                           w2_bias=torch.zeros(8, 256))
    watched = FusedMoe.create(config, weights)
    four = FusedMoe.create(config, biased)
    unwatched = FusedMoe.create(config, weights, watch=False)
    plain = fusedmoe.FusedMoe.create(config, weights, PlanOptions(max_threads=1))
    hidden = torch.randn(tokens, 256).bfloat16()
    output = torch.empty_like(hidden)
    router = torch.rand(tokens, 2)
    ids = torch.randint(0, 8, (tokens, 2), dtype=torch.int32)
    workspace = watched.workspace(max(tokens, 1))
    buffer = fusedmoe.WorkspaceBuffer(plain.workspace_size(max(tokens, 1)))
    arrays = [fusedmoe.TensorView(t.view(torch.uint16).numpy(), "bf16") for t in (output, hidden)]
    arrays += [router.numpy(), ids.numpy()]
    tensors = [weights.w13, weights.w2]
    op = torch.ops.fusedmoe.apply.default
    op_weights = torch.ops.fusedmoe.apply_weights.default
    call = (output, hidden, router, ids)
    return [
        ("a call of an empty Python function", lambda: None),
        ("torch.empty_like", lambda: torch.empty_like(hidden)),
        ("operator, nothing watched", lambda: op(*call, workspace, unwatched.handle)),
        ("operator, 2 tensors watched", lambda: op(*call, workspace, watched.handle)),
        ("operator, 4 tensors watched", lambda: op(*call, workspace, four.handle)),
        ("operator, 2 weights passed", lambda: op_weights(*call, workspace, tensors,
                                                          watched.handle)),
        ("fusedmoe.torch.FusedMoe.apply", lambda: watched.apply(*call, workspace)),
        ("fusedmoe.FusedMoe.apply, tensors", lambda: plain.apply(*call, buffer)),
        ("fusedmoe.FusedMoe.apply, NumPy", lambda: plain.apply(*arrays, buffer)),
    ]


def measure(functions, batches: int, calls: int) -> list[float]:
    best = [float("inf")] * len(functions)
    for _ in range(batches):
        for i, (_, function) in enumerate(functions):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / calls)
    return [1e6 * (value - best[0]) if i else 1e6 * value for i, value in enumerate(best)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--calls", type=int, default=1000, help="in a batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = {}
    for tokens in (0, 1):
        functions = ways(tokens)  # weights made here have versions, as those of a model
        with torch.no_grad():
            columns[tokens] = measure(functions, arguments.batches, arguments.calls)
    if not arguments.json:
        print(f"torch {torch.__version__}, operators: {OPERATOR}; microseconds per call")
        print(f"{'':40} {'0 tokens':>9} {'1 token':>9}")
    for i, (name, _) in enumerate(functions):
        if arguments.json:
            print(json.dumps({"way": name, "us_0_tokens": round(columns[0][i], 3),
                              "us_1_token": round(columns[1][i], 3), "operators": OPERATOR}))
        else:
            print(f"{name:40} {columns[0][i]:9.2f} {columns[1][i]:9.2f}")


if __name__ == "__main__":
    main()
