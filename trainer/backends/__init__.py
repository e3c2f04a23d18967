"""Backends: where a policy's weights live, and how gradients and updates are computed.

`base.PolicyBackend` says what a loop may ask for; `single` is one device, `sharded` is FSDP2 over several ranks.
"""
