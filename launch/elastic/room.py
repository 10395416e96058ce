"""Room: whether more replicas fit on this machine beside what runs, and which devices they get.

Owns the sum: rings, the memory that a living replica of the same role group has for itself, and free devices. What the sum lets
through and the kernel does not is refused where memory is made (`runtime/memory/segments.py`).

    Room(config, run.path).why_not("rollout", 2, living)   ->   "" or the sentence that refuses
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rondo.launch.config import RunConfig
from rondo.launch.groups import RoleGroup
from rondo.launch.machine import show_bytes
from rondo.launch.rundir import read_json, write_json
from rondo.runtime.memory.free import free_memory_bytes
from rondo.runtime.processes.process import private_bytes

PREPARED = "prepared.json"


class Room:
    """`free`: the bytes that may still be taken, and what limits them."""

    def __init__(self, config: RunConfig, run: Path, free: Callable[[], tuple[int, str]] = free_memory_bytes) -> None:
        self._config, self._prepared, self._free = config, run / PREPARED, free

    def why_not(self, group: RoleGroup, num: int, living: Mapping[str, tuple[int, ...]]) -> str:
        """Why `num` more replicas of a role group cannot be. living: replica -> its processes, of all role groups."""
        bus, sglang = self._config.bus, self._config.rollout.sglang
        if "rollout" in group.roles and sglang is not None and sglang.urls:
            return "num_replicas must be 1 with rollout.sglang.urls, whose servers one replica feeds. Attach more by engine_urls"
        rings = group.processes * (bus.ring_bytes if "rollout" in group.roles else bus.column_ring_bytes)
        replicas = (pids for name, pids in living.items() if name.rpartition("-")[0] == group.name)
        own = max((sum(map(private_bytes, pids)) for pids in replicas), default=0)
        free, whose = self._free()
        if num * (rings + own) > free:
            return (
                f"{num} more of {group.name} must fit into the {show_bytes(free)} of memory that are free in {whose}, got "
                f"{show_bytes(num * (rings + own))}: for each {show_bytes(rings)} of rings, and {show_bytes(own)} as one has "
                "now. Ask for fewer, or make room"
            )
        wanted, places = group.processes * group.devices, len(self._free_places(group, living))
        if wanted and places < num:
            return (
                f"{num} more of {group.name} must find {num * wanted} free devices, {wanted} beside each other for each, got "
                f"room for {places} of them. Ask for fewer, or scale another role in"
            )
        return ""

    def take(self, group: RoleGroup, names: Iterable[str], living: Iterable[str]) -> None:
        """Write down for new replicas where they compute. What those had that are gone is free."""
        if not group.devices:
            return
        prepared = read_json(self._prepared)
        devices = prepared["first_devices"]
        kept = {name: devices[name] for name in living if name in devices}
        places = self._free_places(group, living)
        write_json(self._prepared, prepared | {"first_devices": kept | dict(zip(names, places, strict=False))})

    def _free_places(self, group: RoleGroup, living: Iterable[str]) -> list[int]:
        """First devices of as many replicas as there is room for."""
        prepared = read_json(self._prepared)
        width = {each.name: each.processes * each.devices for each in self._config.role_groups}
        taken: set[int] = set()
        for name, first in prepared["first_devices"].items():
            if name in living:
                taken.update(range(first, first + width[name.rpartition("-")[0]]))
        places, at, size = [], 0, width[group.name]
        while size and at + size <= (prepared.get("num_devices") or 0):
            if taken.isdisjoint(range(at, at + size)):
                places.append(at)
                at += size
            else:
                at += 1
        return places
