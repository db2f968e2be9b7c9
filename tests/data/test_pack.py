"""Windows cover the stream of documents: every token but the first is predicted exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from rayzero3.data.pack import PackingIndex


@pytest.mark.parametrize("sequence_length", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("lengths", [[5, 3, 8], [1] * 23, [40], [1, 17, 1, 1, 9], [2, 3, 5, 7, 11, 13, 17, 19, 23]])
def test_windows_cut_the_stream_without_loss(lengths, sequence_length):
    documents = [np.arange(length) + 1000 * number for number, length in enumerate(lengths)]
    stream = np.concatenate(documents)
    index = PackingIndex.of(np.array(lengths), sequence_length)
    assert len(index) == (len(stream) - 1) // sequence_length
    for window in range(len(index)):
        tokens = np.concatenate([documents[document][start:stop] for document, start, stop in index.ranges(window)])
        assert np.array_equal(tokens, stream[window * sequence_length : (window + 1) * sequence_length + 1])
    assert index.left_over == len(stream) - 1 - len(index) * sequence_length
    if index.left_over:
        rest = np.concatenate([documents[document][start:stop] for document, start, stop in index.ranges(len(index))])
        assert np.array_equal(rest, stream[len(index) * sequence_length :]), "the last token that a window predicts, then what none does"


def test_the_example_of_the_module_holds():
    index = PackingIndex.of(np.array([5, 3, 8]), 4)
    assert [index.ranges(window) for window in range(len(index))] == [[(0, 0, 5)], [(0, 4, 5), (1, 0, 3), (2, 0, 1)], [(2, 0, 5)]]
    assert len(PackingIndex.of(np.array([], dtype=np.int64), 4)) == 0
