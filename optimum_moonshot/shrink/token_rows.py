"""A model with fewer tokens: the rows of its embeddings and its head, and all token ids in its configurations.

Nothing else changes, so the logits of the remaining tokens stay the same. The tensors with a row
for each token are those whose shape follows the size of the vocabulary in the configuration.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.packed_files import pruned_layers
from ..errors import MoonshotError, require
from ..model.calls import check_usable, close, evaluation_mode, model_device, model_result, to_device
from ..model.compaction import build_smaller, copied
from ..model.layers import visited
from ..model.model_info import config_fields, edited, embedded_tokens, last_line, on_meta_device
from ..model.structured_groups import probe_inputs
from ..model.weights import RESIDENT
from ..reports.record import PruningRecord

# Fields of configurations with token ids, also in lists; others with "tokens" in their names are numbers of tokens.
TOKEN_IDS = re.compile(r"(token_ids?|token_index|suppress_tokens|words_ids|forced_decoder_ids|sequence_bias)$")
OTHER_INPUTS = re.compile(r"(^|\.)(vision|audio|image|video|speech)[a-z_]*(_config\.|token)")
PER_LAYER = re.compile(r"(^|\.)vocab_size_per_layer_input$")


def check_tokens_removable(model: Any) -> None:
    """Check that rows of a model's embeddings can be removed, by its configuration.

    Raises:
        MoonshotError: another type of model, offloaded weights, other inputs than text, pruned embeddings, or
            embeddings of tokens in every block.
    """
    name = type(model).__name__
    require(isinstance(model, PreTrainedModel), f"model is a {name}", hint="pass a PreTrainedModel")
    text = model.main_input_name == "input_ids" and embedded_tokens(model) is not None
    require(text, f"{name} does not embed tokens of text", field="vocabulary")
    fields = dict(config_fields(model.config))
    other = next((field for field, value in fields.items() if OTHER_INPUTS.search(field) and value is not None), None)
    message = f"{name} also reads images or sound, for which its processor has tokens of its own ({other})"
    require(other is None, message, field="vocabulary", hint="load its language model alone")
    per_layer = any(PER_LAYER.search(field) for field in fields)
    require(not per_layer, f"every block of {name} has embeddings of tokens", field="vocabulary")
    resident = all(block.weights is RESIDENT for block in visited(model))
    require(resident, "its blocks are offloaded", field="model", hint="load it without `offload`")
    if PruningRecord.of(model) is not None:
        tables = {id(table.weight) for table in _tables(model)}
        pruned = next((name for name in pruned_layers(model) if id(model.get_parameter(name)) in tables), None)
        require(pruned is None, f"{pruned} is pruned, and the report has its shape", field="vocabulary")


def _tables(model: PreTrainedModel) -> list[Any]:
    """The embeddings, and the head if there is one."""
    return [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]


def configured_ids(model: PreTrainedModel, tokens: Sequence[int]) -> set[int]:
    """The token ids in a model's configurations.

    Raises:
        MoonshotError: an id has an embedding, but is not among the tokens.
    """
    ids, present, embedded = set[int](), set(tokens), embedded_tokens(model) or 0

    def collect(field: str, value: int) -> int:
        message = "the tokenizer has no such token"
        require(value in present or not 0 <= value < embedded, message, field=field, value=value, hint="correct it")
        ids.update({value} & present)
        return value

    for field, value in _settings(model):
        _changed(field, value, collect)
    return ids


def _settings(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The fields with token ids of a model's configurations."""
    fields = [*config_fields(model.config), *vars(getattr(model, "generation_config", None) or object).items()]
    return ((name, value) for name, value in fields if TOKEN_IDS.search(name))


