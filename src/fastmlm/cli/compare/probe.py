"""How much a model's features tell of a passage: a linear classifier of its topic, on unmasked rows."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 64  # at a time
_FEWEST = 5  # rows of a topic to learn it from
_PENALTY = 1e-2  # on the squared weights of standardised features
_ITERATIONS = 100


class Probe:
    """The passages and their topics, of documents with enough rows to learn from and at least one held out.

    Args:
        train: rows and their topics, which the classifier learns from.
        held_out: rows and their topics, which it is measured on.
        pad_token_id: of padding.
    """

    def __init__(
        self, train: list[tuple[list[int], int]], held_out: list[tuple[list[int], int]], pad_token_id: int
    ) -> None:
        often = Counter(topic for _, topic in train)
        known = sorted({topic for _, topic in held_out if often[topic] >= _FEWEST})
        self.topics = len(known)
        self._parts = []
        for part in (train, held_out):
            chosen = [(row, known.index(topic)) for row, topic in part if topic in known]
            self._parts.append(([row for row, _ in chosen], torch.tensor([topic for _, topic in chosen])))
        self._pad = pad_token_id

    @property
    def majority(self) -> float | None:
        """The accuracy of always saying the likeliest topic; None where there are not two to tell apart."""
        if self.topics < 2:
            return None
        likeliest = self._parts[0][1].mode().values
        return float((self._parts[1][1] == likeliest).double().mean())

    def accuracy(self, encoder: Any) -> float | None:
        """Of the held-out passages, the share whose topic the classifier finds."""
        if self.topics < 2:
            return None
        (features, topics), (others, answers) = (
            (self._features(encoder, rows), topics) for rows, topics in self._parts
        )
        mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
        classifier = _fit((features - mean) / deviation, topics, self.topics)
        with torch.no_grad():
            found = classifier((others - mean) / deviation).argmax(1)
        return float((found == answers).double().mean())

    @torch.no_grad()
    def _features(self, encoder: Any, rows: list[list[int]]) -> Tensor:
        """(N, H) float64: the last hidden states, averaged over a row's tokens between its first and last."""
        device, features = next(encoder.parameters()).device, []
        for start in range(0, len(rows), _ROWS):
            part = [torch.tensor(row) for row in rows[start : start + _ROWS]]
            ids = nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=self._pad)
            mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in part], batch_first=True)
            states = encoder(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state.double().cpu()
            inner = mask.clone()
            inner[:, 0] = 0
            inner[range(len(part)), mask.sum(1) - 1] = 0
            features.append((states * inner[..., None]).sum(1) / inner.sum(1, keepdim=True).clamp(min=1))
        return torch.cat(features)


def _fit(features: Tensor, topics: Tensor, count: int) -> nn.Linear:
    """Multinomial logistic regression with a penalty on the squared weights: convex, so that no seed plays a part."""
    classifier = nn.Linear(features.shape[1], count, dtype=features.dtype)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    optimizer = torch.optim.LBFGS(
        classifier.parameters(), max_iter=_ITERATIONS, line_search_fn="strong_wolfe", tolerance_grad=1e-6
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(classifier(features), topics) + _PENALTY * classifier.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return classifier
