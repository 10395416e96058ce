"""TransferQueue's side of `benchmarks/bus.py`: run by an interpreter that has TransferQueue; prints one JSON line.

    PEERS_VENV/bin/python benchmarks/peers/transferqueue.py {"text": {"lengths": [...], "rows_per_put": 64, "puts": 16, ...}, ...}

SimpleStorage with two units. A producer and a consumer, each a process of its own with a client of its own; the producer builds
the jagged batch of a put inside the clock, as ours does; the consumer reads both ends of every field of every row. A step's
puts are a partition of their own, which the consumer clears when it has read them, as ours commits a step. Seconds run from
the end of the warm steps to the last row read; processor time counts the whole process tree in that time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from typing import Any

import numpy as np
import psutil

PATCH, POLL_S, TASK = 1176, 0.0005, "train"


def client(conf: Any, name: str) -> Any:
    from transfer_queue import TransferQueueClient

    made = TransferQueueClient(f"{name}-{os.getpid()}", conf.controller.zmq_info)
    backend = conf.backend.storage_backend
    made.initialize_storage_manager(manager_type=backend, config=conf.backend[backend])
    return made


def fields_of(load: dict[str, Any]) -> list[str]:
    return ["tokens", "rollout_log_probs", "policy_versions", *(["pixel_values"] if load.get("pixels") else [])]


def produce(conf: Any, load: dict[str, Any], partition: str, go: Any) -> None:
    import torch
    from tensordict import TensorDict

    torch.set_num_threads(1)
    made = client(conf, "producer")
    dtypes = {"tokens": np.int32, "policy_versions": np.int32}
    rows = []
    for i, length in enumerate(load["lengths"]):
        row = {name: np.ones(length, dtypes.get(name, np.float32)) for name in fields_of(load)[:3]}
        if load.get("pixels"):
            row["pixel_values"] = np.ones((load["pixels"][i], PATCH), np.float32)
        rows.append({name: torch.from_numpy(array) for name, array in row.items()})
    size = load["rows_per_put"]
    go.wait()
    for put in range(load["warm_puts"] + load["puts"]):
        some = [rows[(put * size + i) % len(rows)] for i in range(size)]
        batch = {
            name: torch.nested.as_nested_tensor([row[name] for row in some], layout=torch.jagged) for name in some[0]
        }
        step = put // load["puts_per_step"]
        made.put(data=TensorDict(batch, batch_size=size), partition_id=f"{partition}-{step}")
    made.close()


def consume(conf: Any, load: dict[str, Any], partition: str, ready: Any, clock: Any) -> None:
    import torch

    torch.set_num_threads(1)
    made, names = client(conf, "consumer"), fields_of(load)
    ready.set()
    for put in range(load["warm_puts"] + load["puts"]):
        if put == load["warm_puts"]:
            clock[0] = time.monotonic()
        step, at = divmod(put, load["puts_per_step"])
        while True:
            meta = made.get_meta(
                data_fields=names, batch_size=load["rows_per_put"], partition_id=f"{partition}-{step}", task_name=TASK
            )
            if meta.size:
                break
            time.sleep(POLL_S)
        data = made.get_data(meta)
        for name in names:
            for tensor in data[name].unbind():
                flat = tensor.reshape(-1)
                assert flat[0] == flat[-1] == 1
        if at == load["puts_per_step"] - 1:
            made.clear_partition(f"{partition}-{step}")
    clock[1] = time.monotonic()
    made.close()


def cpu_s(seen: dict[int, float]) -> float:
    """User and system seconds of this process's tree so far; processes that ended count with what was last seen of them."""
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seen[process.pid] = times.user + times.system
    return sum(seen.values())


def measure(conf: Any, load: dict[str, Any], partition: str) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    ready, go, clock = spawn.Event(), spawn.Event(), spawn.Array("d", 2)
    consumer = spawn.Process(target=consume, args=(conf, load, partition, ready, clock))
    producer = spawn.Process(target=produce, args=(conf, load, partition, go))
    consumer.start()
    producer.start()
    ready.wait(120)
    time.sleep(2)  # the producer has made its rows
    seen: dict[int, float] = {}
    before = used = cpu_s(seen)
    go.set()
    while consumer.is_alive():
        used = cpu_s(seen)
        if not clock[0]:
            before = used
        consumer.join(0.02 if not clock[0] else 0.2)
    producer.join(60)
    rows = load["puts"] * load["rows_per_put"]
    return {"rows_s": rows / (clock[1] - clock[0]), "cpu_us_per_row": (used - before) / rows * 1e6}


def main() -> None:
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    conf = tq.init(
        OmegaConf.create(
            {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
        )
    )
    found = {}
    try:
        for name, load in json.loads(sys.argv[1]).items():
            found[name] = measure(conf, load, f"{name}-{time.monotonic_ns()}")
    finally:
        tq.close()
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
