"""From leased prompt groups to samples on the bus.

role           concurrency of a replica; engine is the protocol it speaks, ranges the numbers that a request may have
engine         embedded (asyncio) over slots (the core) over qwen3_forward or hf_forward; sampler, products
rewards        killable workers (reward_worker) with deadlines
"""
