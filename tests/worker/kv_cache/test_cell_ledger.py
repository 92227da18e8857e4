"""The counts of the ledger equal those of a simple model, in which every sequence has a list of its cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.executed_lines import count_executed_lines

from llamaq.worker.kv_cache.cell_ledger import CellLedger

N_CELLS = 40
SEQ_IDS = range(6)

Step = tuple[str, int, int, int]
"""An operation, two sequences, and a number of cells, which is reduced if the operation does not allow it."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "cut", "share", "share", "drop"]),
        st.sampled_from(SEQ_IDS),
        st.sampled_from(SEQ_IDS),
        st.integers(0, 12),
    ),
    min_size=15,  # with fewer steps, most examples only fill the pool
    max_size=40,
)


class NaiveCells:
    """A simple model of the ledger: for every sequence a list of cells, each of which is a distinct object."""

    def __init__(self) -> None:
        self.cells: dict[int, list[object]] = {seq_id: [] for seq_id in SEQ_IDS}

    def in_use(self, seq_ids: Sequence[int] = SEQ_IDS) -> set[object]:
        return {cell for seq_id in seq_ids for cell in self.cells[seq_id]}

    def owned(self, seq_ids: Sequence[int]) -> int:
        return len(self.in_use() - self.in_use([other for other in SEQ_IDS if other not in seq_ids]))

    def apply(self, step: Step, ledger: CellLedger) -> None:
        """Apply the step to the model and to the ledger."""
        name, seq_id, other, n = step
        mine = self.cells[seq_id]
        match name:
            case "grow":
                n = min(n, N_CELLS - len(self.in_use()))
                mine.extend(object() for _ in range(n))
                ledger.grow(seq_id, len(mine))
            case "cut":
                del mine[n:]
                ledger.cut(seq_id, len(mine))
            case "share" if not mine:
                self.cells[seq_id] = self.cells[other][:n]
                ledger.share(other, seq_id, len(self.cells[seq_id]))
            case "drop":
                mine.clear()
                ledger.drop(seq_id)


def assert_counts_agree(ledger: CellLedger, naive: NaiveCells) -> None:
    ledger.check_integrity()
    assert {seq_id: ledger.held(seq_id) for seq_id in SEQ_IDS} == {s: len(c) for s, c in naive.cells.items()}
    assert {seq_id: ledger.owned(seq_id) for seq_id in SEQ_IDS} == {s: naive.owned([s]) for s in SEQ_IDS}
    assert ledger.used == len(naive.in_use())
    assert ledger.shared == sum(map(len, naive.cells.values())) - len(naive.in_use())


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_after_every_step_all_counts_equal_those_of_the_model(steps: list[Step]) -> None:
    ledger, naive = CellLedger(N_CELLS), NaiveCells()
    for step in steps:
        naive.apply(step, ledger)
        assert_counts_agree(ledger, naive)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_cells_owned_together_are_those_that_no_other_sequence_holds(steps: list[Step]) -> None:
    ledger, naive = CellLedger(N_CELLS), NaiveCells()
    for step in steps:
        naive.apply(step, ledger)
    for n in range(len(SEQ_IDS) + 1):
        for some in combinations(SEQ_IDS, n):
            assert ledger.owned_together(some) == naive.owned(some)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.permutations(SEQ_IDS))
def test_a_drop_frees_the_owned_cells_in_any_order_until_no_cell_is_used(steps: list[Step], order: list[int]) -> None:
    ledger, naive = CellLedger(N_CELLS), NaiveCells()
    for step in steps:
        naive.apply(step, ledger)
    for seq_id in order:
        before, owned = ledger.used, ledger.owned(seq_id)
        ledger.drop(seq_id)
        ledger.check_integrity()
        assert (before - ledger.used, ledger.held(seq_id)) == (owned, 0)
    assert (ledger.used, ledger.shared) == (0, 0)


def fork_of_three() -> CellLedger:
    """Return the ledger of the drawing in the docstring of the ledger's module."""
    ledger = CellLedger(100)
    ledger.grow(7, 12)
    ledger.share(7, 3, 8)
    ledger.grow(3, 13)
    ledger.share(3, 9, 6)
    ledger.grow(9, 8)
    return ledger


def test_the_counts_equal_those_in_the_picture_of_the_docstring() -> None:
    ledger = fork_of_three()
    assert repr(ledger) == "<CellLedger 19/100 cells used, 14 shared, 3 sequences>"
    assert ledger.owned(7) == 4
    ledger.drop(7)
    assert repr(ledger) == "<CellLedger 15/100 cells used, 6 shared, 2 sequences>"


def test_a_prefix_stays_in_use_until_its_last_copy_is_dropped() -> None:
    ledger = CellLedger(1000)
    ledger.grow(0, 500)
    for seq_id in range(1, 5):
        ledger.share(0, seq_id, 500)
        ledger.grow(seq_id, 510)
    assert [ledger.owned(seq_id) for seq_id in range(5)] == [0, 10, 10, 10, 10]
    assert (ledger.owned_together([1, 2]), ledger.owned_together(range(5))) == (20, 540)
    for seq_id in range(4):
        ledger.drop(seq_id)
    assert (ledger.used, ledger.owned(4)) == (510, 510)


def test_cells_added_after_a_cut_are_not_the_cells_that_were_shared() -> None:
    ledger = CellLedger(100)
    ledger.grow(0, 10)
    ledger.share(0, 1, 10)
    ledger.cut(0, 4)
    ledger.grow(0, 10)
    assert (ledger.used, ledger.shared, ledger.owned(0), ledger.owned(1)) == (16, 4, 6, 6)


