"""Environment of every vLLM that this package starts."""

from __future__ import annotations

NO_FLASHINFER = ("VLLM_USE_FLASHINFER_SAMPLER", "0")
"""FlashInfer compiles its top-p sampler with nvcc at the first start: minutes, before the first token. vLLM's own needs
nothing."""
