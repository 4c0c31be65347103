"""MaskedLMHead: BERT's own head on the selected positions, for encoders of one's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmlm import MaskedAccuracy, MaskedLMHead
from fastmlm.testing import make_model

B, S, H, V = 3, 7, 32, 40


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.5] = -100
    return torch.randn(B, S, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("divisor", [None, 17, torch.tensor(17)])
def test_it_is_the_head_of_bert(divisor: Any) -> None:
    bert = make_model("Bert", hidden_size=H, vocab_size=V, tie_word_embeddings=False).cls.predictions
    head = MaskedLMHead(H, V, eps=bert.transform.LayerNorm.eps).double()
    names = {"transform.dense": "dense", "transform.LayerNorm": "norm", "decoder": "decoder"}
    kinds = ("weight", "bias")
    head.load_state_dict({f"{new}.{k}": bert.state_dict()[f"{old}.{k}"] for old, new in names.items() for k in kinds})
    x, labels = case()
    logits = bert(x)
    torch.testing.assert_close(head(x), logits, rtol=1e-12, atol=1e-12)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    wanted = total / (17 if divisor is not None else (labels != -100).sum())
    loss = head(x, labels, num_items_in_batch=divisor)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(loss, [x, *head.parameters()])
    theirs = [bert.get_parameter(f"{old}.{kind}") for old in names for kind in kinds]
    torch.testing.assert_close(found, torch.autograd.grad(wanted, [x, *theirs]), rtol=1e-10, atol=1e-12)


def test_weights_of_tokens() -> None:
    head = MaskedLMHead(H, V).double()
    x, labels = case()
    weights = torch.rand(B, S, dtype=torch.float64) + 0.5
    losses = F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="none").view(B, S) * weights
    wanted = losses.sum() / (labels != -100).sum()
    torch.testing.assert_close(head(x, labels, loss_weights=weights), wanted, rtol=1e-12, atol=1e-12)
    both = head(x, labels, loss_weights=weights, num_items_in_batch=5)
    torch.testing.assert_close(both, losses.sum() / 5, rtol=1e-12, atol=1e-12)


def test_tied_and_narrow() -> None:
    embedding = nn.Embedding(V, 16)
    head = MaskedLMHead(H, V, embedding_size=16, bias=False, activation=F.relu, tied_to=embedding)
    assert head.decoder.weight is embedding.weight
    x, labels = case(torch.float32)
    head(x, labels).backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.any()
    with pytest.raises(ValueError, match=r"tied_to: expected an embedding of shape \(40, 32\), got \(40, 16\)"):
        MaskedLMHead(H, V, tied_to=embedding)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "subclass", "adapter"])
def test_what_comes_over_the_decoder_takes_part(kind: str) -> None:
    head: Any = MaskedLMHead(H, V).double()
    if kind == "hook":
        head.decoder.register_forward_hook(lambda module, inputs, output: 2 * output)
    if kind == "pre-hook":
        head.decoder.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    if kind == "subclass":
        head.decoder = Doubled(H, V).double()
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["decoder"], r=2, init_lora_weights=False), head)
        head.double()
    x, labels = case()
    weights = torch.rand(B, S, dtype=torch.float64)
    losses = F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="none").view(B, S) * weights
    with MaskedAccuracy() as accuracy:
        loss = head(x, labels, loss_weights=weights)
    torch.testing.assert_close(loss, losses.sum() / (labels != -100).sum(), rtol=1e-12, atol=1e-12)
    best = (head(x).argmax(-1) == labels)[labels != -100].double().mean().item()
    assert accuracy.compute()["masked_accuracy"] == pytest.approx(best)
    trained = [p for p in head.parameters() if p.requires_grad]
    for ours, exact in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(losses.sum(), trained), strict=True):
        torch.testing.assert_close(ours * (labels != -100).sum(), exact, rtol=1e-9, atol=1e-12)


def test_nothing_selected_and_accuracy() -> None:
    head = MaskedLMHead(H, V)
    x, labels = case(torch.float32)
    loss = head(x, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in head.parameters())
    with MaskedAccuracy(top_k=(1, V)) as accuracy:
        head(x, labels)
    best = (head(x).argmax(-1) == labels)[labels != -100].float().mean().item()
    assert accuracy.compute() == pytest.approx({"masked_accuracy": best, f"masked_accuracy_top{V}": 1.0})


def test_what_does_not_fit() -> None:
    head = MaskedLMHead(H, V)
    x, labels = case(torch.float32)
    with pytest.raises(ValueError, match=r"labels: expected \(3, 7\), got \(3, 6\)"):
        head(x, labels[:, 1:])
    with pytest.raises(ValueError, match=r"loss_weights: expected \(3, 7\), like labels, got \(3, 6\)"):
        head(x, labels, loss_weights=torch.ones(3, 6))
    with pytest.raises(TypeError, match=r"labels: expected int32 or int64, got torch.float32"):
        head(x, labels.float())
    with pytest.raises(ValueError, match="loss_weights: expected numbers without a gradient"):
        head(x, labels, loss_weights=torch.ones(B, S, requires_grad=True))
    with pytest.raises(ValueError, match=r"labels: expected ids in \[0, 40\) or -100, got 40"):
        head(x, labels.clamp(min=V))
