"""A switch for vLLM's connector that fills KV caches without computing them. The engine imports this file."""

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class Filling(DecodeBenchConnector):
    """Fill a request's KV cache if `on`; else the engine computes the prompt."""

    on = True

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return super().get_num_new_matched_tokens(request, num_computed_tokens) if Filling.on else (0, False)
