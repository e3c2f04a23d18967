"""Backends: where a policy's weights are, and how gradients and updates are computed.

`base` has the interface of a loop and the backend of one device, `sharded` is FSDP2 over several ranks.
"""
