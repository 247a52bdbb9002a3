"""Real vocabularies of three kinds: byte-level BPE, BPE with byte fallback, WordPiece. `make test-real` runs this.

The corpus is the demo's, so that the figures depend on this repository alone.
"""

import json
import subprocess
import sys

import pytest
import real_models
import torch
import transformers as hf
from command_line import DEMO

from optimum_moonshot import MoonshotPruner

pytestmark = pytest.mark.real
TEXT = (DEMO / "calibration.txt").read_text(encoding="utf-8")
PROMPT = "The capital of France is"
# Largest fractions of the parameters and of additional tokens on held-out text.
MODELS = {"smollm2": (0.87, 0.08), "gemma3": (0.55, 0.08), "minilm": (0.80, 0.12)}
GENERATED = """
import json, sys
import transformers as hf
folder, prompt = sys.argv[1:]
model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
tokenizer = hf.AutoTokenizer.from_pretrained(folder)
ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=24, do_sample=False)[0].tolist()
assert "optimum_moonshot" not in sys.modules
print(json.dumps([ids, tokenizer.decode(ids)]))
"""


def in_a_fresh_process(folder):
    command = [sys.executable, "-c", GENERATED, str(folder), PROMPT]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(run.stdout.splitlines()[-1])


def smaller(folder, tmp_path, texts, cls=hf.AutoModelForCausalLM):
    """The report of a smaller vocabulary, and old → new ids of the saved one."""
    before = hf.AutoTokenizer.from_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float32)
    pruner = MoonshotPruner(model, tokenizer=before)
    report = pruner.shrink(vocabulary=texts, progress=False)
    pruner.save_pretrained(tmp_path)
    after = hf.AutoTokenizer.from_pretrained(tmp_path)
    numbers = {before.convert_tokens_to_ids(token): new for token, new in after.get_vocab().items()}
    for start in range(0, len(TEXT), 20_000):
        piece = TEXT[start : start + 20_000]
        old, new = before(piece, truncation=False)["input_ids"], after(piece, truncation=False)["input_ids"]
        if numbers.keys() >= set(old):  # not where a piece ends inside of a word
            assert [numbers[token] for token in old] == new
        assert before.decode(old) == after.decode(new)
    return report, numbers


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_generation_is_equal_and_most_rows_are_removed(name, tmp_path):
    folder = getattr(real_models, name)()
    ids, text = in_a_fresh_process(folder)
    report, numbers = smaller(folder, tmp_path, [TEXT, text])
    share, more = MODELS[name]
    assert report.parameters[1] < share * report.parameters[0]
    before, after = report.vocabulary.tokens_per_character
    assert before <= after < (1 + more) * before
    assert in_a_fresh_process(tmp_path) == [[numbers[token] for token in ids], text]


def test_embeddings_of_sentences_are_equal(tmp_path):
    folder = real_models.minilm()
    report, _ = smaller(folder, tmp_path, [TEXT], hf.AutoModel)
    share, more = MODELS["minilm"]
    assert report.parameters[1] < share * report.parameters[0]
    before, after = report.vocabulary.tokens_per_character
    assert before <= after < (1 + more) * before
    outputs = []
    for path in (folder, tmp_path):
        model, tokenizer = hf.AutoModel.from_pretrained(path), hf.AutoTokenizer.from_pretrained(path)
        with torch.no_grad():
            outputs.append(model(**tokenizer(TEXT[:400], return_tensors="pt")).last_hidden_state)
    torch.testing.assert_close(*outputs)
    assert not (tmp_path / "vocab.txt").exists()
