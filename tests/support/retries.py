"""An environment of the package verifiers, as its users write them."""

from typing import Any


def again_until_right(turns: int = 2) -> Any:
    """Asks for a sum, says `no` to what is wrong, and rewards the right answer and a short one."""
    import verifiers as vf
    from datasets import Dataset

    class Again(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "no"}]

        @vf.stop
        async def is_right(self, state: Any) -> bool:
            said = state["trajectory"][-1]["completion"] if state["trajectory"] else None
            return bool(said) and said[-1]["content"] == state["answer"]

    def right(completion: Any, answer: str, **kwargs: Any) -> float:
        return float(completion[-1]["content"] == answer)

    def short(completion: Any, **kwargs: Any) -> float:
        return float(len(completion) == 1)

    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(3)]
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    return Again(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=turns)
