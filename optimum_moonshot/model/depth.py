"""Remove whole blocks from a model: `remove_blocks`.

A block adds an update to the hidden state that it reads, so removing it is the same as returning its input. The
smaller model must be of the same class with another configuration. The fields to change are searched, without a table,
in this order:

* integers equal to the number of blocks;
* lists with one entry per block (`layer_types`, `no_rope_layers`), without the entries of the removed blocks;
* lists of indices of blocks (`mlp_only_layers`), and the number of first blocks of a kind (`first_k_dense_replace`).

A configuration is accepted if a model created from it (on the meta device) has exactly the remaining shapes, and if
every remaining block has the same kind as before: the same modules with the same attributes, such as a sliding window,
except for its index. A family that computes the kind of a block from its index is refused if the kind would change.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..data.batches import Batch
from ..errors import MoonshotError, reason, require
from .calls import first_tensor, split_hidden
from .compaction import build_smaller, check_one_device, copied, verify_smaller
from .layers import find_blocks, require_resident
from .model_info import config_fields, edited, last_line, on_meta_device
from .structured_groups import probe_inputs

Edit = dict[str, Any]  # field of a configuration → new value
# Fields that are likely to count blocks, which are tried first, and lists with entries of another kind.
_COUNTS = re.compile(r"layer|depth|block")
_OTHER_LISTS = re.compile(r"token|_ids?$|architectures|limit")
# The blocks whose outputs a backbone returns; None is the default, the last one.
_OUTPUTS = re.compile(r"(^|\.)(out_features|out_indices)$")
# Most integers that count the same blocks, and most fields of kinds that change together.
MOST_COUNTS, MOST_KINDS = 2, 2


@dataclasses.dataclass(frozen=True)
class BlockRemoval:
    """The changes by `remove_blocks`."""

    blocks: tuple[str, ...]  # names of the removed blocks in the larger model
    config: dict[str, tuple[Any, Any]]  # changed field → value before and after
    parameters: tuple[int, int]  # before and after

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        changes = {name: list(change) for name, change in self.config.items()}
        return {"blocks": list(self.blocks), "config": changes, "parameters": list(self.parameters)}


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A list of blocks from which some are removed."""

    name: str
    size: int
    keep: tuple[int, ...]  # ascending indices


def remove_blocks(
    model: PreTrainedModel, blocks: Collection[int], inputs: Batch | None = None, copies: bool = True
) -> tuple[PreTrainedModel, BlockRemoval]:
    """A smaller model of the same class without some blocks, as if each of these returned its input.

    Args:
        model: unchanged.
        blocks: the indices of the blocks to remove, in the model's order.
        inputs: for a forward pass of both models, in place of random tokens or pixels.
        copies: whether the smaller model has copies of the tensors; False shares them with a model that is not used
            any longer.

    Returns:
        A new model with the same dtype and device, which `save_pretrained` and `from_pretrained` support, and the
        changes. Caches of keys and values have no entry for the removed blocks.

    Raises:
        MoonshotError: blocks that the model does not have, or all blocks of a list; no configuration of the
            architecture describes the remaining blocks; or the smaller model has other outputs.
    """
    require(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}", hint="pass a PreTrainedModel")
    stacks, removed = _stacks(model, blocks)
    require_resident(model)
    check_one_device(model)
    inputs = inputs or probe_inputs(model)
    config = BlockSearch(model).configuration(stacks)
    state = model.state_dict()
    sources = {new: name for name in state if (new := _renamed(name, stacks)) is not None}
    tensors = {name: state[source] for name, source in sources.items()}
    small = build_smaller(model, config, copied(tensors) if copies else tensors, sources)
    originals = dict(find_blocks(model))
    left = [block for block in originals.items() if block[0] not in removed]
    pairs = list(zip(left, find_blocks(small), strict=True))
    try:
        with skipping(originals[name] for name in removed):
            verify_smaller(model, small, inputs, pairs)
    except (RuntimeError, TypeError, IndexError, KeyError) as error:
        raise MoonshotError(f"{type(model).__name__} does not run without the blocks: {error}") from error
    before, after = dict(config_fields(model.config)), dict(config_fields(config))
    changes = {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}
    return small, BlockRemoval(removed, changes, (model.num_parameters(), small.num_parameters()))


