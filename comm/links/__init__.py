"""Links: one ring of this node, mirrored on another node, record by record.

frames         what crosses: heads of frames, checksums
origin         the sender's side of memory: what of the ring comes next (reads only)
mirror         the receiver's side of memory: what arrived, what is visible, how much room there is (writes only)
streams        the connections of one time, either way, without copies
sender         LinkSender: several of them to one receiver, made again when they are lost
receiver       LinkReceiver: one listener a node, for all its mirrors
collective     the same two ends with payloads over a process group, by gloo or nccl
device_ring    a mirror whose payloads lie in a torch tensor
config         what a link can be told, and what it tells
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "CollectiveReceiver": "rondo.comm.links.collective",
    "CollectiveSender": "rondo.comm.links.collective",
    "DeviceMirror": "rondo.comm.links.device_ring",
    "DeviceView": "rondo.comm.links.device_ring",
    "LinkConfig": "rondo.comm.links.config",
    "LinkReceiver": "rondo.comm.links.receiver",
    "LinkSender": "rondo.comm.links.sender",
    "LinkStats": "rondo.comm.links.config",
    "Mirror": "rondo.comm.links.mirror",
    "MirrorStats": "rondo.comm.links.mirror",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
