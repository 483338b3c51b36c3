"""The commands that import GSM8K: `from support.gsm8k import imports`."""

from pathlib import Path

SOLUTIONS = """
    SELECT t.task_id, s.try.solution AS response_text, s.try.is_correct::INT AS reward,
           {'model': s.model} AS metadata
    FROM (UNPIVOT input ON COLUMNS(* EXCLUDE (question, ground_truth))
          INTO NAME model VALUE try) s
    JOIN tasks t ON t.prompt_text = s.question AND t.split = 'test'
"""


def imports(data: Path) -> list[list[str]]:
    """Return the commands that import it all."""
    gsm8k = ["--format", "gsm8k", "--taskset", "gsm8k"]
    solutions = str(data / "example_model_solutions.jsonl")
    return [
        ["import", "tasks", str(data / "train.jsonl"), *gsm8k],
        ["import", "tasks", str(data / "test.jsonl"), *gsm8k, "--split", "test"],
        ["import", "experiences", solutions, "--sql", SOLUTIONS],
    ]
