"""The peer of `publish_row`: an adapter merged into its base and handed over as whole weights,
as TRL does.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.kit.workload import ALPHA, RANK
from benchmarks.serving.plain_server import PlainServer
from lorad.protocol.batch import Batch
from tests.conformance.reference import reference_logprobs

WEIGHTS = "model.safetensors"
ADAPTER_STD = 0.01


class Merged:
    """The model of a directory with a LoRA on every linear but the head."""

    def __init__(self, directory: Path) -> None:
        logging.disable_progress_bar()
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            # peft reads a property that transformers has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            self.model: Any = get_peft_model(base, config).eval()

    def change(self, seed: int) -> None:
        """What a step would do to the adapter."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(0, ADAPTER_STD, generator=generator)

    def merge(self) -> None:
        self.model.merge_adapter()

    def unmerge(self) -> None:
        self.model.unmerge_adapter()

    def write(self, directory: Path) -> int:
        """Every weight under the base's own names (trl.generation.vllm_generation); bytes."""
        weights = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.data
            for name, parameter in self.model.named_parameters()
            if ".lora_" not in name
        }
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        return (directory / WEIGHTS).stat().st_size

    async def difference(self, server: PlainServer) -> float:
        """The largest of log-probabilities (nats) between this model, not merged, and what the server has
        taken.
        """
        prompt, completion = np.arange(5, 21, dtype=np.int32), np.arange(40, 56, dtype=np.int32)
        with torch.no_grad():
            expected = reference_logprobs(self.model, Batch.of([(prompt, [completion])])).numpy()
        return float(np.abs(await server.score(prompt, completion) - expected).max())
