"""The engine inside a rollout process.

embedded       the engine; slots, its scheduler; sampler, a token's draw; hf_forward and qwen3_forward; products, recorder
waiting        the wait for work; sleeping, giving memory back; shared_weights, weights in use by a trainer beside it; time_share
"""
