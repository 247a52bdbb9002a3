"""llm-compressor's side of real.py: prunes a model folder on given windows, and saves the weights.

llm-compressor pins other versions of the same libraries, so it runs in a separate environment:

    python -m venv peer && peer/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python benchmarks/real.py … --peer-python peer/bin/python --settings "2:4, llm-compressor SparseGPT"

The arguments are the model's folder, the windows (int64 [samples, tokens], by torch.save), the modifier, the pattern,
the sparsity, the dtype and the file for the state dict. Prints the CPU seconds and the peak increase of the resident
size of the pruning call, without imports and loading.
"""

import json
import sys
import time

import torch
from common import peak_above
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, windows, modifier, pattern, sparsity, dtype, output = sys.argv[1:]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    ids = torch.load(windows)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    options = {"sparsity": float(sparsity), "mask_structure": pattern, "targets": ["Linear"], "ignore": ["lm_head"]}
    recipe = {"SparseGPT": SparseGPTModifier, "Wanda": WandaPruningModifier}[modifier](**options)
    sizes = {"max_seq_length": ids.shape[1], "num_calibration_samples": len(ids)}
    embeddings = model.get_input_embeddings().weight
    dense = embeddings.detach().clone()  # 0.14 prunes a tied head, and with it the embeddings, although it is ignored
    started = time.process_time()
    peak = peak_above(lambda: oneshot(model=model, dataset=data, recipe=recipe, **sizes))
    seconds = time.process_time() - started
    with torch.no_grad():
        embeddings.copy_(dense)
    torch.save(model.state_dict(), output)
    print(json.dumps({"seconds": seconds, "peak_above_loaded": peak}))


if __name__ == "__main__":
    main()