def test_the_source_of_a_copy_may_itself_be_a_copy() -> None:
    ledger = CellLedger(100)
    ledger.grow(0, 10)
    ledger.share(0, 1, 10)
    ledger.share(1, 2, 10)
    ledger.drop(1)
    ledger.check_integrity()
    assert (ledger.used, ledger.shared, ledger.owned(2)) == (10, 10, 0)


@pytest.mark.parametrize("n_kept", [0, 3])
def test_the_heir_of_a_cut_sequence_still_shares_its_first_cells(n_kept: int) -> None:
    ledger = CellLedger(100)
    ledger.grow(0, 10)
    ledger.share(0, 1, 6)
    ledger.grow(1, 12)
    ledger.share(1, 2, 9)
    ledger.cut(1, n_kept)
    ledger.check_integrity()
    assert (ledger.used, ledger.owned(0), ledger.owned(1), ledger.owned(2)) == (13, 4, 0, 3)
    ledger.drop(0)
    assert (ledger.used, ledger.owned(2)) == (9, 9 - n_kept)


def test_cells_owned_together_exclude_those_of_a_copy_of_a_copy() -> None:
    ledger = CellLedger(100)
    ledger.grow(0, 10)
    ledger.share(0, 1, 8)
    ledger.share(1, 2, 4)
    assert (ledger.owned_together([0, 1]), ledger.owned(0), ledger.owned(1)) == (6, 2, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.grow(3, 12),
        lambda ledger: ledger.grow(5, -1),
        lambda ledger: ledger.grow(7, 94),
        lambda ledger: ledger.grow(5, 82),
        lambda ledger: ledger.cut(7, 13),
        lambda ledger: ledger.cut(7, -1),
        lambda ledger: ledger.cut(5, 1),
        lambda ledger: ledger.share(7, 3, 4),
        lambda ledger: ledger.share(7, 7, 4),
        lambda ledger: ledger.share(7, 5, 13),
        lambda ledger: ledger.share(7, 5, -1),
        lambda ledger: ledger.share(5, 4, 1),
    ],
)
def test_an_impossible_operation_is_refused_and_changes_nothing(wrong: Callable[[CellLedger], None]) -> None:
    ledger = fork_of_three()
    with pytest.raises(ValueError, match=r"sequence \d holds|sequence \d needs"):
        wrong(ledger)
    ledger.check_integrity()
    assert repr(ledger) == repr(fork_of_three())
    assert [ledger.held(seq_id) for seq_id in (7, 3, 9, 5)] == [12, 13, 8, 0]


def test_the_last_cell_of_the_pool_can_be_used() -> None:
    ledger = fork_of_three()
    ledger.grow(7, 93)
    ledger.check_integrity()
    assert (ledger.used, ledger.owned(7)) == (100, 85)


def test_operations_on_zero_cells_leave_an_empty_sequence_empty() -> None:
    ledger = CellLedger(10)
    ledger.grow(0, 0)
    ledger.share(0, 1, 0)
    ledger.cut(1, 0)
    ledger.drop(2)
    assert (repr(ledger), ledger.owned(0)) == ("<CellLedger 0/10 cells used, 0 shared, 0 sequences>", 0)


def miscount(ledger: CellLedger) -> None:
    ledger._used += 1


def lose_a_cell_of_the_source(ledger: CellLedger) -> None:
    ledger._sequences[7].held = 7
    ledger._used -= 5


def share_more_than_it_holds(ledger: CellLedger) -> None:
    ledger._sequences[9].held = 5
    ledger._used -= 3


def remove_a_child(ledger: CellLedger) -> None:
    ledger._sequences[3].children.clear()


def remove_a_parent(ledger: CellLedger) -> None:
    ledger._sequences[9].parent = None


def remove_a_sequence(ledger: CellLedger) -> None:
    del ledger._sequences[9]
    ledger._used -= 2


def remove_the_source(ledger: CellLedger) -> None:
    del ledger._sequences[7]
    ledger._used -= 12


def make_a_circle(ledger: CellLedger) -> None:
    ledger._sequences[7].move(ledger._sequences[9], 6)
    ledger._used -= 6


def keep_an_empty_sequence(ledger: CellLedger) -> None:
    ledger.grow(5, 1)
    ledger._sequences[5].held = 0
    ledger._used -= 1


def change_the_key_of_a_sequence(ledger: CellLedger) -> None:
    ledger._sequences[4] = ledger._sequences.pop(9)


def have_fewer_cells_than_used(ledger: CellLedger) -> None:
    ledger.n_cells = 18


@pytest.mark.parametrize(
    "damage",
    [
        miscount,
        lose_a_cell_of_the_source,
        share_more_than_it_holds,
        remove_a_child,
        remove_a_parent,
        remove_a_sequence,
        remove_the_source,
        make_a_circle,
        keep_an_empty_sequence,
        change_the_key_of_a_sequence,
        have_fewer_cells_than_used,
    ],
)
def test_the_integrity_check_finds_damage(damage: Callable[[CellLedger], None]) -> None:
    ledger = fork_of_three()
    ledger.check_integrity()
    damage(ledger)
    with pytest.raises(AssertionError):
        ledger.check_integrity()


def test_the_work_of_a_tick_is_a_few_lines_for_each_of_its_sequences() -> None:
    ledger = CellLedger(10**6)

    def tick(n_held: int) -> None:
        for seq_id in range(200):
            ledger.grow(seq_id, n_held)

    tick(1)
    assert count_executed_lines(lambda: tick(2)) < 20 * 200  # a loop over all sequences has 200 lines for each of them
