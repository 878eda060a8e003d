"""Run by test_xpu_vllm.py in a process of its own: tiny checkpoints through vllm.LLM on the CPU,
with vLLM's own experts, with its XPUExperts on XpuFusedMoe, and with FusedMoeXpuExperts. Prints one JSON
object: mode -> tokens, and those after a reload.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

PROMPTS = [[1, 5, 9, 200, 17, 33], [1, 77, 3], list(range(3, 60))]


def write_checkpoint(folder: pathlib.Path, seed: int) -> str:
    import torch
    import transformers
    config = transformers.Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, intermediate_size=96, head_dim=32,
        decoder_sparse_step=1, norm_topk_prob=True, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # large enough for the choice of experts to matter
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.5)
                            + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    return str(folder)


def main(folder: pathlib.Path, compiled: bool) -> None:
    import torch
    first, second = (write_checkpoint(folder / str(seed), seed) for seed in (0, 1))
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe.experts import xpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    import fusedmoe.xpu
    import fusedmoe.xpu_vllm

    torch.set_num_threads(1)
    library = torch.library.Library("_xpu_C", "FRAGMENT")  # what an Intel GPU's driver would say
    for name in ("is_xe2_arch", "is_xe3_arch"):
        library.define(f"{name}() -> bool")
        library.impl(name, lambda: True, "CompositeExplicitAutograd")
    backends = oracle._get_priority_backends

    def tokens_of(llm: LLM) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = llm.generate([dict(prompt_token_ids=p) for p in PROMPTS], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def experts(model: torch.nn.Module) -> list[str]:
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        return sorted({type(method.moe_kernel.fused_experts).__name__ for method in methods
                       if getattr(method, "moe_kernel", None) is not None})

    results = {}
    modes = ["in-tree", "in-tree on the second"] + ([] if compiled else ["unchanged"]) + ["ours"]
    for mode in modes:
        if not mode.startswith("in-tree"):  # the branch that vLLM takes on the XPU platform
            oracle._get_priority_backends = lambda config: [oracle.UnquantizedMoeBackend.XPU]
        if mode == "unchanged":
            fusedmoe.xpu.install()
            xpu_moe.XPUExperts._supports_current_device = staticmethod(lambda: True)
        if mode == "ours":
            fusedmoe.xpu_vllm.install()
        llm = LLM(second if mode.endswith("second") else first, dtype="bfloat16", max_model_len=128,
                  enforce_eager=not compiled, max_num_seqs=4, skip_tokenizer_init=True,
                  async_scheduling=False)
        results[mode] = {"experts": llm.apply_model(experts)[0], "tokens": tokens_of(llm)}
        if not mode.startswith("in-tree"):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
            results[mode]["reloaded"] = tokens_of(llm)
            fusedmoe.xpu.uninstall()
        oracle._get_priority_backends = backends
        del llm
        cleanup_dist_env_and_memory()
    print(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), "compile" in sys.argv[2:])
