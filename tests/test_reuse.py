"""Memory of large tensors that is used again."""

from fastmlm.reuse import Reuse


def test_memory_comes_back_only_when_nobody_has_it() -> None:
    reuse = Reuse()
    one, other = reuse.empty(3, 4).fill_(1), reuse.empty(2, 4).fill_(2)
    view, address = one[1:], one.data_ptr()
    del one
    assert reuse.empty(3, 4).data_ptr() != address
    assert (view == 1).all()
    assert (other == 2).all()
    del view
    assert reuse.empty(2, 5).data_ptr() == address, "smaller ones fit as well"
    assert reuse.empty(0, 0).shape == (0, 0)
    assert reuse.empty(5, 5).shape == (5, 5)
