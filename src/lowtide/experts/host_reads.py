"""Reads of one layer's absent experts into host memory, and leases on those present."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from time import perf_counter

from lowtide.core import IntArray, Moves
from lowtide.errors import InternalError
from lowtide.experts.host_tier import HostTier, compute_stalled
from lowtide.experts.read_ahead import PendingRead


class HostReads:
    """Reads a layer's absent experts, each into a taken slot, and leases its present experts.

    A caller that gets an expert reports the end of its use by `HostTier.used_by` or `give_back`.
    """

    def __init__(self, tier: HostTier, layer: int, wanted: IntArray) -> None:
        """Lease the present experts; wanted: ascending.

        The absent ones must be read whatever the policies decide; `start` begins their reads.
        """
        self._tier = tier
        self._layer = layer
        self._admit: frozenset[int] = frozenset()
        self._admitted: list[int] = []
        is_here = tier.ledger.is_resident(layer)[wanted]
        self.slots = {expert: tier.lease(layer, expert) for expert in wanted[is_here].tolist()}
        absent: list[int] = wanted[~is_here].tolist()
        self._pending = tier.claim(layer, absent)
        begun = {read.expert for read in self._pending}
        self._waiting = deque(expert for expert in absent if expert not in begun)

    def obey(self, moves: Moves) -> None:
        """Carry out moves: victims leave now or after use, and admitted experts stay once read."""
        tier = self._tier
        self._admit = frozenset(moves.admit.tolist())
        tier.stats.num_moves_done += len(moves.admit) + len(moves.later)
        for expert in moves.evict.tolist():
            tier.evict(self._layer, expert)
        tier.late.expect(self._layer, moves.later)

    @property
    def num_waiting(self) -> int:
        """Number of experts that wait for a slot."""
        return len(self._waiting)

    def start(self) -> None:
        """Give free slots to waiting experts, then to the next layer's."""
        tier = self._tier
        tier.wants_slots = True  # first: what is given back from now on is news, or settled here
        tier.settle()
        while self._waiting and tier.ledger.num_free:
            self._pending.append(tier.start_read(self._layer, self._waiting.popleft()))
        tier.wants_slots = bool(self._waiting) or tier.start_for_later()

    def arriving(
        self, experts: Collection[int], is_used: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """Yield absent ones of `experts` as they arrive in slots.

        is_used: returns True if a slot is in use and will be freed. Slots that become free
        meanwhile are given away as by `start`. Raises StorageError if one cannot be read.
        """
        missing = set(experts).difference(self.slots)
        while missing:
            self._tier.news.clear()
            will_be_free = is_used()  # first: what is given back after it is news
            self.start()
            reads = [read for read in self._pending if read.expert in missing]
            arrived = [read for read in reads if read.ticket.done()]
            for read in arrived:
                self._take_in(read)
                missing.remove(read.expert)
                yield read.expert
            if reads and not arrived:
                self._wait_for_read(reads[0])
            elif not arrived:
                self._wait_for_slot(will_be_free)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield all experts, for a caller that reports every use by `used_by`."""
        yield from list(self.slots.items())
        absent = [*self._waiting, *(read.expert for read in self._pending)]
        for expert in self.arriving(absent):
            yield expert, self.slots[expert]

    def _take_in(self, read: PendingRead) -> None:
        tier = self._tier
        tier.take_in(read)
        self._pending.remove(read)
        if read.expert in self._admit:
            tier.bind(read)
            tier.ledger.lease(read.slot)
            self._admitted.append(read.expert)
        self.slots[read.expert] = read.slot

    def _wait_for_read(self, read: PendingRead) -> None:
        start_s = perf_counter()
        self._tier.wait(lambda: self._tier.stalled(read))
        self._tier.stats.wait_s += perf_counter() - start_s

    def _wait_for_slot(self, will_be_free: bool) -> None:
        if will_be_free:
            self._tier.wait(compute_stalled)
        elif not (self._tier.wait_for_use() or self._give_up_one()):
            raise InternalError(f"{len(self._waiting)} experts wait and no slot is free.")

    def _give_up_one(self) -> bool:
        """Evict an admitted and used expert for a waiting one; return True if there was one.

        When experts arrive in ascending order, the residents that they replace may stay in use
        until there are too few slots for both.
        """
        tier = self._tier
        for expert in self._admitted:
            if not tier.ledger.is_leased(self.slots[expert]):
                self._admitted.remove(expert)
                tier.evict(self._layer, expert)
                return True
        return False


class NoReads(HostReads):
    """Experts of a tier that keeps all of them: none is read, and uses need not be reported."""

    def __init__(self, tier: HostTier, layer: int, wanted: IntArray) -> None:
        self.slots = dict(
            zip(wanted.tolist(), tier.ledger.table[layer, wanted].tolist(), strict=True)
        )
        self._waiting: deque[int] = deque()

    def obey(self, moves: Moves) -> None:
        """Do nothing: every expert stays."""

    def start(self) -> None:
        """Do nothing."""

    def arriving(
        self, experts: Collection[int], is_used: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        return iter(())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.slots.items())
