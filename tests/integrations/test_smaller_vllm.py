"""vLLM serves smaller models, and those pruned further, with the greedy tokens of transformers: `make test-vllm`."""

import gc
import os

import pytest
import transformers as hf
from smaller_models import SMALLER, make_smaller, prompts

from optimum_moonshot import MoonshotConfig, MoonshotPruner

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: errors come as they are
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
vllm = pytest.importorskip("vllm")

PROMPTS = [prompts(1, length) for length in (5, 6, 7)]
TOKENS = 12


def greedy(model):
    settings = dict(max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [model.generate(ids, **settings)[0, ids.shape[1] :].tolist() for ids in PROMPTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folders of a smaller model, as it is and pruned further, and their tokens by transformers.

    All are saved before vLLM changes classes of transformers.
    """
    root, results = tmp_path_factory.mktemp("smaller"), {}
    for name in SMALLER:
        make_smaller(name, root / name)
        config = MoonshotConfig(solver="magnitude", pattern="2:4")
        pruner = MoonshotPruner.from_pretrained(root / name, config, dtype="auto")
        results[root / name] = greedy(pruner.model.eval())
        pruner.prune(progress=False)
        pruner.save_pretrained(root / f"{name}-packed", format="packed")
        results[root / f"{name}-packed"] = greedy(pruner.model)
    return lambda name: (root / name, results[root / name])


@pytest.fixture(autouse=True)
def released():
    yield
    gc.collect()
    vllm.distributed.cleanup_dist_env_and_memory()  # a failed load leaves its groups of processes


def load(folder):
    options = dict(dtype="float32", max_model_len=48, enforce_eager=True, distributed_executor_backend="uni")
    return vllm.LLM(str(folder), skip_tokenizer_init=True, **options)


SERVED = [name for name in SMALLER if name != "qwen2-heads"]


@pytest.mark.parametrize("name", [*SERVED, "llama-tied-biased-packed", "qwen2-packed", "gpt2-packed", "mixtral-packed"])
def test_the_tokens_are_those_of_transformers(name, saved):
    folder, expected = saved(name)
    settings = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": ids[0].tolist()} for ids in PROMPTS]
    results = load(folder).generate(requests, settings, use_tqdm=False)
    assert [list(result.outputs[0].token_ids) for result in results] == expected


def test_vllm_computes_the_size_of_the_heads_of_qwen2(saved):
    """It ignores `head_dim`, which Qwen2's configuration does not declare; transformers reads it."""
    assert not hasattr(hf.Qwen2Config(), "head_dim")
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        load(saved("qwen2-heads")[0])
