"""Started by `test_distributed_training.py` in two processes: training under DDP, FSDP 1 and 2, and the Trainer."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from masked_models import loss_of, pruned, zeros
from models import make, token_batches
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training_runs import CONFIG, samples, trainer

from optimum_moonshot import MoonshotCallback, MoonshotError, keep_sparsity
from optimum_moonshot.masks import Masks, find_pruned
from optimum_moonshot.objective.patterns import NM


def steps(model, optimizer):
    for batch in token_batches(12)[dist.get_rank() :: 2]:
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def data_parallel():
    model = pruned()
    before = zeros(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
    with keep_sparsity(wrapped, optimizer):
        steps(wrapped, optimizer)
    assert all(torch.equal(layer.matrix == 0, before[layer.name]) for layer in find_pruned(model))
    # Each process reads half of the data; masked gradients are averaged as usual.
    for layer in find_pruned(model):
        first = layer.parameter.data.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, layer.parameter), layer.name
    return {layer.name: layer.matrix.clone() for layer in find_pruned(model)}


def fully_sharded(expected):
    model = pruned()
    before = zeros(model)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with keep_sparsity(model, optimizer) as masks:
        steps(model, optimizer)
        assert masks.sparsity() == 0.5
        masks.check(NM(2, 4))
    for layer in find_pruned(model):
        whole = layer.parameter.full_tensor()
        assert torch.equal(whole == 0, before[layer.name]), layer.name
        assert torch.allclose(whole, expected[layer.name], atol=1e-4), layer.name
    callback = MoonshotCallback()
    state = hf.TrainerState(max_steps=6, is_world_process_zero=dist.get_rank() == 0)
    callback.on_train_begin(None, state, None, model=model, optimizer=optimizer)
    steps(model, optimizer)
    callback.on_train_end(None, state, None, model=model)  # one process prints, both count
    masks = Masks(find_pruned(model))
    if dist.get_rank() == 1:  # a wrong weight in one process is an error in all of them
        layer = masks.layers[0]
        layer.parameter.data.to_local()[~masks.keep[layer.name]] = 1.0
    try:
        masks.check()
    except MoonshotError as error:
        assert "not zero any more" in str(error)
    else:
        raise AssertionError("a removed weight came back unseen")


def under_the_trainer(folder):
    for callback, model in [(MoonshotCallback(), pruned()), (MoonshotCallback(CONFIG, begin_step=2), make("llama"))]:
        run = trainer(folder, model, callback, data=samples(64))
        assert run.args.world_size == 2
        run.train()
        assert run.state.log_history[-1]["moonshot_sparsity"] == 0.5
        for parameter in model.parameters():
            first = parameter.data.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, parameter)


def sharded_by_the_trainer(folder):
    """accelerate's FSDP 2, which it replaces by DDP on CPUs unless its state is set."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    for callback, model in [(MoonshotCallback(), pruned()), (MoonshotCallback(CONFIG, begin_step=2), make("llama"))]:
        before = zeros(model) if callback.config is None else None
        run = trainer(folder, model, callback, data=samples(64))
        state = run.accelerator.state
        state.fsdp_plugin, state.distributed_type, run.is_fsdp_enabled = plugin, DistributedType.FSDP, True
        try:
            run.train()
        except MoonshotError as error:
            assert before is None and "a model sharded by fully_shard cannot be pruned" in str(error)
            assert run.state.global_step == 0
            continue
        layers = find_pruned(run.model)
        assert all(isinstance(layer.parameter, DTensor) for layer in layers)
        assert all(torch.equal(layer.parameter.full_tensor() == 0, before[layer.name]) for layer in layers)


def flattened():
    """FSDP 1 is refused before the first step."""
    model = FullyShardedDataParallel(pruned(), device_id=torch.device("cpu"))
    try:
        MoonshotCallback().on_train_begin(None, hf.TrainerState(max_steps=6), None, model=model)
    except MoonshotError as error:
        assert "flattens the weights" in str(error) and "use fully_shard" in str(error)
    else:
        raise AssertionError("flattened weights were taken")


def refused():
    model = make("llama")
    fully_shard(model)
    callback = MoonshotCallback(CONFIG)
    state = hf.TrainerState(max_steps=6)
    try:
        callback.on_train_begin(None, state, None, model=model)
    except MoonshotError as error:
        assert "cannot be pruned" in str(error)
    else:
        raise AssertionError("a sharded model was taken")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fully_sharded(data_parallel())
    refused()
    flattened()
    under_the_trainer(sys.argv[1])
    sharded_by_the_trainer(sys.argv[1])
    (Path(sys.argv[1]) / f"done-{dist.get_rank()}").touch()  # their output may interleave
    dist.destroy_process_group()
