"""What an estimate is made of: sizes of models, rows of the work, rates of the device. Letters as in ``estimate``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model.

    Attributes:
        parameters: all weights, a tied embedding once.
        linear: weights of its linear layers without the output head.
        lora: trained weights: rank x (inputs + outputs) of every adapted layer.
        rank: of LoRA.
        dtype_bytes: of the base weights and activations.
    """

    parameters: int
    linear: int
    lora: int
    rank: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    dtype_bytes: int


@dataclass(frozen=True)
class Rows:
    """Lengths of one kind of row, and how many rows of a batch start with the same prefix."""

    prefix: float
    suffix: float
    response: float
    share: int

    @property
    def tokens(self) -> float:
        """T."""
        return self.prefix + self.suffix + self.response


@dataclass(frozen=True)
class Workload:
    """What a run does. ``mean`` gives tokens and time, ``longest`` gives memory.

    Attributes:
        rows: rows a step, as if every document were read to its end.
        rollouts: rollouts a step; each waits for its own last row before it asks for the next.
        turns: rows of the longest rollout.
        val_rows, val_rollouts: of one validation.
        mini_rows: rows an optimizer step.
        max_rows: rows sampled at once.
        micro_batch_tokens: padded tokens a forward of the update.
        forwards: passes without gradient over a step's rows (old and reference log-probs).
        backwards: passes with gradient.
        steps, validations: of the run.
        engine_bytes: what vLLM takes while it samples, its weights and cache included; 0 where the transformers engine
            samples.
        entropy: whether the objective has entropy, whose gradient needs float32 copies of the logits.
        device_bytes: of a GPU; the slots take at most half of what is free there. 0: no such limit.
    """

    mean: Rows
    longest: Rows
    rows: int
    rollouts: int
    turns: int
    val_rows: int
    val_rollouts: int
    mini_rows: int
    max_rows: int
    micro_batch_tokens: int
    forwards: int
    backwards: int
    steps: int
    validations: int
    engine_bytes: int = 0
    device_bytes: int = 0
    entropy: bool = False


@dataclass(frozen=True)
class Critic:
    """The value model of gae.

    Attributes:
        parameters: all weights. ``trained``: those that the optimizer moves, in float32.
        mini_rows, micro_batch_tokens, epochs: as ``Workload`` has them for the actor.
    """

    shape: ModelShape
    parameters: int
    trained: int
    mini_rows: int
    micro_batch_tokens: int
    epochs: int

    @property
    def passes(self) -> int:
        """Forwards that one step costs: the values, then each epoch's forward and backward (twice where all trains)."""
        return 1 + self.epochs * (3 if self.trained == self.parameters else 2)


@dataclass(frozen=True)
class Rates:
    """What the device does: matrix FLOP/s and bytes/s as measured, seconds of a small operation."""

    flops: float
    bytes: float
    launch_s: float
    efficiency: float = 0.4
    """Share of the matrix rate that a model's forward reaches: an assumption."""
