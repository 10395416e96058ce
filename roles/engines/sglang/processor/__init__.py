"""What runs inside a server. This folder is put on the server's PYTHONPATH; nothing here is imported by rondo.

rondo_media    the processor of media that SGLang loads by SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE
"""
