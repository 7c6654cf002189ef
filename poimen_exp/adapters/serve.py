"""The command that serves adapters: vLLM's OpenAI server, with what 0.24 needs to mount them and to get them right."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from poimen_exp.adapters.check import mount_check
from poimen_exp.adapters.lora_config import vllm_rank
from poimen_exp.adapters.manifest import Manifest, read_manifest
from poimen_exp.adapters.vllm_env import NO_FLASHINFER
from poimen_exp.errors import Refused

Device = Literal["cuda", "cpu"]
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
PYTHON_VARIABLE = "POIMEN_VLLM_PYTHON"

# Room for the prompt's fixed text, the question and the answer turn beside chunk, memory and response.
_PROMPT_MARGIN_TOKENS = 512
_OWN_OPTIONS = ("--model", "--served-model-name", "--enable-lora", "--max-loras", "--max-lora-rank", "--lora-modules")
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class ServeOptions:
    """How adapters are served.

    Attributes:
        adapters: served name -> adapter folder; all trained on one base model.
        base_model: folder of that model.
        max_model_len: longest prompt and response together; None fits the adapters' chunks.
    """

    adapters: Mapping[str, Path]
    base_model: Path
    python: Path
    host: str = "127.0.0.1"
    port: int = 8000
    device: Device = "cuda"
    max_model_len: int | None = None
    extra: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class ServeCommand:
    """What to run: the arguments, and what the environment needs beside what it has."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def as_shell(self) -> str:
        """One line that a shell runs."""
        values = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*values, shlex.join(self.arguments)])

    def execute(self) -> None:
        """Replaces this process with the server, so that signals and the exit code are the server's."""
        sys.stdout.flush()
        os.execvpe(self.arguments[0], list(self.arguments), {**os.environ, **self.environment})


def serve_command(options: ServeOptions) -> ServeCommand:
    """The command that serves ``options.adapters``, each of them checked against the base model.

    One LoRA slot more than adapters: with every slot in use, vLLM 0.24 answers requests for the base model that are
    batched with an adapter's from the adapter.

    Raises:
        Refused: an adapter that cannot be mounted, or adapters trained in different data types.
    """
    if not options.adapters:
        raise Refused("adapter serve: no adapter named")
    own = [word for word in options.extra if word.split("=")[0] in _OWN_OPTIONS]
    if own:
        raise Refused(f"adapter serve: {own[0]} is set here from the adapters; leave it out")
    for folder in options.adapters.values():
        mount_check(folder, options.base_model)
    manifests = [read_manifest(folder) for folder in options.adapters.values()]
    dtypes = sorted({manifest.dtype for manifest in manifests})
    if len(dtypes) > 1:
        raise Refused(f"adapter serve: adapters trained in {' and in '.join(dtypes)}; serve them apart")
    slots = len(options.adapters) + 1
    arguments = [
        *(str(options.python), "-m", SERVER_MODULE),
        *("--model", str(options.base_model.resolve()), "--served-model-name", options.base_model.resolve().name),
        *("--host", options.host, "--port", str(options.port)),
        *("--dtype", dtypes[0]),
        # Otherwise the model's own generation_config.json (Qwen2.5: repetition penalty, top-k) bends every sample.
        *("--generation-config", "vllm"),
        *("--max-model-len", str(options.max_model_len or _model_length(options.base_model, manifests))),
        "--enable-lora",
        *("--max-loras", str(slots), "--max-cpu-loras", str(slots)),
        *("--max-lora-rank", str(vllm_rank(max(manifest.lora_rank for manifest in manifests)))),
        *("--lora-modules", *(f"{name}={folder.resolve()}" for name, folder in options.adapters.items())),
        *(("--enforce-eager",) if options.device == "cpu" else ()),
        *options.extra,
    ]
    return ServeCommand(tuple(arguments), _environment(options.device))


def _model_length(base_model: Path, manifests: Sequence[Manifest]) -> int:
    """Room for the longest turn of any adapter, within the positions that the base model knows."""
    longest = max(m.chunk_tokens + m.memory_tokens + m.response_tokens for m in manifests) + _PROMPT_MARGIN_TOKENS
    positions = json.loads((base_model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return longest if positions is None else min(longest, int(positions))


def serve_notes(options: ServeOptions) -> list[str]:
    """What a user must know that the command does not show."""
    slots = len(options.adapters) + 1
    return [
        f"--max-loras {slots}: one slot more than adapters. With all slots in use, vLLM 0.24 lets base requests that "
        "are batched with an adapter's be answered by the adapter.",
        "A new version of an adapter needs a new name or a restart: vLLM keeps the prefix cache of a name, and a "
        "reload under it answers from the old weights.",
    ]


def find_server_python() -> Path:
    """The Python that has vLLM: ``POIMEN_VLLM_PYTHON``, this one, or ``~/.cache/poimen-vllm``."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise Refused(f"{PYTHON_VARIABLE}: no file {named}; expected a Python with vllm installed")
        return Path(named)
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    built = Path.home() / ".cache" / "poimen-vllm" / "bin" / "python"
    if built.is_file():
        return built
    raise Refused(
        "adapter serve: no vLLM found. Install the extra (`uv sync --extra vllm`), build a CPU environment with "
        f".ci/vllm-env.sh, or name a Python that has vllm in {PYTHON_VARIABLE}"
    )


def pick_server_device(wanted: str) -> Device:
    """``auto`` is CUDA where an NVIDIA driver shows a GPU, else the CPU."""
    if wanted == "auto":
        return "cuda" if Path("/proc/driver/nvidia/gpus").is_dir() else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def _environment(device: Device) -> dict[str, str]:
    name, value = NO_FLASHINFER
    shared = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", name: os.environ.get(name, value)}
    return shared | (_CPU_ENV if device == "cpu" else {})
