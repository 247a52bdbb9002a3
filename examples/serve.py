"""Generate text with a packed checkpoint, with dense and with packed weights, and in vLLM if it is installed.

Usage: python examples/serve.py FOLDER [PROMPT]

Packed weights are faster where the model exceeds the processor's caches: use one of at least a billion parameters.
`vllm serve FOLDER` starts a server.
"""

import importlib.util
import sys
import time

import torch
from transformers import AutoTokenizer

from optimum_moonshot import load_pruned


def main(folder: str, prompt: str = "The history of the city", tokens: int = 64) -> None:
    """Print the speed and the bytes of the weights for each runtime, then the text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    for runtime in ("dense", "packed", "auto"):
        model = load_pruned(folder, runtime=runtime, dtype="auto", device_map=device)
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        model.generate(**inputs, **length)  # includes compilation
        started = time.perf_counter()
        output = model.generate(**inputs, **length)[0].tolist()  # waits for the device
        rate = tokens / (time.perf_counter() - started)
        print(f"{runtime:6} {rate:7.1f} tokens/s, {sum(weights.values()) / 2**20:8.2f} MiB of weights")
    print(tokenizer.decode(output))

    if importlib.util.find_spec("vllm"):
        from vllm import LLM, SamplingParams

        print(LLM(folder).generate(prompt, SamplingParams(max_tokens=tokens))[0].outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
