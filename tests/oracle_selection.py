"""The law of selections in plain Python integers, from its text and nothing else, and calls to hold against it.

Written position by position and unit by unit, where the implementations sort, sum and scatter.
"""

import itertools
import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from oracle import DEVICE, TWO32, TWO64, signed, slow_draw
from torch import Tensor

from fastmlm import MaskingSpec, Selection

LENGTHS = [1, 2, 15, 64, 65, 130]  # one token, less than a stripe of 16, a block of 64, one more, two blocks and more


def T(p: float) -> int:
    return round(Fraction(p) * TWO32)  # half to even


@dataclass
class Row:
    """A row from its first real token on: what it has at each position."""

    spec: MaskingSpec
    how: Selection
    seed: int
    key: int
    ids: list[int]
    protected: list[bool]  # by the attention mask or as a special token
    units: list[int] | None
    p: list[float]
    special: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        named = self.spec.special_token_ids
        self.special = [mask or self.near(token) in named for mask, token in zip(self.protected, self.ids, strict=True)]

    def near(self, token: int) -> int:
        return min(max(token, 0), self.spec.vocab_size - 1)

    def draw(self, stream: int, s: int) -> int:
        return slow_draw(self.seed, self.key, s, stream)

    def selectable(self, s: int) -> bool:
        return not self.special[s] and 0 <= self.ids[s] < self.spec.vocab_size

    def words(self) -> list[int]:
        """u0: the units given, else words by the marks, else tokens."""
        if self.units is not None:
            return self.units
        if self.how.word_marks is None:
            return list(range(len(self.ids)))
        marks, found, first = self.how.word_marks.tolist(), [], 0
        for s, token in enumerate(self.ids):
            after = s == 0 or self.special[s - 1] or marks[self.near(self.ids[s - 1])] & 2
            if after or self.special[s] or marks[self.near(token)] & 1:
                first = s
            found.append(first)
        return found

    def unit_of_tokens(self) -> list[int]:
        word = self.words()
        if not self.how.span_lengths:
            return word
        sums = list(itertools.accumulate(self.how.span_lengths))
        limits = [T(part / sums[-1]) for part in sums[:-1]]
        starts, a = set(), 0
        for j in range(len(word)):  # the numbers of the units at which spans start
            starts.add(a)
            a += 1 + sum(self.draw(3, j) >= limit for limit in limits)
        found, first, seen = [], 0, 0
        for s in range(len(word)):
            seen += word[s] == s
            number = max(0, seen - 1)
            cut = s == 0 or self.special[s] or self.special[s - 1]
            if cut or (word[s] == s and number in starts):
                first = s
            found.append(first)
        return found

    def limit(self, unit: int) -> int:
        if self.how.rates_by_id is not None:
            return T(self.how.rates_by_id.tolist()[self.near(self.ids[unit])])
        return T(self.p[unit])

    def selected(self, unit: list[int]) -> list[bool]:
        size = range(len(self.ids))
        chance = [self.selectable(s) and self.draw(0, unit[s]) < self.limit(unit[s]) for s in size]
        how, n = self.how, sum(map(self.selectable, size))
        most = n if how.at_most is None else how.at_most
        if not (how.exact or how.at_least or how.at_most is not None):
            return chance
        c = (T(self.p[0]) * n + (1 << 31)) >> 32 if how.exact else sum(chance)
        k = min(max(c, how.at_least), most, n)
        if not how.exact and k == c:
            return chance
        tokens: dict[int, int] = {}
        for s in filter(self.selectable, size):
            tokens[unit[s]] = tokens.get(unit[s], 0) + 1
        order = sorted(tokens, key=lambda u: (self.draw(0, u), u))
        taken: set[int] = set()
        for u in order:
            if sum(tokens[v] for v in taken) + tokens[u] <= k:
                taken.add(u)
        if not taken and how.at_least:
            taken.update([u for u in order if tokens[u] <= most][:1])
        return [self.selectable(s) and unit[s] in taken for s in size]

    def replacement(self, s: int, unit: int) -> int:
        spec, token = self.spec, self.ids[s]
        table = list(range(spec.vocab_size)) if spec.random_token_ids is None else list(spec.random_token_ids)
        to_mask = T(spec.mask_replace_prob)
        to_random = min(TWO32, to_mask + T(spec.random_replace_prob))
        x = self.draw(1, unit if self.how.replace_per_unit else s)
        if x < to_mask:
            return spec.mask_token_id
        count = len(table) - (spec.exclude_original and token in table)
        if x >= to_random or not count:
            return token
        if self.how.replace_per_unit:
            drawn = table[self.draw(2, s) * count >> 32]
        else:
            drawn = table[(x - to_mask) * (TWO32 * count // (to_random - to_mask)) >> 32]
        return table[-1] if spec.exclude_original and drawn == token else drawn


@dataclass
class Case:
    """Arguments of mask_tokens and, cell by cell, what the law says comes out."""

    call: dict[str, Any]
    rows: list[range]
    keys: list[int]
    out: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def expect(self) -> "Case":
        flat = {name: v.flatten().tolist() for name, v in self.call.items() if isinstance(v, Tensor)}
        spec, ids = self.call["spec"], flat["input_ids"]
        seed = flat["seed"][0] % TWO64 if "seed" in flat else self.call["seed"]
        self.out, self.labels = list(ids), [spec.ignore_index] * len(ids)
        p = self.call.get("mlm_probability", spec.mlm_probability)
        for number, (row, key) in enumerate(zip(self.rows, self.keys, strict=True)):
            real = flat.get("attention_mask", [1] * len(ids))
            first = next((cell for cell in row if real[cell]), row.start)
            cells = range(first, row.stop)
            given = flat["mlm_probability"] if isinstance(p, Tensor) else [p]
            by_token = isinstance(p, Tensor) and len(given) == len(ids) != len(self.rows)
            by_row = given[number] if isinstance(p, Tensor) and not by_token else given[0]
            protected = flat.get("special_tokens_mask", [0] * len(ids))
            one = Row(
                spec, self.call["selection"], seed, key, [ids[c] for c in cells],
                [not real[c] or bool(protected[c]) for c in cells],
                [flat["units"][c] for c in cells] if "units" in flat else None,
                [given[c] if by_token else by_row for c in cells],
            )  # fmt: skip
            unit = one.unit_of_tokens()
            for s, chosen in enumerate(one.selected(unit) if one.ids else []):
                if chosen:
                    self.labels[cells[s]], self.out[cells[s]] = ids[cells[s]], one.replacement(s, unit[s])
        return self


SPANS = [(), (1.0,), (0.5, 0.25, 0.25), (0.0, 0.0, 1.0), (0.2,) * 5, tuple(1 / 64 for _ in range(64)), (1.0, 0.0)]
SPLITS = [(1, 0), (0, 0), (0, 1), (0.8, 0.1), (0.3, 0.4)]


def selection(rng: random.Random, vocab_size: int, units: bool, by_token: bool) -> Selection:
    """One of any kind that goes with units given or not, and with a rate a token or not."""
    kind: dict[str, Any] = {
        "span_lengths": rng.choice([(), (), rng.choice(SPANS)]),
        "replace_per_unit": rng.random() < 0.5,
    }
    if not units and rng.random() < 0.4:
        kind["word_marks"] = torch.tensor(rng.choices([0, 1, 2, 3], [4, 2, 1, 1], k=vocab_size), dtype=torch.uint8)
    if not by_token and rng.random() < 0.7:
        kind["exact"] = rng.random() < 0.5
        kind["at_least"] = rng.choice([0, 0, 1, 3, 20])
        kind["at_most"] = rng.choice([None, None, kind["at_least"], kind["at_least"] + 5, 60])
        kind["at_most"] = None if kind["at_most"] is None else max(kind["at_most"], kind["at_least"])
    elif rng.random() < 0.3:
        dtype = rng.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16])
        kind["rates_by_id"] = torch.tensor([rng.choice([0, 1, rng.random()]) for _ in range(vocab_size)]).to(dtype)
    return Selection(**kind)


