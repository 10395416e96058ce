"""Tiny models with random weights, their tokenizers and processors, built without any download: qwen3, qwen3_vl, qwen3_5,
qwen3_omni; tokenizer, media (what the multimodal ones share)."""