def _changed(field: str, value: Any, change: Callable[[str, int], int]) -> Any:
    """The value of a field with its token ids changed."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return change(field, value)
    if field.endswith("forced_decoder_ids") and value is not None:  # pairs of a position and a token
        return [[position, _changed("", token, change)] for position, token in value]
    if isinstance(value, Mapping):  # sequences of tokens → bias
        return {_changed(field, key, change): bias for key, bias in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(field, entry, change) for entry in value)
    return value


@torch.no_grad()
def keep_tokens(model: PreTrainedModel, tokens: Sequence[int], numbers: Mapping[int, int]) -> PreTrainedModel:
    """A model of the same class with some of the tokens.

    Args:
        model: unchanged.
        tokens: ids of the tokens to keep; the result numbers them in this order.
        numbers: old → new ids, for configurations; also of tokens without an embedding.

    Returns:
        A new model with the same dtype and device, which `save_pretrained` and `from_pretrained` support.

    Raises:
        MoonshotError: the architecture has other tensors with tokens, or gives the remaining ones other logits.
    """
    change, rows = (embedded_tokens(model) or 0, len(tokens)), torch.tensor(tokens)

    def new(_: str, token: int) -> int:
        return numbers.get(token, token)  # an id without a new number, such as -1, stays

    config = _configuration(model, *change, new)
    smaller = on_meta_device(type(model), config).state_dict()
    selected: dict[tuple[int, torch.Size], Tensor] = {}  # tied tensors once
    for name, tensor in model.state_dict().items():
        key, size = (tensor.data_ptr(), tensor.shape), getattr(smaller.get(name), "shape", torch.Size())
        if tensor.shape != size and key not in selected:
            axes = [axis for axis, pair in enumerate(zip(tensor.shape, size, strict=False)) if pair == change]
            message = f"{name} {list(tensor.shape)} would be {list(size)} with {rows.numel()} tokens"
            require(len(axes) == 1, message, field="vocabulary")
            selected[key] = tensor.index_select(axes[0], rows.to(tensor.device))
            require(selected[key].shape == size, message, field="vocabulary")
    keys = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    state = copied({name: tensor for name, tensor in model.state_dict().items() if keys[name] not in selected})
    state |= {name: selected[key] for name, key in keys.items() if key in selected}
    small = build_smaller(model, config, state)
    for field, value in vars(getattr(small, "generation_config", None) or object).copy().items():
        if TOKEN_IDS.search(field):
            setattr(small.generation_config, field, _changed(field, value, new))
    _verify(model, small, rows)
    return small


def _configuration(model: PreTrainedModel, before: int, after: int, new: Callable[[str, int], int]) -> PreTrainedConfig:
    """The configuration with another size of the vocabulary, and new token ids."""
    fields = dict(config_fields(model.config))
    names = [name for name, value in fields.items() if name.rpartition(".")[2] == "vocab_size" and value == before]
    message = f"{type(model.config).__name__} has no vocab_size of {before}, the number of embeddings"
    require(bool(names), message, field="vocabulary")
    edit = {name: _changed(name, value, new) for name, value in fields.items() if TOKEN_IDS.search(name)}
    try:
        return edited(model.config, {**edit, **dict.fromkeys(names, after)})
    except Exception as error:  # the configuration's class may raise anything
        raise MoonshotError(f"{type(model.config).__name__} cannot have {after} tokens: {last_line(error)}") from error


def _verify(model: PreTrainedModel, small: PreTrainedModel, rows: Tensor) -> None:
    """Compare the logits of the remaining tokens, or the hidden states of a model without a head, on random tokens.

    Raises:
        MoonshotError: the results differ.
    """
    inputs, device = {name: ids % len(rows) for name, ids in probe_inputs(model).items()}, model_device(model)
    before = {name: rows[ids] for name, ids in inputs.items()}
    with evaluation_mode(model), evaluation_mode(small):
        expected = model_result(model, to_device(before, device))
        result = model_result(small, to_device(inputs, device))
    if expected.shape != result.shape:
        expected = expected.index_select(-1, rows.to(expected.device))
    message = f"{type(model).__name__} with fewer tokens differs in its results: nothing changed"
    require(close(result, expected), message, field="vocabulary")
    check_usable(model, small, inputs)