def case(number: int) -> Case:
    """The case of a number: padded on any side, with holes, or packed; ids of few kinds, so that words are long."""
    rng = random.Random(number)
    vocab_size = rng.choice([1, 2, 5, 12])
    split, table = rng.choice(SPLITS), rng.choice([None, None, 1, 3])
    spec = MaskingSpec(
        rng.randrange(vocab_size), vocab_size, tuple({rng.randrange(vocab_size) for _ in range(rng.choice([0, 0, 1]))}),
        rng.choice([0, 1, 0.15, 0.5, rng.random()]), *split,
        random_token_ids=table and rng.sample(range(vocab_size), min(table, vocab_size)),
        exclude_original=rng.random() < 0.5, ignore_index=rng.choice([-100, 0]),
    )  # fmt: skip
    packed = rng.random() < 0.4
    if packed:
        lengths = [rng.choice([0, *LENGTHS]) for _ in range(rng.randint(1, 4))]
        shape: tuple[int, ...] = rng.choice([(1, sum(lengths)), (sum(lengths),)])
    else:
        lengths = [rng.choice(LENGTHS)] * rng.randint(1, 3)
        shape = (len(lengths), lengths[0])
    ends = list(itertools.accumulate(lengths, initial=0))
    rows, size = [range(a, b) for a, b in itertools.pairwise(ends)], ends[-1]
    keys = [rng.choice([0, rng.randrange(TWO64)]) + i for i in range(len(rows))]
    full = lambda values, dtype: torch.tensor(values).reshape(shape).to(dtype).to(DEVICE)  # noqa: E731
    seed = rng.randrange(TWO64)
    call: dict[str, Any] = {
        "input_ids": full(rng.choices(range(vocab_size), k=size), rng.choice([torch.int64, torch.int32, torch.uint8])),
        "spec": spec,
        "seed": torch.tensor([signed(seed)], device=DEVICE) if rng.random() < 0.3 else seed,
        "row_keys": torch.tensor([signed(k % TWO64) for k in keys], device=DEVICE),
    }
    if packed:
        call["cu_seqlens"] = torch.tensor(ends, dtype=rng.choice([torch.int32, torch.int64]), device=DEVICE)
    real = _real(rng, rows)
    if rng.random() < 0.7:
        call["attention_mask"] = full(real, rng.choice([torch.bool, torch.int64]))
    else:
        real = [1] * size
    if rng.random() < 0.5:
        call["special_tokens_mask"] = full([rng.random() < 0.15 for _ in range(size)], torch.int8)
    if rng.random() < 0.25:
        call["units"] = full(_units(rng, rows, real), rng.choice([torch.int64, torch.int32]))
    by_token = rng.random() < 0.15
    call["selection"] = selection(rng, vocab_size, "units" in call, by_token)
    if by_token and call["selection"].rates_by_id is None:
        call["mlm_probability"] = full([rng.random() for _ in range(size)], torch.float64)
    elif rng.random() < 0.3 and call["selection"].rates_by_id is None and len(rows) != size:
        call["mlm_probability"] = torch.tensor([rng.random() for _ in rows], dtype=torch.float64, device=DEVICE)
    return Case(call, rows, [k % TWO64 for k in keys]).expect()


def _real(rng: random.Random, rows: list[range]) -> list[int]:
    kind, real = rng.choice(["left", "right", "holes"]), []
    for row in rows:
        cut = rng.randint(0, len(row))
        sides = {"left": lambda i, cut=cut: i >= cut, "right": lambda i, cut=cut: i < cut}
        real += [int(sides.get(kind, lambda i: rng.random() < 0.7)(i)) for i in range(len(row))]
    return real


def _units(rng: random.Random, rows: list[range], real: list[int]) -> list[int]:
    """Units of neighbours, and now and then of tokens far apart, or that have no token of their own name."""
    stray, units = rng.random() < 0.3, []
    for row in rows:
        first, last = next((i for i, cell in enumerate(row) if real[cell]), 0), 0
        for i in range(len(row)):
            s = max(i - first, 0)
            last = rng.randint(0, s) if stray else last if rng.random() < 0.6 else s
            units.append(last)
    return units
