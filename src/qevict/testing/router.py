"""The laws of a tier router."""

import itertools
from collections.abc import Iterator, Mapping
from typing import ClassVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.router import LayerBounds, TierRouter
from qevict.contracts.values import PROTECTED, Costs, Geometry, MovePlan, Windows
from qevict.errors import PolicyError
from qevict.testing.contract import RegisteredContract, declares, law, plain_law
from qevict.testing.operators import Operators
from qevict.testing.routing import EVENTS, Question, RouterCase, Setting, cases_of, first_event
from qevict.testing.values import copied, moved, require, same_values

MOST_TIERS = 6
"""Numbers of tiers that a router is offered."""


class RouterContract(RegisteredContract[TierRouter, RouterCase]):
    """The laws of a tier router. One line makes them tests of yours.

    The number of tiers is drawn among those that the router's ``check`` accepts, and the rankings are those that its
    ``rankings`` name. It is asked about several rows, layers and lanes of each row at a time.

    Example:
        ```python
        from qevict.routers.greedy import GreedyTiers
        from qevict.testing import RouterContract


        class TestGreedyTiers(RouterContract):
            part = GreedyTiers(shares=(0.3, 0.7))
        ```
    """

    kind: ClassVar[type] = TierRouter
    examples: ClassVar[int] = 25

    def cases(self) -> SearchStrategy[RouterCase]:
        """Up to two layers, rows, and lanes of each row, of eight windows, with ties, protected windows and filler."""
        return st.sampled_from(self._accepted()).flatmap(cases_of)

    @plain_law("check refuses a number of tiers that the router cannot serve with a PolicyError.")
    def test_it_accepts_or_refuses_a_number_of_tiers(self) -> None:
        self._accepted()

    @law("share splits a row's bytes over the layers: one part each, none negative, together no more than there is.")
    def test_layers_share_no_more_than_there_is(self, case: RouterCase) -> None:
        total = 1000 * sum(case.setting().tier_bytes) + case.seed
        for layers in (1, 3, 32):
            geometry = Geometry(layers, q_heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
            parts = self.part.share(total, geometry, LayerBounds(case.seed, total))
            require(len(parts) == layers, f"{layers} layers get {len(parts)} parts")
            require(min(parts) >= 0 and sum(parts) <= total, f"of {total} bytes, {layers} layers get {parts}")

    @law("Pure: the arguments are not changed.")
    def test_it_changes_nothing_that_it_is_given(self, case: RouterCase) -> None:
        for question, _ in self._history(case.setting()):
            rankings, windows, costs = self._asked(question)
            before = copied((rankings, windows, costs))
            self.part.plan(rankings, windows, costs, question.setting.capacities)
            require(same_values(rankings, before[0]), "it changed the rankings")
            require(same_values(windows, before[1]), "it changed the windows")
            require(same_values(costs, before[2]), "it changed the costs")

    @law("Pure: equal input, equal plan.")
    def test_equal_input_gives_an_equal_plan(self, case: RouterCase) -> None:
        for question, plan in self._history(case.setting()):
            for router in (self.part, self.twin()):
                again = self._plan(question, router)
                equal = same_values(again, plan) and again.counts == plan.counts
                plans = f"{again.place.tolist()}, not {plan.place.tolist()}"
                require(equal, f"asked again at event {question.event}, it plans {plans}")

    @law("Every window in exactly one place: a tier, or evicted.")
    def test_every_candidate_is_placed(self, case: RouterCase) -> None:
        for question, plan in self._history(case.setting()):
            wanted = tuple(question.scores().shape)
            require(plan.place.shape == wanted, f"{wanted} windows get {tuple(plan.place.shape)} places")
            for lane, places in enumerate(plan.place.tolist()):
                lost = {i: places[i] for i in question.ranked(lane) if places[i] not in range(case.tiers + 1)}
                require(not lost, f"with {case.tiers} tiers, places of lane {lane} by column: {lost}")

    @law("Protected and absent windows keep the place they have.")
    def test_what_is_not_ranked_stays(self, case: RouterCase) -> None:
        for question, plan in self._history(case.setting()):
            for lane, places in enumerate(plan.place.tolist()):
                others = set(range(len(places))) - set(question.ranked(lane))
                gone = {i: places[i] for i in others if places[i] != PROTECTED}
                require(not gone, f"at event {question.event}, columns of lane {lane} that were moved: {gone}")

    @law("Counts, where a plan has them, are the windows by lane and tier.")
    def test_counts_are_true(self, case: RouterCase) -> None:
        for question, plan in self._history(case.setting()):
            if plan.counts is not None:
                placed = [[places[i] for i in question.ranked(lane)] for lane, places in enumerate(plan.place.tolist())]
                true = tuple(tuple(map(lane.count, range(case.tiers))) for lane in placed)
                require(plan.counts == true, f"it counts {plan.counts}, the plan has {true}")

    @law("The planned bytes of the lanes that share are together at most their capacities.")
    def test_nobody_takes_more_than_its_capacity(self, case: RouterCase) -> None:
        """Over some events: windows keep the codes that they got, and these are billed as well."""
        for question, plan in self._history(case.setting()):
            places = plan.place.tolist()
            for lanes in question.setting.sharing(self.part.scope):
                limits = [question.setting.capacities[lane] for lane in lanes]
                capacity = None if None in limits else sum(limit or 0 for limit in limits)
                planned = sum(question.planned_bytes(lane, places[lane]) for lane in lanes)
                plans = f"{planned} of {capacity} bytes: {[places[lane] for lane in lanes]}"
                fits = capacity is None or planned <= capacity
                require(fits, f"at event {question.event}, the lanes {lanes} take {plans}")

    @law("Rows are strangers, and so are lanes that do not share.")
    def test_who_does_not_share_is_a_stranger(self, case: RouterCase) -> None:
        for question, plan in self._history(case.setting()):
            for lanes in question.setting.sharing(self.part.scope):
                alone = self._plan(question.only(lanes, self.part.scope), self.part).place.tolist()
                together = plan.place[lanes].tolist()
                plans = f"{together} among others, {alone} alone"
                require(alone == together, f"at event {question.event}, it plans for the lanes {lanes} {plans}")

    @law("It reads the rankings that it declares, and no others.")
    def test_it_reads_the_rankings_that_it_declares(self, case: RouterCase) -> None:
        for question, plan in self._history(case.setting()):
            rankings, windows, costs = self._asked(question)
            more = {**rankings, "another": -rankings[self.part.rankings[0]]}
            again = self.part.plan(more, windows, costs, question.setting.capacities)
            require(same_values(again.place.cpu(), plan.place), "with one ranking more, it plans otherwise")

    @law("Of two windows of a lane with equal scores the earlier position wins.", given_that=declares("earlier_wins"))
    def test_the_earlier_position_wins_a_tie(self, case: RouterCase) -> None:
        """Among windows that keep the same codes."""
        for question, plan in self._history(case.setting()):
            rankings = [question.scores(number).tolist() for number in range(len(self.part.rankings))]
            for lane, places in enumerate(plan.place.tolist()):
                lines, held = question.setting.lanes[lane], question.held[lane]
                for one, other in itertools.permutations(question.ranked(lane), 2):
                    alike = all(scores[lane][one] == scores[lane][other] for scores in rankings)
                    alike = alike and held[one] == held[other]
                    early, late = lines[one].position, lines[other].position
                    finding = f"position {late} goes to {places[other]}, {early} with the same score to {places[one]}"
                    require(not alike or early > late or places[one] <= places[other], finding)

    @law("Nothing depends on the order of columns.")
    def test_the_order_of_columns_means_nothing(self, case: RouterCase) -> None:
        setting = case.setting()
        turned = attrs.evolve(setting, lanes=tuple(tuple(reversed(lane)) for lane in setting.lanes))
        for (question, plan), (_, other) in zip(self._history(setting), self._history(turned), strict=True):
            wanted, found = plan.place.flip(1).tolist(), other.place.tolist()
            require(found == wanted, f"with columns reversed, event {question.event} plans {found}, not {wanted}")

    @law("No host synchronisation.")
    def test_the_host_never_waits(self, case: RouterCase) -> None:
        for question, _ in self._history(case.setting()):
            asked = self._asked(question)
            with Operators() as operators:
                self.part.plan(*asked, question.setting.capacities)
            require(not operators.waits, f"it waits for the device: {', '.join(sorted(operators.waits))}")

    def _history(self, setting: Setting) -> Iterator[tuple[Question, MovePlan]]:
        """Event after event, and what was planned there."""
        question = first_event(setting)
        for event in range(EVENTS):
            plan = self._plan(question, self.part)
            yield question, plan
            if event + 1 < EVENTS:
                question = question.after(plan)

    def _plan(self, question: Question, router: TierRouter) -> MovePlan:
        rankings, windows, costs = self._asked(question)
        return moved(router.plan(rankings, windows, costs, question.setting.capacities), torch.device("cpu"))

    def _asked(self, question: Question) -> tuple[Mapping[str, Tensor], Windows, Costs]:
        rankings = {name: question.scores(number) for number, name in enumerate(self.part.rankings)}
        return moved((rankings, question.windows(), question.costs()), self.device)

    def _accepted(self) -> list[int]:
        accepted, reasons = [], []
        for tiers in range(1, MOST_TIERS + 1):
            try:
                self.part.check(tiers)
                accepted.append(tiers)
            except PolicyError as error:
                reasons.append(f"{tiers}: {error}")
        if not accepted:
            raise ValueError(f"{self.part!r} accepts none of 1 to {MOST_TIERS} tiers: {'; '.join(reasons)}")
        return accepted
