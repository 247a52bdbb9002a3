"""One thread per test process: several processes with several threads each spend their time waiting for each other."""

import pytest
import torch
import transformers as hf

torch.set_num_threads(1)


@pytest.fixture
def tokenizer():
    """One token per printable character, as many as the tiny models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3, **{chr(32 + i): 4 + i for i in range(92)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
