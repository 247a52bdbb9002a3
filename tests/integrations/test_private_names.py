"""The private names of other libraries that this package uses: all are listed, and a new release still has them."""

import ast
import inspect
import re

import accelerate.hooks
import peft
import peft.tuners.lora.layer as lora
import pytest
import torch
import transformers as hf
from command_line import DEMO, ROOT
from models import make
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PreTrainedModel

from optimum_moonshot.integrations import peft as our_peft

PACKAGE = ROOT / "optimum_moonshot"
# Called or replaced, each with its parameters.
FUNCTIONS = {
    hf.PreTrainedModel: {
        "_adjust_missing_and_unexpected_keys": ["self", "loading_info"],
        "_get_dtype_plan": ["self", "dtype"],
        "_init_weights": ["self", "module"],
    },
    Wav2Vec2PreTrainedModel: {
        "_get_feature_vector_attention_mask": ["self", "feature_vector_length", "attention_mask", "add_adapter"],
    },
    MixtralExperts: {"_apply_gate": ["self", "gate_up_out"]},
    lora.ParamWrapper: {"_cast_input_dtype": ["self", "x", "dtype"], "_remove_parametrizations": ["self"]},
    lora: {"_LoraParameterProxy": ["delta_weight"]},
    our_peft: {"_maybe_include_all_linear_layers": ["peft_config", "model"]},
    peft.LoraConfig: {"_register_custom_module": ["self", "mapping"]},
    nn.Module: {"_call_impl": ["self", "args", "kwargs"]},
    nn.Conv2d: {"_conv_forward": ["self", "input", "weight", "bias"]},
    torch.distributed.distributed_c10d: {"_get_default_store": [], "_set_pg_timeout": ["timeout", "group"]},
}
# Read or written. A class has them, or its instances do.
ATTRIBUTES = {
    hf.PreTrainedModel: ["_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_supports_sdpa"],
    torch.optim.Optimizer: ["_optimizer_step_post_hooks"],
    nn.Conv2d: ["_reversed_padding_repeated_twice"],
    nn.Module: [
        "_buffers", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_modules",
        "_non_persistent_buffers_set", "_parameters",
    ],
    torch._C: ["_current_graph_task_id", "_functorch", "_is_tracing", "_len_torch_dispatch_stack"],
    torch.ops.mkldnn: ["_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"],
}  # fmt: skip
# Of a loaded model and its configuration, which `test_a_loaded_model_has_the_names` reads.
LOADED = ["_weight_conversions", "_attn_implementation", "_name_or_path"]
INTERNAL = ["_attn_implementation_internal", "_experts_implementation"]
# In the source of these functions and classes, or of a base class.
IN_SOURCE = {
    "_hf_hook": accelerate.hooks.add_hook_to_module,
    "_commit_hash": hf.PreTrainedConfig,
    "_device_mesh": hf.PreTrainedModel,
    "_is_hf_initialized": hf.PreTrainedModel._initialize_weights,
    "_hf_peft_config_loaded": hf.integrations.PeftAdapterMixin,
    "_is_quantized": hf.PreTrainedConfig,
    "_raise_exceptions_for_": hf.utils.hub.cached_files,
    "_orig_mod": torch._dynamo.OptimizedModule,
}
OF_VLLM = ["_already_called_process_weights_after_loading", "_get_weights_iterator", "_prepare_weights"]  # test_vllm.py
PUBLIC = ["_C", "_asdict", "_replace"]  # torch._C, whose members are listed, and methods of named tuples
IN_FILES = ["_codes", "_embeds", "_internal", "_meta", "_scale", "_shape", "_token_"]
OURS = re.compile("_moonshot_.*")


def used_and_defined():
    """The private names in the code of the package, each with a place, and the names that the package defines."""
    used, defined = {}, set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names, line = [], getattr(node, "lineno", 0)
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name):
                    names = [name]
                case ast.Constant(value=str(name)):
                    names = [name]
                case ast.ImportFrom(level=0, names=imported):
                    names = [alias.name for alias in imported]
            used |= {name: f"{path.name}:{line}" for name in names if re.fullmatch("_[a-zA-Z]\\w+|_C", name)}
    return used, defined


def test_every_private_name_is_listed():
    used, defined = used_and_defined()
    listed = {name for table in (FUNCTIONS, ATTRIBUTES) for names in table.values() for name in names}
    listed |= {*LOADED, *INTERNAL, *IN_SOURCE, *OF_VLLM, *PUBLIC, *IN_FILES}
    unlisted = {name: place for name, place in used.items() if name not in defined and not OURS.fullmatch(name)}
    assert {name: place for name, place in unlisted.items() if name not in listed} == {}
    assert listed - used.keys() == set()


@pytest.mark.parametrize("owner, name", [(owner, name) for owner, names in FUNCTIONS.items() for name in names])
def test_a_function_has_the_parameters(owner, name):
    function = getattr(owner, name)
    assert list(inspect.signature(function).parameters) == FUNCTIONS[owner][name]


def test_the_attributes_exist():
    instances = {nn.Module: nn.Linear(1, 1), nn.Conv2d: nn.Conv2d(1, 1, 1), torch.optim.Optimizer: None}
    instances[torch.optim.Optimizer] = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for owner, names in ATTRIBUTES.items():
        missing = [name for name in names if not hasattr(instances.get(owner, owner), name)]
        assert missing == [], owner


def test_a_loaded_model_has_the_names():
    model = hf.AutoModelForCausalLM.from_pretrained(DEMO)
    for name in LOADED:
        assert hasattr(model, name) or hasattr(model.config, name), name
    assert all(hasattr(make("mixtral").config, name) for name in INTERNAL)


@pytest.mark.parametrize("name", IN_SOURCE)
def test_the_source_names_an_attribute(name):
    named = IN_SOURCE[name]
    sources = [cls for cls in named.__mro__ if cls is not object] if isinstance(named, type) else [named]
    assert any(name in inspect.getsource(source) for source in sources)
