"""all-MiniLM-L6-v2, a folder of sentence-transformers: pruned, quantized, packed, and opened by its own library.

`make test-real` runs this.
"""

import re
import shutil

import numpy as np
import pytest
import real_models
import torch
import transformers as hf
from command_line import DEMO

from optimum_moonshot import MoonshotConfig, MoonshotPruner, agreement, load_pruned, verify

pytestmark = pytest.mark.real
# The settings of each run, and the least cosine to the dense model's embeddings, and fraction with the same nearest
# other sentence, of held-out sentences.
RUNS = {
    "2:4": (dict(pattern="2:4"), (0.75, 0.4)),
    "4 bits": (dict(solver="sparsegpt", sparsity=0.0, bits=4), (0.93, 0.7)),
    "2:4, 4 bits": (dict(pattern="2:4", bits=4), (0.75, 0.4)),
}


def sentences(name, count):
    text = " ".join((DEMO / name).read_text(encoding="utf-8").split())
    return [part for part in re.split(r"(?<=[.!?]) ", text) if 40 < len(part) < 400][:count]


CALIBRATION, HELDOUT = sentences("calibration.txt", 128), sentences("heldout.txt", 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy, so that a test cannot change the installed package."""
    return shutil.copytree(real_models.minilm(), tmp_path_factory.mktemp("minilm") / "model")


@pytest.mark.parametrize("name", RUNS)
def test_the_saved_folder_works_in_sentence_transformers(folder, tmp_path, name):
    library = pytest.importorskip("sentence_transformers")
    fields, (least_cosine, least_same) = RUNS[name]
    config = MoonshotConfig(num_samples=len(CALIBRATION), sequence_length=64, **fields)
    pruner = MoonshotPruner.from_pretrained(folder, config)
    dense = hf.AutoModel.from_pretrained(folder)
    pruner.prune(CALIBRATION, progress=False)
    result = agreement(pruner.model, dense, HELDOUT, pruner.tokenizer)
    print(f"{name}: cosine {result.value:.3f}, the same nearest sentence {result.neighbours:.1%}")
    assert result.value > least_cosine and result.neighbours > least_same
    pruner.save_pretrained(tmp_path / "dense")
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    assert verify(tmp_path / "dense") and verify(tmp_path / "packed")

    before, after = (library.SentenceTransformer(str(path), device="cpu") for path in (folder, tmp_path / "dense"))
    assert [type(part) for part in after] == [type(part) for part in before]  # pooling and normalization included
    expected, vectors = (model.encode(HELDOUT, normalize_embeddings=False) for model in (before, after))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert abs((expected * vectors).sum(1).mean() - result.value) < 1e-4

    packed = load_pruned(tmp_path / "packed", runtime="packed")
    inputs = pruner.tokenizer(HELDOUT[:4], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = pruner.model.eval()(**inputs).last_hidden_state
        error = (packed(**inputs).last_hidden_state - states).norm() / states.norm()
    print(f"{name}: relative error of the packed model {error:.2e}")
    assert error < (0.06 if fields.get("bits") else 1e-5)  # 0.044 measured: products of codes have inputs in 8 bits
