"""Link to a device: queues copies of experts into its slots.

A step's demands are queued at once. Prefetches and moves wait until the link would be idle, go one
at a time, and are never interrupted. The link decides nothing: policies choose what to copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lowtide.core import NO_EXPERTS, BoolArray, FloatArray, IntArray, Moves
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.host_tier import HostTier
from lowtide.experts.slots import NO_SLOT, SlotLedger
from lowtide.experts.stats import LinkStats
from lowtide.policies.prefetch import PrefetchOutcome
from lowtide.threads.event import Event

_NO_LAYER = -1


class Arrival(NamedTuple):
    """Expert in a taken slot, or on its way into it."""

    slot: int
    event: Event
    order: int  # of its copy among all copies to its device
    is_move: bool  # resident when it has arrived; else prefetched for one step


class LinkFacts(NamedTuple):
    """What a device and the link to it have of one layer."""

    is_here: BoolArray  # [num_experts]: residents
    is_kept: BoolArray  # [num_experts]: these, and experts that are becoming resident
    arriving_s: FloatArray  # [num_experts]: until an expert on its way can be used; else infinite
    busy_s: float  # an upper bound of the time that the link is busy


class _WaitingExpert(NamedTuple):
    """Expert that waits for an idle link."""

    layer: int
    expert: int
    victim: int | None  # the resident that it replaces, if it is a move and no slot is free


class Link:
    """Owns the ledger of a device's slots, and the order of the copies into them.

    A slot changes owner at once in the ledger. Its next copy waits for the event of its last use,
    so bytes change only when nothing needs them.
    """

    def __init__(
        self,
        device: Device,
        ledger: SlotLedger,
        host: HostTier,
        link_s: float,
        num_demand_slots: int,
    ) -> None:
        """Bind the link; `link_s`: seconds of one copy.

        `num_demand_slots`: slots that prefetches leave free.
        """
        self.ledger = ledger
        self.link_s = link_s
        self.stats = LinkStats()
        self._device = device
        self._host = host
        self._num_demand_slots = num_demand_slots
        self._last_use: list[Event | None] = [None] * ledger.max_slots
        # By layer: of all its slots while it stays wholly resident, later than those above.
        self._whole_use: list[Event | None] = [None] * ledger.num_layers
        self._coming: dict[tuple[int, int], Arrival] = {}
        self._ahead: deque[_WaitingExpert] = deque()
        # By layer and expert, in their order.
        self._moves: dict[tuple[int, int], _WaitingExpert] = {}
        self._under_way: int | None = None  # the layer whose residents may still be run
        self._waits = np.zeros((ledger.num_layers, ledger.num_experts), bool)  # experts in `_moves`
        self._owed: dict[int, list[_WaitingExpert]] = {}  # by layer: moves that this pass ends with
        self._in_flight: deque[Event] = deque()
        self._num_copies = 0
        self._num_open = 0  # experts asked to become resident, neither so nor dropped yet
        self._unheard: PrefetchOutcome | None = None  # of a pass' end, for the next `begin_layer`
        self._unproven: list[tuple[int, int]] = []  # residents whose copies may have failed

    def is_kept(self, layer: int) -> BoolArray:
        """Return residents, and experts that are becoming resident: [num_experts]."""
        kept: BoolArray = self.ledger.table[layer] != NO_SLOT
        for (its_layer, expert), arrival in self._coming.items():
            if its_layer == layer and arrival.is_move:
                kept[expert] = True
        return kept

    def look(self, layer: int) -> LinkFacts:
        """Check which copies have ended; return what is here of a layer and on its way."""
        if self._in_flight or self._coming:
            self.bind_arrived()
        is_here: BoolArray = self.ledger.table[layer] != NO_SLOT
        is_kept, left_s = is_here, np.full(self.ledger.num_experts, np.inf)
        if self._coming:
            is_kept = self.is_kept(layer)
            first = self._num_copies - len(self._in_flight)
            for (its_layer, expert), arrival in self._coming.items():
                if its_layer == layer:
                    left_s[expert] = self.link_s * max(0, arrival.order + 1 - first)
        return LinkFacts(is_here, is_kept, left_s, len(self._in_flight) * self.link_s)

    def note_use(self, group: ExpertGroup, use: Event) -> None:
        """Make copies into the group's slots wait for `use` from now on."""
        if self._whole_use[group.layer] is not None:
            self._divide_use(group.layer)
        for slot in group.slots.tolist():
            self._last_use[slot] = use

    def note_whole_use(self, layer: int, use: Event) -> None:
        """Make copies into the slots of a layer that is wholly resident wait for `use`."""
        self._whole_use[layer] = use

    def note_whole_pass(self, use: Event) -> None:
        """Make copies into the slots of all layers, which are wholly resident, wait for `use`."""
        self._whole_use = [use] * self.ledger.num_layers

    def begin_layer(self, layer: int, fetch: IntArray) -> PrefetchOutcome | None:
        """Protect the layer's residents until `obey` has the last moves of its pass.

        Returns the outcome of its prefetches; fetch: the experts that the device runs. Forgets
        prefetches that had not begun and frees unused slots, also if a pass was interrupted before
        their layer: later work needs the slots.
        """
        self._under_way = layer
        if not (self._ahead or self._coming or self._unheard):
            return None
        return self._end_prefetch(layer, fetch)

    def take_arrivals(self, layer: int, experts: Sequence[int]) -> dict[int, Arrival | None]:
        """Map `experts` to their slots or copies under way; the others to None.

        The caller must settle them.
        """
        found: dict[int, Arrival | None] = dict.fromkeys(experts)
        if self._coming:
            for expert in experts:
                found[expert] = self._coming.pop((layer, expert), None)
        return found

    def fetch(self, host_slots: Sequence[int]) -> list[Arrival]:
        """Queue copies of experts into newly taken slots; the caller must settle them."""
        arrivals = self._copy(host_slots, is_move=False)
        self.stats.num_fetched += len(arrivals)
        return arrivals

    def keep(self, layer: int, experts: IntArray) -> IntArray:
        """Evict all residents but `experts`; returns those of `experts` that are absent."""
        is_resident = self.ledger.is_resident(layer)
        self._divide_use(layer)
        self.ledger.evict(layer, *np.setdiff1d(np.flatnonzero(is_resident), experts).tolist())
        return experts[~is_resident[experts]]

    def load(self, layer: int, expert: int, host_slot: int) -> None:
        """Make an absent expert resident at once, before the first step."""
        [arrival] = self._copy([host_slot], is_move=True, is_counted=False)
        arrival.event.wait()
        self.ledger.bind(layer, expert, arrival.slot)

    def obey(
        self,
        layer: int,
        moves: Moves,
        at_hand: Mapping[int, Arrival | None],
        is_last: bool = True,
    ) -> set[int]:
        """Carry out moves; returns those of `at_hand` to keep, for `settle`.

        at_hand: absent experts that the device runs this step, with the arrivals that the caller
        took. is_last: no more moves of the layer follow in this pass.

        Other experts wait for an idle link, or for the end of the pass if they are owed, and their
        victims stay until then. New moves of a layer replace its old ones that have not begun.
        """
        if is_last:
            self._under_way = None
        keep: set[int] = set()
        for expert, arrival in at_hand.items():
            if arrival is not None and arrival.is_move:
                keep.add(expert)
        if layer in self._owed:  # of an interrupted pass
            self.drop_moves(len(self._owed.pop(layer)))
        if not len(moves.admit) and not len(moves.evict):
            return keep
        self._num_open += len(moves.admit)
        for key in tuple(self._moves):
            if key[0] == layer:
                self._forget_move(key)
                self.drop_moves(1)
        waiting: list[_WaitingExpert] = []
        admit = moves.admit.tolist()
        admit.sort(key=at_hand.keys().__contains__, reverse=True)  # these first, in their order
        victims: list[int | None] = list(moves.evict.tolist())
        num_unpaired = max(0, len(victims) - len(admit))
        leaving = victims[:num_unpaired]
        paired: list[int | None] = [None] * max(0, len(admit) - len(victims))  # the first have none
        paired += victims[num_unpaired:]
        for expert, victim in zip(admit, paired, strict=True):
            if expert in at_hand:
                keep.add(expert)
                self.stats.num_moves_done += 1
                self._num_open -= 1
                leaving.append(victim)
            else:
                waiting.append(_WaitingExpert(layer, expert, victim))
        if moves.is_owed:
            self._owed[layer] = waiting
        else:
            for wanted in waiting:
                self._moves[layer, wanted.expert] = wanted
                self._waits[layer, wanted.expert] = True
        self._evict(layer, leaving)
        return keep.difference(leaving)

    def settle(self, layer: int, arrived: Mapping[int, int], keep: Container[int]) -> None:
        """Make fetched experts resident, or free their slots, after their use was queued.

        arrived: each one's slot.
        """
        for expert, slot in arrived.items():
            if expert in keep:
                self._unproven.append((layer, expert))  # first: Ctrl-C may come in between
                self.ledger.bind(layer, expert, slot)
            else:
                self.ledger.drop(slot)

    def confirm(self) -> None:
        """Record that the device has joined: everything bound since the last call has arrived."""
        self._unproven.clear()

    def look_ahead(self, layer: int, experts: IntArray) -> None:
        """Queue prefetches for `layer`, the most wanted first."""
        for expert in experts.tolist():
            self._ahead.append(_WaitingExpert(layer, expert, None))

    def end_pass(self) -> None:
        """Drop prefetches that no layer has asked for: those of layers that were wholly resident.

        The policy is told with the next layer's.
        """
        self._unheard = self._end_prefetch(_NO_LAYER, NO_EXPERTS)

    def pump(self, idle_s: float = 0.0) -> None:
        """Make arrived moves resident; begin waiting transfers while the link would be idle.

        `idle_s`: how long the caller will demand nothing; at least one transfer is begun.
        """
        if self._in_flight or self._coming:
            self.bind_arrived()
        while self._ahead and len(self._in_flight) * self.link_s <= idle_s:
            self._begin_prefetch(self._ahead.popleft())
        if self._moves:
            self._begin_moves(idle_s)

    def offer(self, layer: int, expert: int, host_slot: int) -> None:
        """Offer an expert just read for use on the host: its move may begin now.

        So it need not be found in host memory again. The move begins if the link is idle or about
        to be.
        """
        wanted = self._moves.get((layer, expert))
        if layer == self._under_way or wanted is None:
            return
        self.bind_arrived()
        if self.busy_s > self.link_s or not self._has_room(wanted):
            return
        self._host.share(host_slot)
        self._begin_move(wanted, host_slot)

    def take_owed(self) -> dict[int, IntArray]:
        """Return the owed experts by layer, ascending, and evict their victims."""
        owed, self._owed = self._owed, {}
        if not owed:
            return {}
        for layer, wanted in owed.items():
            self._evict(layer, [one.victim for one in wanted])
        experts = {layer: sorted(one.expert for one in ones) for layer, ones in owed.items()}
        return {layer: np.array(ids, np.int64) for layer, ids in experts.items() if ids}

    def move(self, layer: int, expert: int, host_slot: int) -> None:
        """Begin an owed move, into a free slot; `wait_for_moves` must follow."""
        [self._coming[(layer, expert)]] = self._copy([host_slot], is_move=True)
        self.stats.num_moved += 1
        self.stats.num_moves_done += 1
        self._num_open -= 1

    def drop_moves(self, num_moves: int) -> None:
        """Count experts that were to be resident, and will not be."""
        self._num_open -= num_moves
        self.stats.num_moves_dropped += num_moves

    @property
    def num_moves_waiting(self) -> int:
        """Number of experts that wait to become resident."""
        return self._num_open

    @property
    def num_coming(self) -> int:
        """Number of experts on their way into a slot, or there and not asked for yet."""
        return len(self._coming)

    @property
    def num_staged(self) -> int:
        """Number of prefetched experts that no layer has asked for yet."""
        return sum(not arrival.is_move for arrival in self._coming.values())

    def wait_for_moves(self) -> None:
        """Wait until every running move has arrived; DeviceError if one failed."""
        for arrival in self._coming.values():
            if arrival.is_move:
                arrival.event.wait()
        self.bind_arrived()

    def bind_arrived(self) -> None:
        """Check which copies have ended, in their order, and make arrived moves resident.

        Raises DeviceError when one has failed.
        """
        in_flight = self._in_flight
        if in_flight and in_flight[-1].is_done():  # so have those before it
            in_flight.clear()
        while len(in_flight) > 1 and in_flight[0].is_done():
            in_flight.popleft()
        num_ended = self._num_copies - len(in_flight)
        for key, arrival in tuple(self._coming.items()):
            if arrival.is_move and arrival.order < num_ended:
                arrival.event.wait()  # ended already: raises what it failed with
                self.ledger.bind(*key, arrival.slot)
                del self._coming[key]

    @property
    def busy_s(self) -> float:
        """Upper bound of the time the link is busy, as of the last `bind_arrived`."""
        return len(self._in_flight) * self.link_s

    @property
    def is_in_use(self) -> bool:
        """True if anything is on its way or waits."""
        return bool(self._in_flight or self._coming or self._ahead or self._moves or self._unproven)

    @property
    def has_waiting(self) -> bool:
        if not self._moves:
            return bool(self._ahead)
        return bool(self._ahead) or bool(self._movable().any())

    def pause(self) -> None:
        """Between passes, when both streams are idle: finish moves, and forget all other copies.

        No slot is being filled afterwards. Raises DeviceError if a copy failed.
        """
        self.bind_arrived()
        self.stats.prefetch.num_wasted += self.num_staged
        for key in list(self._coming):
            self._drop_arrival(*key)
        self._forget_copies()
        self._last_use = [None] * self.ledger.max_slots
        self._whole_use = [None] * self.ledger.num_layers

    def abandon(self) -> None:
        """Recover from a failure, when both streams are idle: forget arriving experts."""
        for layer, expert in self._unproven:
            self._evict(layer, [expert])
        self._unproven.clear()
        self.stats.prefetch.num_wasted += self.num_staged
        self._coming.clear()
        self._forget_copies()
        self._last_use = [None] * self.ledger.max_slots
        self._whole_use = [None] * self.ledger.num_layers
        self.ledger.reclaim()

    def _forget_copies(self) -> None:
        """Forget copies, which have all ended."""
        self._ahead.clear()
        self.drop_moves(self._num_open)
        self._moves.clear()
        self._waits[:] = False
        self._owed.clear()
        self._under_way = None
        self._in_flight.clear()

    def _copy(
        self, host_slots: Sequence[int], is_move: bool, is_counted: bool = True
    ) -> list[Arrival]:
        host, arrivals, num_bytes = self._host, list[Arrival](), 0
        slots = self.ledger.take_several(len(host_slots))
        for host_slot, slot in zip(host_slots, slots, strict=True):
            source = host.slots.image(host_slot)
            event = self._device.copy(source, slot, self._last_use[slot])
            self._last_use[slot] = None  # the copy comes after it
            if not host.is_permanent:
                host.used_by(host_slot, event)
            self._in_flight.append(event)
            arrivals.append(Arrival(slot, event, self._num_copies, is_move))
            self._num_copies += 1
            num_bytes += source.nbytes
        if is_counted:
            self.stats.link_bytes += num_bytes
        return arrivals

    def _end_prefetch(self, layer: int, fetch: IntArray) -> PrefetchOutcome | None:
        """End a layer's prefetches; those that `layer` does not fetch count as wasted."""
        self._ahead.clear()
        told, self._unheard = self._unheard, None
        if not self._coming:
            return told
        outcome, used = PrefetchOutcome(), frozenset(fetch.tolist())
        is_any = False
        for (its_layer, expert), arrival in tuple(self._coming.items()):
            if arrival.is_move:
                continue
            is_any = True
            if its_layer != layer or expert not in used:
                outcome.num_wasted += 1
                self._drop_arrival(its_layer, expert)
            elif arrival.event.is_done():
                outcome.num_hits += 1
            else:
                outcome.num_late += 1
        if not is_any:
            return told
        self.stats.prefetch.add(outcome)
        if told is not None:
            outcome.add(told)
        return outcome

    def _begin_prefetch(self, wanted: _WaitingExpert) -> None:
        """Begin a prefetch unless the expert is there, or its bytes or a slot are not."""
        if self._can_come(wanted) and self.ledger.num_free > self._num_demand_slots:
            key = (wanted.layer, wanted.expert)
            [self._coming[key]] = self._copy([self._host.lease(*key)], is_move=False)
            self.stats.num_prefetched += 1

    def _begin_moves(self, idle_s: float) -> None:
        """Begin waiting moves in their order while the link would be idle for `idle_s`.

        Experts that are not in host memory or have no free slot keep waiting: their layer's next
        pass may read them, or a copy may end. Experts that arrived in another way are dropped.
        """
        host, is_movable = self._host, self._movable()
        num_left = np.count_nonzero(is_movable)
        for key, wanted in list(self._moves.items()):
            if not num_left or len(self._in_flight) * self.link_s > idle_s:
                return
            if self.ledger.table[key] != NO_SLOT or key in self._coming:
                self._forget_move(key)
                self.drop_moves(1)
            elif is_movable[key] and self._has_room(wanted):
                slot = int(host.ledger.table[key]) if host.is_permanent else host.lease(*key)
                self._begin_move(wanted, slot)
            else:
                continue
            num_left -= int(is_movable[key])

    def _movable(self) -> BoolArray:
        """Mark the experts in host memory that wait to become resident: [layers, experts]."""
        host = self._host
        at_host = True if host.is_permanent else host.ledger.table != NO_SLOT
        is_movable: BoolArray = self._waits & at_host
        if self._under_way is not None:
            is_movable[self._under_way] = False
        return is_movable

    def _begin_move(self, wanted: _WaitingExpert, host_slot: int) -> None:
        key = (wanted.layer, wanted.expert)
        del self._moves[key]
        self._waits[key] = False
        if wanted.victim is not None:
            self._evict(wanted.layer, [wanted.victim])
        [self._coming[key]] = self._copy([host_slot], is_move=True)
        self.stats.num_moved += 1
        self.stats.num_moves_done += 1
        self._num_open -= 1

    def _forget_move(self, key: tuple[int, int]) -> None:
        del self._moves[key]
        self._waits[key] = False

    def _has_room(self, wanted: _WaitingExpert) -> bool:
        num_spare = int(self.ledger.free.state[1]) - self._num_demand_slots
        if num_spare or wanted.victim is None:
            return num_spare > 0
        return self._keeps(wanted.layer, wanted.victim)

    def _can_come(self, wanted: _WaitingExpert) -> bool:
        key = (wanted.layer, wanted.expert)
        return not self.ledger.has(*key) and key not in self._coming and self._host.ledger.has(*key)

    def _keeps(self, layer: int, expert: int) -> bool:
        """Return True if an expert is resident or becoming so."""
        if self.ledger.table[layer, expert] != NO_SLOT:
            return True
        arrival = self._coming.get((layer, expert))
        return arrival is not None and arrival.is_move

    def _evict(self, layer: int, experts: Iterable[int | None]) -> None:
        """Evict residents, and experts that are becoming so."""
        residents: list[int] = []
        for expert in experts:
            if expert is None:
                continue
            if self.ledger.table[layer, expert] != NO_SLOT:
                residents.append(expert)
            elif (layer, expert) in self._coming:
                self._drop_arrival(layer, expert)
        if residents:
            if self._whole_use[layer] is not None:
                self._divide_use(layer)
            self.ledger.evict(layer, *residents)

    def _divide_use(self, layer: int) -> None:
        """Note the use of a whole layer for each of its slots."""
        use, self._whole_use[layer] = self._whole_use[layer], None
        if use is not None:
            for slot in self.ledger.table[layer].tolist():
                self._last_use[slot] = use

    def _drop_arrival(self, layer: int, expert: int) -> None:
        # Its copy may be running: the slot's next copy is queued after it.
        self.ledger.drop(self._coming.pop((layer, expert)).slot)
