"""Mask tokens filled in over several passes, by models that know nothing and by one that knows a pattern."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastmlm import sparsify, unmask
from fastmlm.testing import MASKED_LM_NAMES, V, make_model

MASK = V - 1
FORBIDDEN = (0, 1, 2, 7)


def prompts(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with 7, 0, 3 and all of their tokens masked, and what is masked; padding, masked in one place too."""
    generator = torch.Generator().manual_seed(0)
    ids, attention = torch.randint(8, MASK, (4, 10), generator=generator).to(dtype), torch.ones(4, 10)
    attention[2, 8:] = 0
    for row, places in enumerate([[0, 1, 2, 5, 6, 8, 9], [], [1, 4, 6], list(range(10))]):
        ids[row, places] = MASK
    masked = ids == MASK
    ids[2, 9] = MASK
    return ids, attention, masked


class Counted(nn.Module):
    """A model that keeps what it is given, and whether it trained meanwhile."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, **inputs: Tensor) -> Any:
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in self.modules())
        self.seen.append({name: column.clone() for name, column in inputs.items()})
        return self.model(**inputs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("order", ["confidence", "random"])
@pytest.mark.parametrize("steps", [1, 3, 10, 25])
def test_what_is_filled_in(steps: int, order: str, temperature: float, dtype: torch.dtype) -> None:
    """All masks and nothing else, by equal shares, and what is filled in stays."""
    ids, attention, masked = prompts(dtype)
    before, model = ids.clone(), Counted(make_model())
    out = unmask(
        model, ids, mask_token_id=MASK, steps=steps, attention_mask=attention, temperature=temperature, order=order,
        forbidden_ids=FORBIDDEN,
    )  # fmt: skip
    assert torch.equal(ids, before)
    assert out.dtype == dtype
    assert torch.equal(out[~masked], ids[~masked])
    assert not torch.isin(out[masked], torch.tensor([MASK, *FORBIDDEN])).any()
    assert len(model.seen) == min(steps, 10)
    states = [*(given["input_ids"] for given in model.seen), out]
    passes = len(model.seen)
    for t, state in enumerate(states):
        left = ((state == MASK) & masked).sum(1)
        assert left.tolist() == [n - n * t // passes for n in (7, 0, 3, 10)]
    for one, later in itertools.pairwise(states):
        assert torch.equal(later[one != MASK], one[one != MASK])
    assert all(torch.equal(given["attention_mask"], attention) for given in model.seen)


def test_one_at_a_time_the_most_confident_first() -> None:
    """As many passes as masks, each of them this loop's."""
    model = make_model().eval()
    ids = prompts()[0][:1]
    expected = ids.clone()
    with torch.no_grad():
        for _ in range(7):
            probabilities = (
                model(input_ids=expected).logits[0].index_fill(1, torch.tensor([MASK]), -torch.inf).softmax(1)
            )
            best, found = probabilities.max(1)
            place = best.where(expected[0] == MASK, -1).argmax()
            expected[0, place] = found[place]
    assert torch.equal(unmask(model, ids, mask_token_id=MASK, steps=7), expected)
    assert torch.equal(unmask(model, ids, mask_token_id=MASK, steps=100), expected)
    assert not torch.equal(unmask(model, ids, mask_token_id=MASK, steps=1), expected)  # so that passes tell


@pytest.mark.parametrize("name", MASKED_LM_NAMES)
def test_sparse_or_dense_in_any_mode(name: str) -> None:
    ids, attention, _ = prompts()
    dense = make_model(name)
    dense.base_model.eval()  # a part that is frozen
    sparse = sparsify(copy.deepcopy(dense))
    modes = [module.training for module in dense.modules()]
    assert len(set(modes)) == 2
    settings: dict[str, Any] = {"mask_token_id": MASK, "steps": 4, "attention_mask": attention}
    assert torch.equal(unmask(sparse, ids, **settings), unmask(dense, ids, **settings))
    assert [module.training for module in dense.modules()] == modes
    assert [module.training for module in sparse.modules()] == modes
    with pytest.raises(IndexError):
        unmask(dense, ids.where(ids == MASK, 1000), **settings)
    assert [module.training for module in dense.modules()] == modes


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"order": "random"}, {"temperature": 0.7, "order": "random"}]
)
def test_a_generator_decides(settings: dict[str, Any]) -> None:
    ids, model = prompts()[0], make_model()
    found = []
    for seed, of_others in [(1, 0), (1, 5), (2, 0)]:
        torch.manual_seed(of_others)
        generator = torch.Generator().manual_seed(seed)
        found.append(unmask(model, ids, mask_token_id=MASK, steps=4, generator=generator, **settings))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(of_others)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


