"""The divergence of a changed model's predictions from those of the dense one."""

import pytest
import torch
from models import make, token_batches
from torch.nn import functional

from optimum_moonshot.model import losses
from optimum_moonshot.model.losses import IGNORED, Divergence, labels_of


def outputs(model, batch):
    with torch.no_grad():
        return model.eval()(**batch)


def literal(model, changed, batch):
    """KL(dense ‖ changed) of every sample over all classes."""
    dense, other = (outputs(each, batch).logits.double().log_softmax(-1) for each in (model, changed))
    by_token = functional.kl_div(other, dense, log_target=True, reduction="none").sum(-1)
    labelled = labels_of(model, batch) != IGNORED
    return torch.stack([values[mask].mean() for values, mask in zip(by_token, labelled, strict=True)])


def measured(model, changed, batches):
    divergence = Divergence(model)
    for batch in batches:
        divergence.remember(outputs(model, batch), batch)
    return [divergence(outputs(changed, batch), batch) for batch in batches]


def models():
    torch.manual_seed(0)
    model = make("llama")
    changed = make("llama")
    changed.load_state_dict({name: 1.1 * tensor for name, tensor in model.state_dict().items()})
    return model, changed


@pytest.mark.parametrize("padded", [False, True])
def test_over_all_classes_it_is_the_divergence(monkeypatch, padded):
    model, changed = models()
    monkeypatch.setattr(losses, "TOP", 10**6)
    batches = token_batches(padded=padded)
    for batch, values in zip(batches, measured(model, changed, batches), strict=True):
        torch.testing.assert_close(values.double(), literal(model, changed, batch), rtol=1e-3, atol=1e-5)


def test_over_the_most_probable_classes_it_is_a_lower_bound_that_grows_with_their_number(monkeypatch):
    model, changed = models()
    batches, former = token_batches(), 0.0
    exact = torch.cat([literal(model, changed, batch) for batch in batches]).mean()
    for top in (1, 4, 16):
        monkeypatch.setattr(losses, "TOP", top)
        bound = torch.cat(measured(model, changed, batches)).mean()
        assert former <= bound <= exact + 1e-6
        former = bound
    assert former > 0


def test_it_is_zero_for_the_dense_model_in_batches_of_any_size():
    model, batches = make("llama"), token_batches()
    divergence = Divergence(model)
    for batch in batches:
        divergence.remember(outputs(model, batch), batch)
    for batch in batches:
        assert divergence(outputs(model, batch), batch).abs().max() < 1e-6
        for index in range(len(batch["input_ids"])):
            one = {name: tensor[index : index + 1] for name, tensor in batch.items()}
            assert divergence(outputs(model, one), one).abs().max() < 1e-5
