"""What becomes of the events of ``nan``: reached, masked or skipped."""

from __future__ import annotations

from collections.abc import Set

from amanda.inline import Counter
from amanda_tools.nan.events import NonFiniteEvent


class Fates:
    """Counts for each event in how many iterations it had which fate."""

    def __init__(self) -> None:
        # The events of this iteration: True where the outputs of its forward pass were finite,
        # False where not all were, or are not known; None outside of a pass that has ended.
        self._now: dict[NonFiniteEvent, bool | None] = {}
        # The events of the iteration before, with the fates that were counted.
        self._before: dict[NonFiniteEvent, str] = {}
        # Whether outputs of this iteration were finite, and gradients and parameters; None: not
        # known.
        self._outputs: set[bool | None] = set()
        self._gradients: set[bool | None] = set()
        # The phases in which one that is not finite has been found before a step, and whether an
        # optimizer has computed with it.
        self._found_in: set[str] = set()
        self._is_used = False
        # How often optimizers have written parameters, and how often before this iteration.
        self.updates = Counter()
        self._updates_before = 0

    def note(self, event: NonFiniteEvent) -> None:
        """Note an execution of the event's operator."""
        if self._now.get(event) is not False:
            self._now[event] = None

    def is_current(self, event: NonFiniteEvent) -> bool:
        """True if the event's operator has produced in this iteration."""
        return event in self._now

    def look(self, is_finite: bool) -> None:
        """Note whether a gradient or a parameter is finite."""
        self._gradients.add(is_finite)

    def note_check(self, phase: str) -> None:
        """A tensor is asked in a phase whether it is finite, and it is not."""
        self._found_in.add(phase)

    def note_update(self) -> None:
        """An operator of an optimizer gives something that is not finite."""
        self._is_used = True
        self.look(False)

    def end_forward(self, model: str, were_finite: Set[bool | None]) -> None:
        """End a forward pass.

        Args:
            model: what the ids of its operators begin with.
            were_finite: of each output of the model whether it was finite; None for unknown.
        """
        self._outputs |= were_finite
        for event, known in self._now.items():
            is_within = event.op.phase == "forward" and event.op.id.startswith(model)
            if known is None and is_within:
                self._now[event] = were_finite == {True}

    def end_iteration(self) -> None:
        """Count the fates of the events of this iteration; ``""`` where they are not known."""
        self._before = self._decide()
        for event, fate in self._before.items():
            event.fates[fate] += 1
        self._now, self._outputs, self._gradients = {}, set(), set()
        self._found_in, self._is_used = set(), False
        self._updates_before = self.updates.count

    def _decide(self) -> dict[NonFiniteEvent, str]:
        # Among several, those masked before are harmless, and those that left finite outputs.
        able = [event for event in self._now if event.fate in ("", "reached")]
        causes = [event for event in able if not self._now[event]] or able or list(self._now)
        fates = dict.fromkeys(causes, self._of_causes())
        return {event: fates.get(event) or self._otherwise(event) for event in self._now}

    def _of_causes(self) -> str:
        if self._found_in and False in self._gradients and not self._is_used:
            has_stepped = self.updates.count > self._updates_before
            if has_stepped and False not in self._outputs:
                # With other gradients.
                return "masked"
            if not has_stepped and "optimizer" in self._found_in:
                return "skipped"
        return "reached" if False in self._outputs | self._gradients else ""

    def _otherwise(self, event: NonFiniteEvent) -> str:
        # Without gradients the outputs of models say nothing about what follows them, as a loss.
        found = self._outputs | self._gradients
        is_known = found and (self._now[event] or self._gradients)
        return "masked" if is_known and None not in found else ""

    def end_step(self, is_skipped: bool) -> None:
        """A gradient scaler tells whether it has skipped the step of the last iteration.

        Its optimizer may have ended the iteration, or not have been called.
        """
        before, self._before = self._before, {}
        if not is_skipped:
            return
        self.end_iteration()
        for event, fate in [*before.items(), *self._before.items()]:
            if fate != "masked":
                event.fates[fate] -= 1
                event.fates["skipped"] += 1
        self._before = {}
