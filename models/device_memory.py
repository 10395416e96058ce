"""What a device of this process holds, for the records of a run."""

from __future__ import annotations

import torch


def device_memory(device: torch.device | str) -> dict[str, dict[str, int]]:
    """What a device holds, as a part of a record, in bytes; nothing of a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device_memory": {
            "allocated_bytes": torch.cuda.memory_allocated(device), "used_bytes": total - free, "total_bytes": total,
            "reserved_bytes": torch.cuda.memory_reserved(device), "peak_bytes": torch.cuda.max_memory_allocated(device),
        }
    }  # fmt: skip
