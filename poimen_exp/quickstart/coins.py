"""Gates that are coins, over a network that could know better: the start that reinforcement learning is given.

A network that only ever saw random gates has nothing at the gate's position that tells evidence from noise, and a few
dozen steps of LoRA do not build it. A pretrained model has such features. So the tiny network first learns the right
gates for a short while, as pretraining would teach them in passing, and then, in its last layer alone, to toss coins
instead. What it writes is random; what reinforcement learning has to find is the way back.

How long it learns the right gates decides how much alike the two kinds of chunk look to them. After 150 steps an update
learned on evidence spreads to chunks without it, as in a pretrained model; after 500 steps of four times the batch in
some seeds it does not, and a run without the update reward keeps its gate (docs/results/alpha-quickstart.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.quickstart.model import Recipe, batches, response_loss

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CoinRecipe:
    """Steps of the two phases; the seed follows that of the main training."""

    batch: int = 128
    right_steps: int = 150
    right_lr: float = 1.5e-3
    coin_steps: int = 300
    coin_lr: float = 1e-3
    warmup_steps: int = 20


def right_gates(ids: torch.Tensor, protocol: GateProtocol) -> torch.Tensor:
    """[B, T] ids in which every gate says what the verdict of its own turn says; answer turns stay as they are."""
    import torch

    check, follow, think, yes, no, end, go, new, complete = (
        protocol.codec.encode_template(text)[0]
        for text in ("<check>", "<next>", "<think>", "yes", "no", "end", "continue", "new", " complete")
    )
    out = ids.clone()
    row, at = (ids == think).nonzero(as_tuple=True)
    verdict_new, verdict_complete = ids[row, at + 1] == new, ids[row, at + 2] == complete
    for tag, verdict, opened, shut in ((check, verdict_new, yes, no), (follow, verdict_complete, end, go)):
        place = (ids[row] == tag).int().argmax(1) + 1
        out[row, place] = torch.where(verdict, opened, shut)
    return out


def make_coins(
    network: Any,
    protocol: GateProtocol,
    recipe: Recipe,
    device: str,
    report: Callable[[str, int, float], None],
    coins: CoinRecipe | None = None,
) -> None:
    """Teaches the right gates to the whole network, then random ones to its last layer; in place."""
    coins = coins or CoinRecipe()
    network.to(device).train()
    right = replace(recipe, steps=coins.right_steps, batch=coins.batch, seed=recipe.seed + 1)
    tossed = replace(recipe, steps=coins.coin_steps, batch=coins.batch, seed=recipe.seed + 2)
    _phase(network, protocol, right, coins.right_lr, coins, device, report, "right gates")
    last = f"layers.{network.config.num_hidden_layers - 1}."
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(last in name)
    _phase(network, protocol, tossed, coins.coin_lr, coins, device, report, "coins")
    network.requires_grad_(True)


def _phase(
    network: Any,
    protocol: GateProtocol,
    recipe: Recipe,
    lr: float,
    coins: CoinRecipe,
    device: str,
    report: Callable[[str, int, float], None],
    name: str,
) -> None:
    import torch

    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    for step, (ids, labels) in enumerate(batches(protocol, recipe, progress=1.0)):
        if name == "right gates":
            right = right_gates(ids, protocol)
            ids, labels = right, torch.where(labels == ids, right, labels)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / coins.warmup_steps) * (1.0 - 0.95 * step / recipe.steps)
        loss = response_loss(network, ids.to(device), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            report(name, step + 1, float(loss.detach()))
