"""Page lists to a page table. Rests on the lists that a page pool keeps itself, and on a reported failure."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache import PagePool, table_of_page_lists


def test_lists_of_a_pool_give_its_own_table():
    pool = PagePool(20, 4)
    sequences = [pool.allocate(n)[0] for n in (9, 0, 4, 1, 16)]
    lists = [pool.pages(sequence) for sequence in sequences]
    lengths = pool.lengths(sequences)
    indptr, last = np.cumsum([0, *map(len, lists)]), np.where(lengths, (lengths.astype(int) - 1) % 4 + 1, 0)
    indices = np.concatenate([np.array(pages, np.int32) for pages in lists])
    table, got = table_of_page_lists(indptr, indices, last, page_size=4, num_pages=20)
    np.testing.assert_array_equal(table, pool.lookup_table(sequences))
    np.testing.assert_array_equal(got, lengths)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"last_page_len": [17]}, r"is 17: must be 1 to 16"),  # known failure last-page-len-validated
        ({"last_page_len": [0]}, r"last_page_len\[0\] is 0: must be 1 to 16"),
        ({"last_page_len": [-1]}, "is -1: must be 1 to 16"),
        ({"indptr": [0, 0], "last_page_len": [3]}, "is 3: must be 0, as sequence 0 has 0 pages"),
        ({"indptr": [0, 3]}, "must rise from 0 to at most 2"),
        ({"indptr": [1, 2]}, "must rise from 0"),
        ({"indptr": [0, 2, 1], "last_page_len": [3, 3]}, "never fall"),
        ({"indptr": [0]}, r"must be \[B \+ 1\], \[pages\] and \[B\]"),
        ({"indices": [7, 8]}, r"indices\[1\] is 8: must be 0 to 7"),
        ({"indices": [-1, 0]}, r"indices\[0\] is -1: must be 0 to 7"),
        ({"indices": [0.5, 0]}, "indices has dtype float64"),
    ],
)
def test_errors(change, message):
    arguments = {"indptr": [0, 2], "indices": [7, 0], "last_page_len": [16]} | change
    with pytest.raises(ValueError, match=message):
        table_of_page_lists(*arguments.values(), page_size=16, num_pages=8)


def test_entries_behind_the_last_list_are_not_looked_at():
    table, lengths = table_of_page_lists([0, 1], np.array([3, 2**31 - 1]), [5], page_size=16, num_pages=4)
    assert (table[0, :2].tolist(), lengths.tolist()) == ([3, 4], [5])
