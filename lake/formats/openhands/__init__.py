"""OpenHands events of both generations."""
