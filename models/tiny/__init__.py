"""Tiny models with random weights and their tokenizers, built without any download: qwen3, tokenizer."""
