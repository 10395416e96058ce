"""Tensors that leave their memory and come back to other."""

from __future__ import annotations

import torch

from rondo.models.at_rest import AtRest


def test_tensors_stay_the_same_objects_share_what_they_shared_and_come_back_to_new_memory_bit_by_bit() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    view, parameter = flat[2:8].view(2, 3), torch.nn.Parameter(torch.randn(3, 2).t())
    tensors: list[torch.Tensor] = [flat, view, parameter, torch.empty(0)]
    whole = [tensor.clone() for tensor in tensors]
    resting = AtRest()
    for _ in range(2):
        before = [tensor.untyped_storage() for tensor in tensors[:3]]
        resting.leave(tensors)
        resting.leave(tensors)
        at_rest = [tensor.untyped_storage().data_ptr() for tensor in tensors[:3]]
        assert at_rest[0] == at_rest[1] and not set(at_rest) & {each.data_ptr() for each in before}
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, whole, strict=True))
        resting.come_back()
        resting.come_back()
        assert not set(at_rest) & {tensor.untyped_storage().data_ptr() for tensor in tensors[:3]}
        flat += 1
        whole[0] += 1
        whole[1] += 1
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, whole, strict=True))
        assert tensors[2] is parameter and parameter.stride() == (1, 2) and parameter.requires_grad
