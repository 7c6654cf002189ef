"""Compares the sampler's log-probs with the trainer's, with and without the adapter."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from poimen_exp.verl_backend.sync_check import SyncReport, compare

_PROBE_ROWS = 8
_PROBE_TOKENS = 24
_ROLLOUT_ROWS = 512
"""Rows of a batch that are compared where the base's log-probs are there anyway (the KL reference)."""
_PROBE_TEXT = "Question: what was decided?\nChunk:\nThe team chose a date.\nMemory: none"

Row = tuple[str, dict[str, Any]]
"""Key and tag of a row in TransferQueue."""


class SyncProbe:
    """Runs over the trainer's workers and the sampler.

    Args:
        workers: worker group of the actor.
        sync: verl's checkpoint manager: weights to the sampler, the sampler to sleep.
        client: of the sampling servers.
        rows_multiple: rows of a forward over all ranks are a multiple of this.
        temperature: of the training rollouts; all log-probs here are taken at it.
    """

    def __init__(
        self, workers: Any, sync: Any, client: Any, tokenizer: Any, rows_multiple: int, temperature: float
    ) -> None:
        self._workers, self._sync, self._client = workers, sync, client
        self._tokenizer, self._rows_multiple, self._temperature = tokenizer, rows_multiple, temperature

    def known_adapter(self, seed: int, version: int) -> SyncReport:
        """Report of a sample under an adapter whose effect is large; the run's own adapter is back when this returns.

        A fresh adapter changes nothing, so that a sampler without it looks right. Sampler and trainer hold the GPU in
        turn, as in a step; the sampler sleeps before and after.
        """
        self._workers.set_probe_adapter(seed)
        try:
            self._sync.update_weights(version)
            sampled = asyncio.run(self._sample())
            self._sync.sleep_replicas()
            partition, rows = _put(sampled)
            trainer = self._log_probs(partition, rows, adapter=True)
            base = self._log_probs(partition, rows, adapter=False)
            tq.kv_clear(keys=[key for key, _ in rows], partition_id=partition)
        finally:
            self._workers.drop_probe_adapter()
        sampler = [value for _, output in sampled for value in output.log_probs]
        return compare(torch.tensor(sampler), torch.cat(trainer), torch.cat(base))

    def compare_rollout(self, partition: str, rows: Sequence[Row], has_reference: bool) -> SyncReport | None:
        """Report over rows of a rollout batch whose old log-probs are computed; None where there are too few.

        Args:
            rows: real ones, no padding.
            has_reference: ``ref_log_prob`` is there: with LoRA it is the base's.
        """
        step = self._rows_multiple
        most = _ROLLOUT_ROWS if has_reference else max(_PROBE_ROWS, step)
        chosen = rows[: min(most, len(rows)) // step * step]
        if not chosen:
            return None
        fields = ["rollout_log_probs", "old_log_probs"] + (["ref_log_prob"] if has_reference else [])
        keys = [key for key, _ in chosen]
        data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=fields)
        if has_reference:
            base = list(data["ref_log_prob"].unbind())
        else:
            base = self._log_probs(partition, chosen, adapter=False)
        sampler, trainer = data["rollout_log_probs"].unbind(), data["old_log_probs"].unbind()
        return compare(torch.cat(list(sampler)), torch.cat(list(trainer)), torch.cat(base))

    async def _sample(self) -> list[tuple[list[int], Any]]:
        message = [{"role": "user", "content": _PROBE_TEXT}]
        text = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        params = {
            "temperature": self._temperature,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "max_tokens": _PROBE_TOKENS,
            "stop_token_ids": [int(self._tokenizer.eos_token_id)],
            "logprobs": True,
        }
        count = -(-_PROBE_ROWS // self._rows_multiple) * self._rows_multiple
        calls = [
            self._client.generate(request_id=f"probe-{place}", prompt_ids=prompt, sampling_params=dict(params))
            for place in range(count)
        ]
        return [(prompt, output) for output in await asyncio.gather(*calls)]

    def _log_probs(self, partition: str, rows: Sequence[Row], *, adapter: bool) -> list[torch.Tensor]:
        """Trainer log-probs of the response tokens of each row, in the order of ``rows``."""
        keys = [key for key, _ in rows]
        info = {"calculate_entropy": False, "compute_loss": False, "temperature": self._temperature}
        if not adapter:
            info["no_lora_adapter"] = True
        tags = [dict(tag) for _, tag in rows]
        self._workers.compute_log_prob(KVBatchMeta(partition_id=partition, keys=keys, tags=tags, extra_info=info))
        data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["log_probs", "response_mask"])
        return list(response_from_nested(data["log_probs"], data["response_mask"]).unbind())


def _put(sampled: Sequence[tuple[list[int], Any]]) -> tuple[str, list[Row]]:
    """Partition and rows of a sample in TransferQueue, with the fields that verl's workers read."""
    fields, rows = [], []
    name = f"probe{uuid.uuid4().hex}"
    for place, (prompt, output) in enumerate(sampled):
        ids = torch.tensor([*prompt, *output.token_ids])
        mask = torch.ones(len(output.token_ids), dtype=torch.int64)
        fields.append(
            {
                "prompts": ids[: len(prompt)],
                "responses": ids[len(prompt) :],
                "input_ids": ids,
                "position_ids": torch.arange(len(ids)),
                "response_mask": mask,
                "loss_mask": mask,
                "multi_modal_inputs": {},
            }
        )
        tag = {"seq_len": len(ids), "prompt_len": len(prompt), "response_len": len(output.token_ids)}
        rows.append((f"{name}_{place}_0", tag))
    keys, tags = [key for key, _ in rows], [tag for _, tag in rows]
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="probe")
    return "probe", rows
