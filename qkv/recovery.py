"""What to try after a step's forward failed, so that those who have nothing to do with it finish, and with the right tokens.

Takes: the plan that failed and the exception. Gives: the requests that end with it; and, through the scheduler, who may run next.

Memory is nobody's fault: the step is tried again with half its tokens, and if that fails too, its requests end. Anything else is
put down to one request, which is found by halving: the requests of the step run in two groups, one after the other, and a group
that fails is halved again, until one request fails alone. A request is cleared once it has got past the tokens it failed with.
Does not know about: tensors, what a forward is.
"""

from qkv.scheduler import Scheduler
from qkv.types import Request, Status, StepPlan

Suspects = list[tuple[Request, int]]  # a request, and the tokens that it must have computed to be cleared
GOOD_STEPS = 32  # before a lowered limit of tokens is doubled


class Recovery:
    """One per engine. Knows who is suspected, and whether the step that runs now is a second try."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[Suspects] = []  # the last one may run
        self._second_try = False
        self._good_steps = 0

    def suspects(self, plan: StepPlan) -> Suspects:
        """Of a plan that is about to run. Ask before rolling back."""
        decodes = [(r, r.num_computed + 1) for r in plan.decodes]
        return decodes + [(chunk.request, chunk.end) for chunk in plan.prefills]

    def failed(self, suspects: Suspects, tokens: int, error: Exception) -> list[Request]:
        """The forward over these failed, and everything was rolled back. Returns the requests that end with the error."""
        self._good_steps = 0
        if lacks_memory(error):
            if self._second_try or tokens < 2:
                self._second_try = False
                return [request for request, _ in suspects]
            self._second_try, self._scheduler.token_limit = True, tokens // 2
            return []
        if len(suspects) == 1:
            return [suspects[0][0]]
        ran = {request.id for request, _ in suspects}
        others = [s for s in (self._groups.pop() if self._groups else []) if s[0].id not in ran]
        half = len(suspects) // 2
        self._groups += [group for group in (others, suspects[half:], suspects[:half]) if group]
        self._allow()
        return []

    def succeeded(self) -> bool:
        """A step ran. Whether another group is to run now, for which the caller rolls back: what runs has been cleared."""
        self._second_try = False
        if self._scheduler.token_limit is not None:
            self._good_steps += 1
            if self._good_steps >= GOOD_STEPS:
                self._good_steps, doubled = 0, 2 * self._scheduler.token_limit
                self._scheduler.token_limit = doubled if doubled < self._scheduler.config.max_num_batched_tokens else None
        if not self._groups:
            return False
        self._groups[-1] = [(request, tokens) for request, tokens in self._groups[-1] if request.num_computed < tokens]
        return self.forget_ended()

    def forget_ended(self) -> bool:
        """Drop suspects that have ended, and groups without any. Whether the turn has passed to another group."""
        if not self._groups:
            return False
        groups = [[s for s in group if s[0].status is not Status.FINISHED] for group in self._groups]
        passed, self._groups = not groups[-1], [group for group in groups if group]
        self._allow()
        return passed and bool(self._groups)

    def _allow(self) -> None:
        self._scheduler.allowed = frozenset(request.id for request, _ in self._groups[-1]) if self._groups else None


def lacks_memory(error: Exception) -> bool:
    """torch.OutOfMemoryError, MemoryError, or the RuntimeError that torch's allocator of host memory raises."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error).lower())
