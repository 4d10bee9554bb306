"""Write a policy in a file of your own: `--policy-file examples/own_policy.py --policy fair`."""

import numpy as np
from numpy.typing import NDArray

from lowtide import LLM
from lowtide.extend import Placement, PolicyInputs, Ranks, Recipe, Step, register_policy


class Fair(Placement):
    """Experts stay by the passes in which they were used, not by their tokens."""

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs.num_layers, inputs.num_experts)
        self.ranks = np.zeros((inputs.num_layers, inputs.num_experts))

    def begin_pass(
        self, step: Step, num_residents: NDArray[np.int64], capacity: NDArray[np.int64]
    ) -> Ranks:
        return Ranks(self.ranks, capacity, per_expert=1)  # the highest ranks stay


register_policy("fair", Recipe(Fair))

if __name__ == "__main__":
    for policy in ("fair", "lru"):
        with LLM("demo:autoregressive", policy=policy, host_memory="6MiB", context=256) as llm:
            [answer] = llm.generate("Sort 93 21 57 40 12")
            print(policy, answer.text, f"{llm.stats()['hit_rate']:.0%}")
