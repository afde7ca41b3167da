"""The page pool. Rests on a model: every sequence is a list of tokens, the pages are an array that is written where the
pool says, and after every step each sequence must read back its own tokens from its own pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvlab.cache import KVCacheStaticParams, OutOfPages, PageCopy, PagedKVCacheCollection, PagePool, copy_pages

pick = st.integers(0, 10**6)


class Machine(RuleBasedStateMachine):
    steps = 0
    """Of all runs together."""

    @initialize(pages=st.integers(0, 12), page_size=st.integers(1, 5))
    def start(self, pages, page_size):
        self.pool = PagePool(pages, page_size)
        self.memory = np.full((pages, page_size), -1)
        self.model: dict[int, list[int]] = {}
        self.gone: list[int] = []
        self.stamp = 0

    def write(self, sequence, first, tokens):
        """New tokens of their own, where the pool says."""
        values = list(range(self.stamp, self.stamp + tokens))
        self.stamp += tokens
        self.memory.reshape(-1)[self.pool.slots(sequence, first, tokens)] = values
        self.model[sequence] = self.model.get(sequence, [])[:first] + values

    def any(self, number):
        return sorted(self.model)[number % len(self.model)] if self.model else None

    @rule(tokens=st.integers(0, 12))
    def allocate(self, tokens):
        before = repr(self.pool)
        try:
            sequence, slots = self.pool.allocate(tokens)
        except OutOfPages:
            assert -(-tokens // self.pool.page_size) > self.pool.num_free
            assert repr(self.pool) == before
            return
        assert sequence not in self.model
        assert sequence not in self.gone
        assert slots.tolist() == self.pool.slots(sequence, 0, tokens).tolist()
        self.write(sequence, 0, tokens)

    @rule(number=pick, tokens=st.integers(0, 7))
    def append(self, number, tokens):
        if (sequence := self.any(number)) is None:
            return
        length, before = self.pool.length(sequence), self.pool.pages(sequence)
        try:
            copies = self.pool.append(sequence, tokens)
        except OutOfPages:
            assert self.pool.pages(sequence) == before
            assert self.pool.length(sequence) == length
            return
        for copy in copies:
            self.memory[copy.target, : copy.tokens] = self.memory[copy.source, : copy.tokens]
        self.write(sequence, length, tokens)

    @rule(number=pick, cut=st.none() | pick)
    def fork(self, number, cut):
        if (sequence := self.any(number)) is None:
            return
        length, free = self.pool.length(sequence), self.pool.num_free
        tokens = None if cut is None else cut % (length + 1)
        child = self.pool.fork(sequence, tokens)
        assert self.pool.num_free == free
        self.model[child] = self.model[sequence][:tokens]

    @rule(number=pick, cut=pick)
    def truncate(self, number, cut):
        if (sequence := self.any(number)) is None:
            return
        tokens = cut % (self.pool.length(sequence) + 1)
        self.pool.truncate(sequence, tokens)
        self.model[sequence] = self.model[sequence][:tokens]

    @rule(number=pick)
    def free(self, number):
        if (sequence := self.any(number)) is None:
            return
        self.pool.free(sequence)
        del self.model[sequence]
        self.gone.append(sequence)

    @rule(number=pick)
    def free_again(self, number):
        if self.gone:
            before = repr(self.pool)
            with pytest.raises(ValueError, match="must be in the pool"):
                self.pool.free(self.gone[number % len(self.gone)])
            assert repr(self.pool) == before

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for sequence, tokens in self.model.items():
            assert self.memory.reshape(-1)[self.pool.slots(sequence, 0, len(tokens))].tolist() == tokens

    @invariant()
    def one_more_step(self):
        Machine.steps += 1

    @invariant()
    def every_page_is_counted(self):
        held = [page for sequence in self.model for page in self.pool.pages(sequence)]
        counts = np.bincount(held, minlength=self.pool.num_pages) if held else np.zeros(self.pool.num_pages, int)
        assert [self.pool.references(page) for page in range(self.pool.num_pages)] == counts.tolist()
        assert self.pool.num_free == (counts == 0).sum()
        assert sorted(self.pool.sequences) == sorted(self.model)
        for sequence, tokens in self.model.items():
            assert len(self.pool.pages(sequence)) == -(-len(tokens) // self.pool.page_size)


def test_ten_thousand_steps_of_the_model():
    Machine.steps = 0
    run_state_machine_as_test(Machine, settings=settings(max_examples=70, stateful_step_count=200, deadline=None))
    assert Machine.steps >= 10_000


def test_table_of_a_step():
    pool = PagePool(10, 4)
    sequences = [pool.allocate(n)[0] for n in (9, 0, 4)]
    table = pool.lookup_table(sequences)
    assert (table.dtype, table.shape) == (np.uint32, (3, 24))
    assert [row[row < 10].tolist() for row in table] == [[0, 1, 2], [], [3]]
    assert pool.lengths(sequences).tolist() == [9, 0, 4]
    assert pool.lookup_table(sequences, columns=3).shape == (3, 3)
    with pytest.raises(ValueError, match="columns 2: the longest sequence has 3 pages"):
        pool.lookup_table(sequences, columns=2)


def test_copies_carry_values_and_scales():
    cache = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(1, 16), num_pages=4, page_size=4, num_layers=2, batch_size=2, max_length=8, dtype="fp8",
        scale_dtype="fp32", quantization_granularity=16,
    )
    pool = PagePool(4, 4)
    one, _ = pool.allocate(3)
    cache.blocks[0, ..., :3, :, :], cache.scales[0, ..., :3, :, :] = 2, 5
    two = pool.fork(one)
    copies = pool.append(one, 1)
    copy_pages(cache, copies)
    assert [(c.source, c.target, c.tokens) for c in copies] == [(0, 1, 3)]
    for array in (cache.blocks, cache.scales):
        assert array[1, :, :, :3].tobytes() == array[0, :, :, :3].tobytes()
        assert np.isnan(array[1, :, :, 3].astype(np.float32)).all()
    assert pool.append(two, 1) == []  # nobody shares its page any more


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda p: p.append(7, 1), "sequence is 7: must be in the pool"),
        (lambda p: p.append(0, -1), "tokens is -1: must be at least 0"),
        (lambda p: p.allocate(-1), "tokens is -1: must be at least 0"),
        (lambda p: p.fork(0, 4), "tokens 4 of sequence 0: it has 3"),
        (lambda p: p.truncate(0, 4), "tokens 4 of sequence 0: it has 3"),
        (lambda p: p.slots(0, 2, 2), "tokens 2 to 4 of sequence 0: it has 3"),
        (lambda p: p.slots(0, -1, 2), "first is -1: must be at least 0"),
        (lambda p: p.slots(0, 0, 1.0), "tokens is 1.0: must be an integer"),
        (lambda p: p.references(2), "page 2: the pool has pages 0 to 1"),
        (lambda p: p.references(-1), "page is -1: must be at least 0"),
        (lambda p: p.lookup_table([0], columns=2.5), "columns is 2.5: must be an integer"),
    ],
)
def test_errors_change_nothing(act, message):
    pool = PagePool(2, 4)
    pool.allocate(3)
    with pytest.raises(ValueError, match=message):
        act(pool)
    assert (pool.num_free, pool.sequences, pool.length(0)) == (1, (0,), 3)
    with pytest.raises(OutOfPages, match="9 more need 2 pages, 1 of 2 are free"):
        pool.append(0, 9)
    with pytest.raises(OutOfPages, match="need 25000000000000000000 pages"):
        pool.append(0, 10**20)


@pytest.mark.parametrize("wrong", [PageCopy(0, 3, 1), PageCopy(0, -1, 1), PageCopy(-1, 0, 1), PageCopy(0, 1, 5)])
def test_copies_of_what_is_not_there_write_nothing(wrong):
    params = KVCacheStaticParams(1, 2)
    cache = PagedKVCacheCollection.allocate(
        params, num_pages=2, page_size=4, num_layers=1, batch_size=1, max_length=8, dtype="fp32"
    )
    cache.blocks[...] = np.arange(3).reshape(-1, 1, 1, 1, 1, 1)
    before = cache.blocks.copy()
    with pytest.raises(ValueError, match=rf"target={wrong.target}, .*: must be pages 0 to 2 and at most 4 tokens"):
        copy_pages(cache, [PageCopy(0, 1, 4), wrong])
    np.testing.assert_array_equal(cache.blocks, before)


def test_a_copy_on_write_without_a_free_page_changes_nothing():
    """Law: a shared page has to be copied before the next token goes into it, and the copy needs a page, too."""
    pool = PagePool(1, 4)
    prompt, _ = pool.allocate(3)
    branch = pool.fork(prompt)
    for sequence in (prompt, branch):
        with pytest.raises(OutOfPages, match="1 more need 1 pages, 0 of 1 are free"):
            pool.append(sequence, 1)
        assert (pool.pages(sequence), pool.length(sequence), pool.references(0)) == ((0,), 3, 2)