class Fixed(nn.Module):
    """Any token gets the same logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids: Tensor) -> Any:
        out = type("Output", (), {})()
        out.logits = self.logits.expand(*input_ids.shape, -1)
        return out


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_draws_follow_the_model(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 3.0, 9.0])
    out = unmask(
        Fixed(logits), torch.full((100, 500), 5), mask_token_id=5, steps=2, temperature=temperature, order="random",
        generator=torch.Generator().manual_seed(0), forbidden_ids=[3],
    )  # fmt: skip
    wanted = (logits[[0, 1, 2, 4]] / temperature).softmax(0)
    found = out.flatten().bincount(minlength=6)[[0, 1, 2, 4]] / out.numel()
    # 50,000 draws: 5 sigma of a frequency is at most 5 * 0.5 / sqrt(50,000)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.0112)
    assert out.max() == 4


def test_a_random_order_is_uniform() -> None:
    """Which half of four masks is filled in at first, of six halves."""
    model = Counted(Fixed(torch.tensor([1.0, 0.0, 0.0])))
    ids = torch.full((6000, 4), 2)
    unmask(model, ids, mask_token_id=2, steps=2, order="random", generator=torch.Generator().manual_seed(0))
    filled = (model.seen[1]["input_ids"] != 2).long()
    assert (filled.sum(1) == 2).all()
    counts = (filled * torch.tensor([1, 2, 4, 8])).sum(1).bincount()
    assert counts[[3, 5, 6, 9, 10, 12]].sum() == 6000
    assert ((counts[[3, 5, 6, 9, 10, 12]] - 1000).abs() < 5 * (6000 * 1 / 6 * 5 / 6) ** 0.5).all()


def test_nothing_to_fill_in() -> None:
    model = Counted(make_model())
    for ids in (torch.ones(2, 5).long(), torch.ones(0, 5).long(), torch.ones(2, 0).long()):
        out = unmask(model, ids, mask_token_id=MASK, steps=3)
        assert torch.equal(out, ids)
        assert out.data_ptr() != ids.data_ptr() or not ids.numel()
    assert not model.seen


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": torch.ones(5).long()}, ValueError, "input_ids: expected integers, .* got torch.int64 \\(5,\\)"),
        ({"input_ids": torch.ones(1, 5)}, ValueError, "input_ids: expected integers, .* got torch.float32"),
        ({"attention_mask": torch.ones(1, 4)}, ValueError, "attention_mask: expected \\(1, 5\\), got \\(1, 4\\)"),
        ({"steps": 0}, ValueError, "steps: expected an int in"),
        ({"steps": 2.5}, TypeError, "steps: expected an int, got float"),
        ({"temperature": -1.0}, ValueError, "temperature: expected a number of at least 0, got -1.0"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected .* got nan"),
        ({"order": "left"}, ValueError, "order: expected 'confidence' or 'random', got 'left'"),
        ({"forbidden_ids": [V]}, ValueError, "forbidden_ids: expected some of the ids in \\[0, 37\\)"),
        ({"forbidden_ids": [-1]}, ValueError, "forbidden_ids: expected some of the ids in \\[0, 37\\)"),
        ({"forbidden_ids": range(V)}, ValueError, "forbidden_ids: expected some of the ids in \\[0, 37\\)"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    settings = {"input_ids": torch.full((1, 5), MASK), "mask_token_id": MASK, "steps": 2} | changes
    with pytest.raises(error, match=message):
        unmask(make_model(), **settings)


PATTERN_MASK, PLACE = 11, torch.arange(12)


def pattern(count: int) -> Tensor:
    """Rows of ids that repeat after three places."""
    return torch.randint(3, PATTERN_MASK, (count, 3))[:, PLACE % 3]


@pytest.fixture(scope="module")
def pattern_model() -> Any:
    """Trained as masked diffusion is, with one rate a row and weights of its inverse."""
    torch.manual_seed(0)
    model = sparsify(make_model(vocab_size=12).float())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        ids = pattern(32)
        p = torch.rand(32, 1) * 0.7 + 0.1
        selected = torch.rand(ids.shape) < p
        loss = model(
            input_ids=ids.masked_fill(selected, PATTERN_MASK), labels=ids.where(selected, -100),
            loss_weights=(1 / p).expand(ids.shape), loss_tokens=torch.full((32,), len(PLACE)),
        ).loss  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("order", ["confidence", "random"])
def test_a_pattern_that_was_learnt(order: str, pattern_model: Any) -> None:
    torch.manual_seed(1)
    ids = pattern(50)
    hidden = (PLACE >= 3).expand(ids.shape) & (torch.rand(ids.shape) < 0.9)
    given = ids.masked_fill(hidden, PATTERN_MASK)
    out = unmask(pattern_model, given, mask_token_id=PATTERN_MASK, steps=6, order=order, forbidden_ids=range(3))
    assert (out == ids).float().mean() > 0.98
