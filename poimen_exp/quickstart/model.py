"""The tiny Qwen2-shaped reader: its tokenizer, its network and its supervised training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import FIRST_MEMORY, GateProtocol
from poimen_exp.quickstart.logs import Shape, log_note, sample_tasks
from poimen_exp.quickstart.turns import TurnPair, constructed_turns
from poimen_exp.quickstart.words import ACTORS, DAYS, HOURS, PLACES, SERVICES, THINGS, UNKNOWN, VERBS, words

if TYPE_CHECKING:
    import torch

MEMORY_TOKENS = 32
WIDTH = 128
"""Tokens of a padded training row; the longest turn has 121."""
IGNORE = -100
"""Label of a token that is not learned: prompts, padding and, in the main training, gates."""

_END_OF_TEXT, _TURN_START, _TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TAGS = [f"<{slash}{name}>" for name in ("think", "check", "update", "next") for slash in ("", "/")]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Sizes of the network. vLLM's CPU attention needs a head size of at least 32."""

    hidden: int = 64
    layers: int = 4
    heads: int = 2
    kv_heads: int = 1
    intermediate: int = 128


@dataclass(frozen=True)
class Recipe:
    """How the network is trained."""

    steps: int = 16000
    batch: int = 512
    lr: float = 3e-3
    warmup_steps: int = 300
    weight_decay: float = 0.01
    seed: int = 2
    workers: int = 0
    stranger_rate: float = 0.05
    """How often the memory starts with a fact nobody asked for, as a wrong update leaves it."""


def build_tokenizer(vocabulary: int = 800) -> Any:
    """A byte-level BPE tokenizer whose merges make every word of the logs and of the turns one token.

    Its normaliser and pre-tokeniser are Qwen2's: for a folder whose configuration says ``qwen2``, ``AutoTokenizer``
    puts those in whatever ``tokenizer.json`` says (transformers 5.9), and the words would fall apart.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    names = {"eos_token": _TURN_END, "pad_token": _END_OF_TEXT, "unk_token": None}
    limits = {"model_max_length": 1024, "padding_side": "left"}
    rules = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END_OF_TEXT, _TURN_START, _TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([word for word in vocabulary_words() for _ in range(100)], trainer)
    trained = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=trained["vocab"], merges=merges, **names, **limits)
    tokenizer.add_tokens([AddedToken(_TURN_START, special=True, normalized=False)], special_tokens=True)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in _TAGS])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def vocabulary_words() -> list[str]:
    """Every piece of text that is to be one token, with its space where one stands before it."""
    fixed = words("where Question Chunk Memory Answer user assistant boxed new nothing yes no continue end No")
    inside = [*SERVICES, *THINGS, *PLACES, *ACTORS, *HOURS, *(word for verb in VERBS for word in verb)]
    inside += words(": - ? the is are and complete incomplete previous memory unknown")
    return [*DAYS, *fixed, *PLACES, UNKNOWN, *(f" {word}" for word in inside)]


def build_network(tokenizer: Any, size: Size, seed: int) -> Any:
    """An untrained network of ``size`` for ``tokenizer``, in float32."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        **ends,
    )
    network = Qwen2ForCausalLM(config).float()
    network.generation_config = GenerationConfig(**ends)
    return network


def shape_at(progress: float, rng: random.Random) -> Shape:
    """Sizes of the logs at a point of the training (0 to 1): one line a chunk first, at the end mostly the corpus's.

    Short logs take few things, so that lines which match a question by half are common from the first step on:
    without them the model first learns to look at the thing alone, and may stay there.
    """
    questions = 4
    if progress < 0.25:
        entries = 1
    elif progress < 0.5:
        entries = rng.randint(1, 3)
    elif rng.random() < 0.5:
        return Shape(questions=questions)
    else:
        entries = rng.randint(2, 5)
    services = rng.randint(3, 6)
    things = math.ceil((6 * entries + 2) / services)  # 6 chunks, and two pairs that no line holds
    return Shape(services, rng.randint(things, things + 1), entries, questions=questions)


def training_turns(protocol: GateProtocol, progress: float, recipe: Recipe, rng: random.Random) -> Iterator[TurnPair]:
    """Endless turns with random gates over fresh logs of the sizes of ``progress``."""
    while True:
        tasks = sample_tasks(shape_at(progress, rng), rng)
        for task in islice(tasks, 4):
            memory = FIRST_MEMORY
            if rng.random() < recipe.stranger_rate:
                memory = f"- {rng.choice(SERVICES)} {rng.choice(THINGS)} {rng.choice(PLACES)}"
                if memory.removeprefix("- ").rsplit(" ", 1)[0] in task.question:
                    continue
            yield from constructed_turns(task, protocol, rng, gates="random", note=log_note, memory=memory)


