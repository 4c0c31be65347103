"""The sparse head on two processes: gradients are those of one process with all rows, and nothing hangs."""

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastmlm.head import sparsify
from fastmlm.testing import CLOSE, dense_loss, gradients, make_batch, make_model

WORLD = 2
# Selected tokens in each of four rows, of which either process has two: uneven, on one process alone, and nowhere.
COUNTS = {"uneven": (5, 0, 1, 3), "one rank has none": (0, 0, 1, 3), "nothing selected": (0, 0, 0, 0)}


def run(case: Callable[[int], None], path: Path, seconds: float = 120) -> None:
    """The case on two processes; fails with the first one's error, or when they are not done in time."""
    context = torch.multiprocessing.spawn(_worker, (case, path / "rendezvous"), nprocs=WORLD, join=False)
    end = time.monotonic() + seconds
    while not context.join(timeout=1):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            pytest.fail(f"not done after {seconds} s")


def _worker(rank: int, case: Callable[[int], None], rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=WORLD)
    try:
        case(rank)
    finally:
        dist.destroy_process_group()


def shard(rank: int, counts: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """All rows, those of one rank, and how many tokens are selected in all of them."""
    batch = make_batch(counts=counts)
    return batch, {name: column[2 * rank : 2 * rank + 2] for name, column in batch.items()}, sum(counts)


def check(sparse: nn.Module, model: nn.Module, dense: nn.Module, rank: int, counts: tuple[int, ...]) -> None:
    """One backward pass of `sparse`, a wrapper of `model`, against the dense model with all rows."""
    batch, rows, selected = shard(rank, counts)
    # Data parallelism averages gradients over ranks: the Trainer multiplies the loss by their number as well.
    loss = sparse(**rows, num_items_in_batch=torch.tensor(selected)).loss * WORLD
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
    if selected:
        wanted = gradients(dense, dense_loss(dense, batch))
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert all(torch.isfinite(g).all() for g in found.values())
    assert selected or not any(g.any() for g in found.values())
    assert found.keys() == gradients(dense, dense_loss(dense, make_batch())).keys()


def ddp(rank: int, order: str, name: str, counts: tuple[int, ...]) -> None:
    dense = make_model(name)
    model = copy.deepcopy(dense)
    if order == "before":
        sparsify(model)
    wrapped = DistributedDataParallel(model)
    if order == "after":
        assert sparsify(wrapped) is wrapped
    check(wrapped, model, dense, rank, counts)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("order", "name"), [("before", "Bert"), ("after", "ModernBert")])
def test_ddp(order: str, name: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    run(partial(ddp, order=order, name=name, counts=counts), tmp_path)


def fsdp(rank: int, order: str, sharding: str, counts: tuple[int, ...]) -> None:
    tied = sharding != "head on its own"
    dense = make_model(tie_word_embeddings=tied)
    model: Any = copy.deepcopy(dense)
    mesh = init_device_mesh("cpu", (WORLD,))
    if order == "before":
        sparsify(model)
    if sharding != "root":
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
    if sharding == "head on its own":
        fully_shard(model.cls.predictions.decoder, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "after":
        sparsify(model)
    check(model, model, dense, rank, counts)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("sharding", ["root", "layers", "head on its own"])
def test_fsdp2(sharding: str, order: str, tmp_path: Path) -> None:
    run(partial(fsdp, order=order, sharding=sharding, counts=COUNTS["uneven"]), tmp_path)


def test_fsdp2_with_a_rank_that_selects_nothing(tmp_path: Path) -> None:
    run(partial(fsdp, order="before", sharding="layers", counts=COUNTS["one rank has none"]), tmp_path)


def hangs(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    time.sleep(60)


def fails(rank: int) -> None:
    assert rank == 0, "as it should"


def test_run_sees_errors_and_hangs(tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="as it should"):
        run(fails, tmp_path)
    (tmp_path / "hang").mkdir()
    with pytest.raises(pytest.fail.Exception, match="not done after 15 s"):
        run(hangs, tmp_path / "hang", seconds=15)