@contextmanager
def skipping(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which the hidden state in a block's output is its input; the rest, such as a bias, is unchanged.

    A block that changes the shape of the hidden state raises `MoonshotError`.
    """

    def skip(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden, after = split_hidden(args, kwargs)[0], first_tensor(output)
        message = f"a block maps a hidden state of {list(hidden.shape)} to {list(after.shape)}, so it cannot be removed"
        require(hidden.shape == after.shape, message)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_hook(skip, with_kwargs=True).remove)
        yield


def _stacks(model: nn.Module, blocks: Collection[int]) -> tuple[list[_Stack], tuple[str, ...]]:
    """The lists from which blocks are removed, and the names of these blocks."""
    names = [name for name, _ in find_blocks(model)]
    wrong = [block for block in blocks if type(block) is not int or not 0 <= block < len(names)]
    hint = f"use indices from 0 to {len(names) - 1}"
    require(bool(blocks), "no block to remove", field="blocks", value=list(blocks), hint=hint)
    require(not wrong, f"the model has {len(names)} blocks", field="blocks", value=wrong[:1], hint=hint)
    removed = tuple(names[block] for block in sorted(set(blocks)))
    stacks = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in removed):
        owner = model.get_submodule(parent)
        require(isinstance(owner, nn.ModuleList), f"{parent} is a {type(owner).__name__}, not a list", field="blocks")
        keys = [key for key, _ in owner.named_children() if f"{parent}.{key}" not in removed]
        left = any(f"{parent}.{key}" in names for key in keys)
        require(left, f"{parent} would have no block", field="blocks", hint="leave one of them")
        stacks.append(_Stack(parent, len(list(owner.children())), tuple(map(int, keys))))
    return stacks, removed


def _renamed(name: str, stacks: Iterable[_Stack]) -> str | None:
    """The name of a module or tensor in the smaller model; None if it belongs to a removed block."""
    for stack in stacks:
        if name.startswith(f"{stack.name}."):
            index, dot, rest = name[len(stack.name) + 1 :].partition(".")
            return f"{stack.name}.{stack.keep.index(int(index))}{dot}{rest}" if int(index) in stack.keep else None
    return name


class BlockSearch:
    """The search of a configuration without some blocks."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.reason = model, ""
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        try:
            self.base = on_meta_device(type(model), edited(model.config, {}))
        except Exception as error:
            raise MoonshotError(f"{type(model).__name__} cannot be created anew ({reason(error)})") from error

    @cached_property
    def kinds(self) -> list[frozenset[int]]:
        """The indices of blocks of the same kind, such as attention and recurrence; kinds of different lists differ."""
        kinds: dict[int, tuple[_Stack, set[int]]] = {}  # by the index of their first block
        names = [name for name, _ in find_blocks(self.model)]
        blocks = [self.base.get_submodule(name) for name in names]
        for index, name in enumerate(names):
            parent = name.rpartition(".")[0]
            for first, (stack, members) in kinds.items():
                same = stack.name == parent
                if same and _changed_kind(blocks[first], blocks[index], stack, index - first) is None:
                    members.add(index)
                    break
            else:
                size = len(list(self.base.get_submodule(parent).children()))
                kinds[index] = _Stack(parent, size, tuple(range(size))), {index}
        return [frozenset(members) for _, members in kinds.values()]

    def refusal(self, blocks: Collection[int]) -> str | None:
        """Why some blocks cannot be removed, as far as can be told without weights; None if they can."""
        try:
            config = self.configuration(_stacks(self.model, blocks)[0])
        except MoonshotError as error:
            return str(error)
        if _counts_tokens(config) or not _counts_tokens(self.model.config):
            return None
        return "no remaining block has a cache of keys and values, from whose length the position of a token follows"

    def configuration(self, stacks: Sequence[_Stack]) -> PreTrainedConfig:
        """The configuration of the remaining blocks, one list after the other.

        Raises `MoonshotError` with the reason if there is none.
        """
        config = self.model.config
        for count in range(1, len(stacks) + 1):
            config = self._without(config, stacks[count - 1], stacks[:count])
        return config

    def _without(self, config: PreTrainedConfig, stack: _Stack, stacks: Sequence[_Stack]) -> PreTrainedConfig:
        self.reason, counted = "", list[Edit]()
        for edit in _count_edits(config, stack):
            trial, fits = self._trial(config, edit, stacks)
            if trial is not None and fits:
                return trial
            counted += [edit] if trial is not None else []
        for edit in counted:
            for other in _kind_edits(config, stack, edit):
                trial, fits = self._trial(config, {**edit, **other}, stacks)
                if trial is not None and fits:
                    return trial
        why = f" ({self.reason})" if self.reason else ""
        remaining = f"{len(stack.keep)} of {stack.size} blocks of {stack.name}"
        message = f"{type(config).__name__} has no setting with these {remaining}{why}"
        raise MoonshotError(message, field="blocks", hint="remove other blocks")

    def _trial(
        self, config: PreTrainedConfig, edit: Edit, stacks: Sequence[_Stack]
    ) -> tuple[PreTrainedConfig | None, bool]:
        """The edited configuration if it has the remaining number of blocks, and whether it describes these."""
        try:
            trial = edited(config, edit)
            small = on_meta_device(type(self.model), trial)
            counts = [len(list(small.get_submodule(stack.name).children())) for stack in stacks]
        except Exception as error:
            if any(_COUNTS.search(name) for name in edit):
                self.reason = self.reason or last_line(error)
            return None, False
        if counts != [len(stack.keep) for stack in stacks]:
            return None, False
        difference = self._difference(small, stacks)
        self.reason = self.reason or difference or ""
        return trial, difference is None

    def _difference(self, small: nn.Module, stacks: Sequence[_Stack]) -> str | None:
        """The first tensor or attribute of a block in which a smaller model differs from the expected one, or None."""
        for stack in stacks:
            blocks, others = (list(model.get_submodule(stack.name).children()) for model in (self.base, small))
            for new, old in enumerate(stack.keep):
                change = _changed_kind(blocks[old], others[new], stack, new - old)
                if change is not None:
                    return f"block {old}: {change}"
        names = {name: _renamed(name, stacks) for name in self.shapes}
        expected = {new: self.shapes[name] for name, new in names.items() if new is not None}
        shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
        for name in [*expected, *shapes]:
            if expected.get(name) != shapes.get(name):
                before, after = (str(list(sizes[name])) if name in sizes else "absent" for sizes in (expected, shapes))
                return f"{name} would be {after} instead of {before}"
        return None


def _counts_tokens(config: PreTrainedConfig) -> bool:
    """Whether the cache of a model knows how many tokens it has seen, which the cache of recurrent blocks does not."""
    try:
        DynamicCache(config=config.get_text_config(decoder=True)).get_seq_length()
    except Exception:  # of any type, in code of transformers; also a configuration without blocks of a decoder
        return False
    return True


def _count_edits(config: PreTrainedConfig, stack: _Stack) -> Iterator[Edit]:
    """Changes of the number of blocks, with and without the lists that have an entry for each, likely ones first."""
    fields = dict(config_fields(config))
    counts = [name for name, value in fields.items() if type(value) is int and value == stack.size]
    counts.sort(key=lambda name: _COUNTS.search(name) is None)
    for together in range(1, MOST_COUNTS + 1):
        for chosen in combinations(counts, together):
            edit: Edit = dict.fromkeys(chosen, len(stack.keep))
            owner = chosen[0].rpartition(".")[0]
            entries = {
                name: remaining
                for name, value in fields.items()
                if name.rpartition(".")[0] == owner and (remaining := _remaining(name, value, stack)) is not None
            }
            yield {**edit, **entries}
            if entries:
                yield edit
            outputs = {name: None for name in fields if _OUTPUTS.search(name)}
            if outputs:
                yield {**edit, **outputs}


def _remaining(name: str, value: Any, stack: _Stack) -> Any:
    """The entries of the remaining blocks in a list, or in a dictionary by index; None for other values."""
    if isinstance(value, list | tuple) and len(value) == stack.size and not _OTHER_LISTS.search(name):
        return [value[index] for index in stack.keep]
    if isinstance(value, dict) and value and _COUNTS.search(name) and all(str(key).isdecimal() for key in value):
        return {type(key)(stack.keep.index(int(key))): value[key] for key in value if int(key) in stack.keep}
    return None


def _kind_edits(config: PreTrainedConfig, stack: _Stack, edit: Edit) -> Iterator[Edit]:
    """Changes of indices and of the number of first blocks, which may keep the kinds of the remaining blocks."""
    changes: Edit = {}
    for name, value in config_fields(config):
        entries = value if isinstance(value, list | tuple) else ()
        distinct = len(set(map(str, entries))) == len(entries)
        if entries and distinct and all(type(index) is int and 0 <= index < stack.size for index in entries):
            changes[name] = [stack.keep.index(index) for index in value if index in stack.keep]
        elif type(value) is int and 0 < value < stack.size and name not in edit:
            changes[name] = sum(index < value for index in stack.keep)
        if name in changes and changes[name] == value:
            del changes[name]
    subsets = chain.from_iterable(combinations(changes, count) for count in range(1, MOST_KINDS + 1))
    yield from ({name: changes[name] for name in chosen} for chosen in subsets)


def _changed_kind(block: nn.Module, other: nn.Module, stack: _Stack, shift: int) -> str | None:
    """The first difference of a block on the meta device from one whose index differs by `shift`; None if equal.

    The index itself changes, and a list with an entry for each block. Modules that drop activations in training alone
    may differ: their rate often depends on the depth.
    """
    modules, others = dict(block.named_modules()), dict(other.named_modules())
    if modules.keys() != others.keys():
        return f"{min(modules.keys() ^ others.keys())} is in one of the two models only"
    for name, module in modules.items():
        types = [type(module).__name__, type(others[name]).__name__]
        if any("drop" in kind.lower() for kind in types):
            continue
        if type(module) is not type(others[name]):
            return f"{name} would be a {types[1]} instead of a {types[0]}"
        before, after = _attributes(module), _attributes(others[name])
        for key in before.keys() | after.keys():
            x, y = before.get(key), after.get(key)
            index = type(x) is int and type(y) is int and y - x == shift
            entries = isinstance(x, list | tuple) and len(x) == stack.size and [x[position] for position in stack.keep]
            if x != y and not index and y != entries:
                return f"{name}.{key} would be {y!r} instead of {x!r}".removeprefix(".")
    return None


def _attributes(module: nn.Module) -> Mapping[str, Any]:
    """The public attributes that are numbers, strings, None, or lists or dictionaries."""
    kinds = (int, float, str, type(None), list, tuple, dict)
    return {key: value for key, value in vars(module).items() if key[0] != "_" and isinstance(value, kinds)}
