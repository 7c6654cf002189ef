"""The corpus as verl sees it: one row a task, which names the task and holds nothing of it.

verl copies every field of a dataset row into every turn's row in TransferQueue. With the document in it, a batch of 128
prompts x 16 rollouts x 20 turns would hold 40,960 copies; the agent loop opens the corpus itself instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from omegaconf import DictConfig


class GateDataset(Dataset[dict[str, Any]]):
    """Rows of a split. verl makes it (``data.custom_cls``); the arguments are verl's.

    Args:
        data_files: ``{"split": "train" | "val", "tasks": N}``, put there by ``overlay``.
        max_samples: verl's ``data.train_max_samples`` / ``val_max_samples``: the first tasks only; -1 for all.
    """

    def __init__(
        self,
        data_files: DictConfig,
        tokenizer: Any = None,  # noqa: ARG002
        processor: Any = None,  # noqa: ARG002
        config: DictConfig | None = None,  # noqa: ARG002
        max_samples: int = -1,
    ) -> None:
        self._split, tasks = str(data_files.split), int(data_files.tasks)
        self._tasks = min(tasks, max_samples) if max_samples > 0 else tasks

    def __len__(self) -> int:
        return self._tasks

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._tasks:
            raise IndexError(index)
        return {
            "raw_prompt": [{"role": "user", "content": f"{self._split} task {index}"}],  # verl counts rows by it
            "split": self._split,
            "index": index,
            "data_source": f"poimen/{self._split}",
            "reward_model": {"style": "rule", "ground_truth": None},
        }
