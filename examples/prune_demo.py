"""Prune the small model in this folder to 2:4: by SparseGPT, by the recipe, and by the recipe with 4-bit survivors.

Usage: python examples/prune_demo.py [OUTPUT]
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned, perplexity

DEMO = Path(__file__).parent / "demo_model"
CALIBRATION, HELDOUT = str(DEMO / "calibration.txt"), str(DEMO / "heldout.txt")


def main(output: str = "outputs/demo") -> None:
    """Print a line for each model; the models are saved in folders in `output`."""
    started, started_cpu = time.perf_counter(), time.process_time()
    logging.disable_progress_bar()
    simple = MoonshotConfig(solver="sparsegpt", pattern="2:4", lam=1, sequence_length=256)
    recipe = MoonshotConfig.recipe("2:4", "one-shot", sequence_length=256)

    print("model                perplexity  file, MB  CPU seconds")
    pruner = MoonshotPruner.from_pretrained(DEMO, recipe, dtype="auto")
    row("dense", DEMO, pruner.model, pruner.tokenizer)
    prune("2:4, SparseGPT", DEMO, simple, f"{output}/sparsegpt")

    # The rotation leaves the model's function unchanged. Both recipes use it, so it is learned once.
    start = time.process_time()
    pruner.rotate(CALIBRATION, progress=False)
    pruner.save_pretrained(f"{output}/rotated")
    seconds, recipe = time.process_time() - start, replace(recipe, rotation=None)
    prune("2:4, recipe", f"{output}/rotated", recipe, f"{output}/recipe", seconds)
    recipe = replace(recipe, bits=4)
    prune("2:4, recipe, 4 bits", f"{output}/rotated", recipe, f"{output}/recipe-int4", seconds)
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    print(f"\ntotal: {cpu:.0f} s CPU, {seconds:.0f} s wall")
    print(f'load a model with load_pruned("{output}/recipe-int4")')


def prune(name: str, model: str | Path, config: MoonshotConfig, output: str, seconds: float = 0.0) -> None:
    """Prune a model, save it to `output` in packed form, and print the line of the saved model."""
    start = time.process_time()
    pruner = MoonshotPruner.from_pretrained(model, config, dtype="auto")
    pruner.prune(CALIBRATION, progress=False)
    pruner.save_pretrained(output, format="packed")
    seconds += time.process_time() - start
    row(name, output, load_pruned(output), pruner.tokenizer, f"{seconds:11.1f}")


def row(name: str, folder: str | Path, model, tokenizer, seconds: str = "") -> None:
    """Print perplexity on held-out text, file size and CPU seconds of a model."""
    value = perplexity(model, tokenizer, HELDOUT, sequence_length=256).value
    megabytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6
    print(f"{name:<20} {value:10.2f}  {megabytes:8.2f}  {seconds}".rstrip(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