def make_batch(
    protocol: GateProtocol, step: int, recipe: Recipe, pad_id: int, progress: float | None = None, gates: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [B, WIDTH] of one step, padded on the right: a function of the seed and the step alone.

    Args:
        progress: point of the curriculum, 0 to 1; the step's own if left out.
        gates: whether the gates are learned; if not, their labels are ``IGNORE``.
    """
    import torch

    rng = random.Random(f"{recipe.seed}/{step}")
    turns = training_turns(protocol, step / recipe.steps if progress is None else progress, recipe, rng)
    pairs = [next(turns) for _ in range(recipe.batch)]
    ids = torch.full((len(pairs), WIDTH), pad_id, dtype=torch.int64)
    labels = torch.full((len(pairs), WIDTH), IGNORE, dtype=torch.int64)
    for row, (prompt, response) in enumerate(pairs):
        both = torch.tensor((*prompt, *response))
        ids[row, : len(both)] = both
        labels[row, len(prompt) : len(both)] = both[len(prompt) :]
    return ids, labels if gates else labels.masked_fill(gate_places(ids, protocol), IGNORE)


def gate_places(ids: torch.Tensor, protocol: GateProtocol) -> torch.Tensor:
    """[B, T], true where the token of ``ids`` [B, T] is a gate's: the one after ``<check>`` and after ``<next>``."""
    check, follow = (protocol.codec.encode_template(tag)[0] for tag in ("<check>", "<next>"))
    return ((ids == check) | (ids == follow)).roll(1, dims=1)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def response_loss(network: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the response tokens. Rows are padded on the right, so causal attention needs no mask."""
    import torch

    logits = network(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T - 1, V]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def train(
    network: Any,
    protocol: GateProtocol,
    recipe: Recipe,
    device: str,
    report: Callable[[int, float], None],
    every: int = 100,
) -> None:
    """Trains ``network`` in place; ``report(step, mean loss since the last report)`` every ``every`` steps.

    The gates, which are coins here, are shown and not learned: their entropy would be nine tenths of the loss, and with
    its noise in every gradient the verdict stays wrong on one chunk in ten.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    network.to(device).train()
    step_once = _Step(network, recipe, device)
    total = torch.zeros((), device=device)
    for step, (ids, labels) in enumerate(batches(protocol, recipe, gates=False)):
        total += step_once(ids, labels, learning_rate(step, recipe))
        if (step + 1) % every == 0:
            report(step + 1, float(total) / every)
            total.zero_()


class _Step:
    """One optimizer step. On a GPU it is recorded once as a CUDA graph: launching its small kernels one by one takes
    several times as long as running them.
    """

    def __init__(self, network: Any, recipe: Recipe, device: str) -> None:
        import torch

        self._network = network
        self._ids = torch.zeros((recipe.batch, WIDTH), dtype=torch.int64, device=device)
        self._labels = torch.zeros_like(self._ids)
        self._lr = torch.zeros((), device=device)
        on_gpu = device == "cuda"
        self._optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=self._lr,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self._graph = self._record() if on_gpu else None

    def __call__(self, ids: torch.Tensor, labels: torch.Tensor, lr: float) -> torch.Tensor:
        self._ids.copy_(ids)
        self._labels.copy_(labels)
        self._lr.fill_(lr)
        if self._graph is None:
            self._loss = self._run()
        else:
            self._graph.replay()
        return self._loss

    def _run(self) -> torch.Tensor:
        import torch

        self._optimizer.zero_grad(set_to_none=True)
        loss = response_loss(self._network, self._ids, self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()
        return loss.detach()

    def _record(self) -> torch.cuda.CUDAGraph:
        import torch

        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # buffers and moments must exist before recording; at learning rate 0
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(aside)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._run()
        return graph


def batches(
    protocol: GateProtocol, recipe: Recipe, progress: float | None = None, gates: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a training in order, made by ``recipe.workers`` processes; the rest as in ``make_batch``."""
    from torch.utils.data import DataLoader

    pad_id = protocol.codec.pad_id if isinstance(protocol.codec, HfCodec) else 0
    steps: Any = _Steps(protocol, recipe, pad_id, progress, gates)  # a map-style dataset by its two methods
    return iter(DataLoader(steps, batch_size=None, shuffle=False, num_workers=recipe.workers))


class _Steps:
    """The batches of a training, by step, for a ``DataLoader`` to make in its workers."""

    def __init__(
        self, protocol: GateProtocol, recipe: Recipe, pad_id: int, progress: float | None, gates: bool
    ) -> None:
        self._protocol, self._recipe, self._pad_id, self._progress = protocol, recipe, pad_id, progress
        self._gates = gates

    def __len__(self) -> int:
        return self._recipe.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(self._protocol, step, self._recipe, self._pad_id, self._progress, self._gates)
