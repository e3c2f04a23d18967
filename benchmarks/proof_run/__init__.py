"""One online run of a real language model: SmolLM2-135M learns a text game through vLLM. See docs/proof-run.md."""
