"""Open folders in vLLM: what its config check says of their heads, and what its engine computes."""

import json
import os
import sys
from pathlib import Path

import numpy as np

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
import vllm
from vllm.config import ModelConfig, ParallelConfig


def heads_of(folder, sizes):
    """Return the K/V heads in all, and on each device by the number of devices; None where vLLM refuses it."""
    config = ModelConfig(model=folder, tokenizer=folder, dtype="float32")
    per_device = {}
    for size in sizes:
        parallel = ParallelConfig()
        parallel.tensor_parallel_size = size
        try:
            config.verify_with_parallel_config(parallel)
        except ValueError:
            per_device[size] = None
        else:
            per_device[size] = config.get_num_kv_heads(parallel)
    return {"total": config.get_total_num_kv_heads(), "per_device": per_device, "head_size": config.get_head_size()}


def main() -> None:
    here = Path(sys.argv[1])
    request = json.loads((here / "request.json").read_text())
    os.environ.update(request.get("variables", {}))  # vLLM reads its variables when it uses them
    answer = {"version": vllm.__version__, "heads": {}, "greedy": {}}
    arrays = {}
    for name, folder in request["folders"].items():
        answer["heads"][name] = heads_of(folder, request["sizes"])
    for name in request["run"]:
        llm = vllm.LLM(
            model=request["folders"][name], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=1,
            max_logprobs=-1, enable_prefix_caching=False, seed=0, model_impl=request.get("impl", {}).get(name, "auto"),
        )  # fmt: skip
        parameters = vllm.SamplingParams(
            temperature=0, max_tokens=request["n_new"], min_tokens=request["n_new"], ignore_eos=True, logprobs=-1,
            detokenize=False,
        )  # fmt: skip
        (result,) = llm.generate([{"prompt_token_ids": request["prompt"]}], parameters, use_tqdm=False)
        said = result.outputs[0]
        answer["greedy"][name] = list(said.token_ids)
        rows = [[row[i].logprob for i in range(len(row))] for row in said.logprobs]
        arrays[name] = np.array(rows)
        del llm
    (here / "answer.json").write_text(json.dumps(answer))
    np.savez(here / "answer.npz", **arrays)


if __name__ == "__main__":
    main()
