"""The probe: does the adapter change what the base model says, and does it say the same after a reload?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poimen_exp.adapters.manifest import Dtype
from poimen_exp.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor

PROBE_TEXT = (
    "Question: Which branch was deployed on 3 May?\n"
    "Chunk:\n[3 May] Mira merged the release branch and deployed it at noon.\n"
    "Memory: No previous memory"
)
SMALLEST_EFFECT = 1e-6
"""In nats: below float32 noise, and below one step of bfloat16, so that rounding alone never passes."""


@dataclass(frozen=True)
class ProbeReport:
    """What the probe measured.

    Attributes:
        effect: largest absolute difference between base and adapter over the prompt's token log-probs, in nats.
        prompt_tokens: how many log-probs were compared.
    """

    effect: float
    prompt_tokens: int


def probe(folder: Path, base_model_dir: Path, dtype: Dtype = "float32", prompt: str = PROBE_TEXT) -> ProbeReport:
    """Runs base, adapter, and the adapter loaded a second time on one fixed prompt.

    Raises:
        Refused: a key was missing on load, the reload gives other logits, or the adapter has no effect.
    """
    import torch
    from peft import PeftModel

    model, ids = load_base(base_model_dir, dtype), probe_ids(base_model_dir, prompt)
    with torch.no_grad():
        base = token_log_probs(model, ids)
        adapted = PeftModel.from_pretrained(model, str(folder)).eval()
        first = adapted(input_ids=ids).logits
        effect = float((token_log_probs(adapted, ids) - base).abs().max())
        _load_again(adapted, folder)
        second = adapted(input_ids=ids).logits
    if not torch.equal(first, second):
        difference = float((first - second).abs().max())
        raise Refused(f"adapter {folder}: a reload gives other logits (largest difference {difference:.3g})")
    if not effect > SMALLEST_EFFECT:
        raise Refused(
            f"adapter {folder}: log-probs of the probe prompt differ from the base model's by {effect:.3g} nats at "
            f"most, expected more than {SMALLEST_EFFECT:g}; the adapter has no effect"
        )
    return ProbeReport(effect, int(ids.shape[1]) - 1)


def load_base(base_model_dir: Path, dtype: Dtype) -> Any:
    """The base model on the CPU, for inference."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model_dir, dtype=getattr(torch, dtype))
    return model.eval()


def probe_ids(base_model_dir: Path, prompt: str = PROBE_TEXT) -> Tensor:
    """Token ids [1, T] of the probe prompt."""
    import torch
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(base_model_dir).encode(prompt, add_special_tokens=False)
    return torch.tensor([ids])


def token_log_probs(model: Any, ids: Tensor | Sequence[int]) -> Tensor:
    """[T - 1] float32 log-prob of each token of ``ids`` but the first, given those before it."""
    import torch

    tokens = torch.as_tensor(ids).reshape(1, -1)
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens).logits[0, :-1].float()  # [T - 1, V]
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def _load_again(model: Any, folder: Path) -> None:
    result = model.load_adapter(str(folder), adapter_name="reloaded")
    missing = [key for key in result.missing_keys if ".reloaded." in key]
    if missing or result.unexpected_keys:
        raise Refused(
            f"adapter {folder}: reload leaves {missing[:1] or result.unexpected_keys[:1]} without a counterpart"
        )
    model.set_adapter("reloaded")
    model.eval()
