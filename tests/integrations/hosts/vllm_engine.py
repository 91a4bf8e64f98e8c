"""One data-parallel rank of vLLM's engine, in this process.

``python -m tests.integrations.hosts.vllm_engine MODEL OUT`` writes tokens, log-probabilities and what ``prepare`` moved
as JSON. The environment has the rank and ``MOE_COMM_VLLM``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPTS = [[3, 7, 11, 13], [30, 70, 110, 130, 5, 6], [1, 2]]
LENGTHS = 8, 4
"""New tokens on rank 0 and on rank 1, which takes part without a request when it has finished."""


def prompts_of(rank: int) -> list[list[int]]:
    """Return the prompts of a rank: all, or the second."""
    return PROMPTS if rank == 0 else PROMPTS[1:2]


def main() -> None:
    """Load the model and generate. ``moe_comm`` enters only through vLLM's entry point."""
    from vllm import LLM, SamplingParams

    rank = int(os.environ.get("VLLM_DP_RANK", "0"))
    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 << 20,
        enable_expert_parallel="VLLM_DP_SIZE" in os.environ,
        distributed_executor_backend="uni",
    )
    moved = {"calls": 0, "tokens_moved": 0, "rows": 0}
    if os.environ.get("MOE_COMM_VLLM") == "1":
        from moe_comm.integrations.vllm import MoeCommPrepareAndFinalize

        prepare = MoeCommPrepareAndFinalize.prepare

        def counting(self: Any, a1: Any, *args: Any, **kwargs: Any) -> Any:
            received = prepare(self, a1, *args, **kwargs)
            moved["calls"] += 1
            moved["tokens_moved"] += len(a1)
            moved["rows"] += len(received[0])
            return received

        MoeCommPrepareAndFinalize.prepare = counting
    sampling = SamplingParams(temperature=0, max_tokens=LENGTHS[rank], logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts_of(rank)], sampling, use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    logprobs = [[next(iter(step.values())).logprob for step in one.outputs[0].logprobs] for one in outputs]
    with open(sys.argv[2], "w") as file:
        json.dump({"tokens": tokens, "logprobs": logprobs, **moved}, file)


if __name__ == "__main__":
    main()
